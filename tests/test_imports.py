"""Import lines: bound where a fix needs the name, in the right place, and gone once nothing uses them."""

from __future__ import annotations

import textwrap

import pytest
from toy_rules import MAKE_CACHE, Rename, edit, finding, scanner

from ddaudit.auditor.finding import Import
from ddaudit.auditor.fixing.applying import apply_fixes
from ddaudit.auditor.fixing.edits import splice
from ddaudit.auditor.fixing.imports import add_imports, drop_unused
from ddaudit.auditor.fixing.settling import settle
from ddaudit.auditor.sources.source import SourceFile

LINE = "from ddaudit.runtime import make_cache"
TO_MAKE_CACHE = Rename("DynamicCache", "make_cache", imports=(MAKE_CACHE,))


def source(text: str, path: str = "a.py") -> SourceFile:
    return SourceFile(path, textwrap.dedent(text).lstrip("\n"))


def with_import(text: str, *needed: Import) -> str:
    """The text with `make_cache`, or what is asked for, imported."""
    file = source(text)
    return splice(file, add_imports(file, set(needed or (MAKE_CACHE,)))).text


def fixed(text: str, *rules: Rename, **sources: str) -> str:
    """The text after all passes, beside other files."""
    files = {"a.py": source(text)} | {f"{name}.py": source(other, f"{name}.py") for name, other in sources.items()}
    result = settle(files, scanner(*(rules or (TO_MAKE_CACHE,))))
    assert result.errors == {}
    return result.sources["a.py"].text


def check(before: str, after: str) -> None:
    assert with_import(before) == textwrap.dedent(after).lstrip("\n")


# Where it goes


def test_below_the_last_import_of_the_runtimes_packages() -> None:
    check(
        """
        import os

        import torch
        from transformers import (
            AutoModel,  # why
        )  # noqa

        from .session import clock
        """,
        f"""
        import os

        import torch
        from transformers import (
            AutoModel,  # why
        )  # noqa
        {LINE}

        from .session import clock
        """,
    )


def test_below_third_party_imports_where_the_runtimes_are_not_imported() -> None:
    check("import os\nimport numpy\nfrom . import x\n", f"import os\nimport numpy\n{LINE}\nfrom . import x\n")


def test_in_a_group_of_its_own_below_the_standard_library() -> None:
    check('"""Doc."""\nimport os\n\nx = 1\n', f'"""Doc."""\nimport os\n\n{LINE}\n\nx = 1\n')


def test_below_shebang_licence_docstring_and_future() -> None:
    check(
        '#!/usr/bin/env python\n# Licence\n"""Doc."""\nfrom __future__ import annotations\n\nx = 1\n',
        f'#!/usr/bin/env python\n# Licence\n"""Doc."""\nfrom __future__ import annotations\n\n{LINE}\n\nx = 1\n',
    )
    check(
        "#!/usr/bin/env python\n# Licence\n\n\ndef f():\n    pass\n",
        f"#!/usr/bin/env python\n# Licence\n\n\n{LINE}\n\n\ndef f():\n    pass\n",
    )
    check('"""Doc."""\n', f'"""Doc."""\n\n{LINE}\n')
    check("# Licence", f"# Licence\n{LINE}")
    check("", f"{LINE}\n")


@pytest.mark.parametrize(
    "set_up",
    [
        'os.environ["CUDA_VISIBLE_DEVICES"] = "0"',
        'os.environ.setdefault("HF_HOME", "x")',
        'sys.path.insert(0, "..")',
        "sys.path[0] = '..'",
        "sys.path += ['..']",
        "if True:\n    os.environ['X'] = '1'",
        "try:\n    del os.environ['X']\nexcept KeyError:\n    pass",
        "dotenv.load_dotenv()",
    ],
)
def test_never_above_a_line_that_sets_up_the_process(set_up: str) -> None:
    """Above it, the import would choose another device, or find another package."""
    check(
        f"import os, sys\n{set_up}\nimport torch\nx = 1\n", f"import os, sys\n{set_up}\nimport torch\n{LINE}\nx = 1\n"
    )
    check(
        f"import torch\nimport os, sys\n{set_up}\nx = 1\n", f"import torch\nimport os, sys\n{set_up}\n{LINE}\nx = 1\n"
    )
    check(f"import torch\n{set_up}\nfrom model import y\n", f"import torch\n{set_up}\nfrom model import y\n{LINE}\n")


def test_a_call_among_imports_may_set_something_up() -> None:
    check(
        "import torch\n\ndef set_up():\n    pass\n\nset_up()\nimport transformers\n",
        f"import torch\n\ndef set_up():\n    pass\n\nset_up()\nimport transformers\n{LINE}\n",
    )


def test_reading_the_environment_sets_nothing_up() -> None:
    check(
        "import torch\n\nDATA = os.environ['DATA']\ntorch.manual_seed(0)\n",
        f"import torch\n{LINE}\n\nDATA = os.environ['DATA']\ntorch.manual_seed(0)\n",
    )


def test_above_the_first_use_while_the_module_is_imported() -> None:
    check(
        "import torch\n\ndef f():\n    return make_cache()\n\nCACHE = f()\nos.environ['X'] = '1'\n",
        f"import torch\n{LINE}\n\ndef f():\n    return make_cache()\n\nCACHE = f()\nos.environ['X'] = '1'\n",
    )


def test_the_main_guard_is_no_place_for_it() -> None:
    check(
        "import torch\nif __name__ == '__main__':\n    os.environ['X'] = '1'\n",
        f"import torch\n{LINE}\nif __name__ == '__main__':\n    os.environ['X'] = '1'\n",
    )


def test_in_the_try_that_guards_the_only_import_of_the_runtimes_packages() -> None:
    """A module that does without transformers must still import without it."""
    check(
        "import os\n\ntry:\n    import transformers\nexcept ImportError:\n    transformers = None\n",
        f"import os\n\ntry:\n    import transformers\n    {LINE}\nexcept ImportError:\n    transformers = None\n",
    )


def test_not_in_the_middle_of_a_line_of_several_statements() -> None:
    check("import torch; x = '''\n'''; y = 1\nz = 1\n", f"import torch; x = '''\n'''; y = 1\n{LINE}\nz = 1\n")


# One line


def test_names_join_the_line_that_is_there_in_order() -> None:
    needed = [Import("ddaudit.runtime", name) for name in ("make_cache", "crop_cache")]
    before = "import torch\nfrom ddaudit.runtime import final_norm, text_config as config\n"
    after = "import torch\nfrom ddaudit.runtime import crop_cache, final_norm, make_cache, text_config as config\n"
    assert with_import(before, *needed) == after
    assert with_import(after, *needed) == after


def test_a_line_with_comments_or_an_order_of_its_own_keeps_them() -> None:
    before = "from ddaudit.runtime import (\n    text_config,  # flat\n    final_norm,\n)\n"
    after = "from ddaudit.runtime import (\n    text_config,  # flat\n    final_norm, make_cache,\n)\n"
    assert with_import(before) == after


def test_a_line_that_would_be_long_is_wrapped() -> None:
    names = [f"a_name_of_some_length_{i}" for i in range(6)]
    result = with_import("import torch\n", *(Import("ddaudit.runtime", name) for name in names))
    assert result == "import torch\nfrom ddaudit.runtime import (\n" + "".join(f"    {n},\n" for n in names) + ")\n"


def test_several_fixes_and_passes_make_one_line() -> None:
    crop = Rename("crop", "crop_cache", code="TOY2", imports=(Import("ddaudit.runtime", "crop_cache"),))
    after = fixed("import torch\ncrop(crop(DynamicCache(x)), 1)\n", TO_MAKE_CACHE, crop)
    line = "from ddaudit.runtime import crop_cache, make_cache"
    assert after == f"import torch\n{line}\ncrop_cache(crop_cache(make_cache(x)), 1)\n"


# Names that mean something else


@pytest.mark.parametrize(
    "text",
    [
        "def make_cache(): pass\nc = DynamicCache()\n",
        "from cachelib import make_cache\nc = DynamicCache()\n",
        "import cachelib as make_cache\nc = DynamicCache()\n",
        "def f(make_cache):\n    return DynamicCache()\n",
        "def f():\n    make_cache = 1\n    return [DynamicCache() for _ in range(2)]\n",
        "def f():\n    return [DynamicCache() for make_cache in range(2)]\n",
        "def f():\n    global make_cache\n    make_cache = 1\nc = DynamicCache()\n",
        "class A:\n    make_cache = 1\n    c = DynamicCache()\n",
        "from cachelib import *\nc = DynamicCache()\nd = make_cache\n",
        f"try:\n    {LINE}\nexcept ImportError:\n    make_cache = None\nc = DynamicCache()\n",
    ],
)
def test_a_fix_whose_name_is_taken_is_dropped_and_imports_nothing(text: str) -> None:
    file = source(text)
    applied = apply_fixes(file, list(TO_MAKE_CACHE(file)))
    assert applied.source.text == text
    assert [item.reason.startswith("`make_cache` ") for item in applied.refused] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "def f(make_cache):\n    return 1\nc = DynamicCache()\n",
        "class A:\n    make_cache = 1\n    def f(self):\n        return DynamicCache()\n",
        "x.make_cache = 1\nc = DynamicCache()\n",
    ],
)
def test_the_name_elsewhere_is_no_obstacle(text: str) -> None:
    assert fixed(text) == f"{LINE}\n\n" + ("\n" if text[0] in "dc" else "") + text.replace(
        "DynamicCache()", "make_cache()"
    )


def test_an_import_in_the_function_serves_it() -> None:
    text = "def f():\n    from ddaudit.runtime import make_cache\n    return DynamicCache()\n"
    assert fixed(text) == text.replace("DynamicCache", "make_cache")


def test_an_import_for_type_checking_does_not_serve_at_run_time() -> None:
    text = f"import torch\nif TYPE_CHECKING:\n    {LINE}\nc = DynamicCache()\n"
    assert fixed(text) == f"import torch\n{LINE}\nif TYPE_CHECKING:\n    {LINE}\nc = make_cache()\n"


# Names left unused


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("from transformers import DynamicCache\n", ""),
        ("from transformers import AutoModel, DynamicCache\n", "from transformers import AutoModel\n"),
        ("from transformers import DynamicCache, AutoModel\n", "from transformers import AutoModel\n"),
        (
            "from transformers import (\n    AutoModel,\n    DynamicCache,\n)\n",
            "from transformers import (\n    AutoModel,\n)\n",
        ),
        (
            "from transformers import (\n    DynamicCache,\n    AutoModel,\n)\n",
            "from transformers import (\n    AutoModel,\n)\n",
        ),
        ("from transformers import A, DynamicCache, B\n", "from transformers import A, B\n"),
        ("from transformers.cache_utils import Old as DynamicCache\n", ""),
    ],
)
def test_a_name_that_only_fixed_code_used_goes(line: str, left: str) -> None:
    before, after = source(line + "c = DynamicCache()\n"), source(line + "c = make_cache()\n")
    assert splice(after, drop_unused(before, after)).text == left + "c = make_cache()\n"


@pytest.mark.parametrize(
    "text",
    [
        "from transformers import DynamicCache\nc = DynamicCache()\nkinds = (DynamicCache,)\n",
        "from transformers import DynamicCache\nc = DynamicCache()\n__all__ = ['DynamicCache']\n",
        "from transformers import DynamicCache\nc = DynamicCache()\ndef f(x: 'DynamicCache | None'): pass\n",
        "from transformers import DynamicCache  # noqa: F401\nc = DynamicCache()\n",
        "from transformers import DynamicCache as DynamicCache\nc = DynamicCache()\n",
        "try:\n    from transformers import DynamicCache\nexcept ImportError:\n    pass\nc = DynamicCache()\n",
        "import os; from transformers import DynamicCache\nc = DynamicCache()\n",
    ],
)
def test_a_name_with_another_use_stays(text: str) -> None:
    assert "DynamicCache" in fixed(text).replace("c = DynamicCache", "")
    before = source(text)
    after = before.with_text(text.replace("c = DynamicCache()", "c = make_cache()"))
    assert drop_unused(before, after) == ()


def test_a_name_that_was_never_used_stays() -> None:
    text = "from transformers import AutoModel, DynamicCache\nc = DynamicCache()\n"
    assert fixed(text) == f"from transformers import AutoModel\n{LINE}\nc = make_cache()\n"


@pytest.mark.parametrize(
    "other", ["from a import DynamicCache\n", "from .a import *\n", "import a\na.DynamicCache()\n"]
)
def test_a_name_that_another_file_takes_from_here_stays(other: str) -> None:
    after = fixed("from transformers import DynamicCache\nc = DynamicCache()\n", b=other)
    assert after == f"from transformers import DynamicCache\n{LINE}\nc = make_cache()\n"


def test_a_name_that_another_file_has_from_elsewhere_does_not_keep_it() -> None:
    after = fixed(
        "from transformers import DynamicCache\nc = DynamicCache()\n", b="import a\nfrom c import DynamicCache\n"
    )
    assert after == f"{LINE}\nc = make_cache()\n"


def test_the_init_of_a_package_keeps_all_its_names() -> None:
    file = source("from transformers import DynamicCache\nc = DynamicCache()\n", "p/__init__.py")
    after = settle({file.path: file}, scanner(TO_MAKE_CACHE)).sources[file.path].text
    assert after == f"from transformers import DynamicCache\n{LINE}\nc = make_cache()\n"


def test_a_fix_that_is_dropped_leaves_no_import_behind() -> None:
    file = source("import torch\nc = old(\n    # why\n)\n")
    fix = finding(file, (edit(file, "old(\n    # why\n)", "make_cache()"),), imports=(MAKE_CACHE,))
    applied = apply_fixes(file, [fix])
    assert applied.source.text == file.text
    assert len(applied.refused) == 1

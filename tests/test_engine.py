"""The engine: which files are parsed, what a scan returns, and that bad input ends in bounded time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from ddaudit.auditor.engine import scan, scan_sources
from ddaudit.auditor.finding import Applicability, Confidence
from ddaudit.auditor.sources.source import Skipped, SkipReason, SourceFile

LOADS = """
from transformers import AutoModelForCausalLM
from decoding import step
step(AutoModelForCausalLM.from_pretrained("name"), None)
"""
STEPS = """
def step(m, ids):
    return m.model.embed_tokens(ids)
"""


def sources(**files):
    return {f"{name}.py": SourceFile(f"{name}.py", textwrap.dedent(text).lstrip("\n")) for name, text in files.items()}


def seen(result):
    return [(finding.path, finding.span.line, finding.code) for finding in result.findings]


def test_nothing_to_find():
    result = scan_sources(sources(a="x = 1\n", b=""))
    assert (result.findings, result.skipped, result.num_scanned, result.exit_code) == ((), (), 2, 0)


def test_facts_of_one_file_serve_another():
    result = scan_sources(sources(main=LOADS, decoding=STEPS))
    assert seen(result) == [("decoding.py", 2, "DDA201")]
    finding = result.findings[0]
    assert finding.confidence is Confidence.PROVEN
    assert finding.applicability is Applicability.SAFE
    assert finding.evidence[0].startswith("main.py:3: ")
    assert result.exit_code == 1


def test_a_file_without_markers_still_carries_facts():
    files = sources(
        main="from decoding import step\nfrom loading import load\nstep(load(), 1)\n",
        loading="from transformers import AutoModelForCausalLM as A\ndef load():\n    return A.from_pretrained('n')\n",
        decoding=STEPS,
    )
    assert scan_sources(files).findings[0].confidence is Confidence.PROVEN


def test_less_than_proven_is_never_safe():
    result = scan_sources(sources(decoding=STEPS))
    assert [finding.confidence for finding in result.findings] == [Confidence.LIKELY]
    assert result.findings[0].applicability is Applicability.UNSAFE
    assert (len(result.fixable()), len(result.fixable(unsafe=True))) == (0, 1)


def test_guesses_are_off_by_default():
    files = sources(a="def f(model, ids, m):\n    return model(ids, attention_mask=m[None, None])\n")
    assert scan_sources(files).findings == ()
    assert len(scan_sources(files, min_confidence=Confidence.GUESS).findings) == 1


def test_findings_are_sorted_whatever_the_order_of_files():
    files = sources(b=STEPS + STEPS, a=STEPS, main=LOADS)
    forward = scan_sources(files)
    backward = scan_sources(dict(reversed(files.items())))
    assert forward.findings == backward.findings
    assert seen(forward) == sorted(seen(forward))


def test_a_file_that_does_not_parse_is_a_failure_and_the_rest_is_scanned():
    result = scan_sources(sources(bad="def f(:\n", nul="x = '\0'\n", decoding=STEPS))
    assert [(entry.path, entry.reason) for entry in result.skipped] == [
        ("bad.py", SkipReason.SYNTAX),
        ("nul.py", SkipReason.SYNTAX),
    ]
    assert "line 1" in result.skipped[0].detail
    assert len(result.findings) == 1
    assert result.exit_code == 2


def test_what_was_left_out_by_choice_is_no_failure():
    skipped = (Skipped("build", SkipReason.EXCLUDED),)
    result = scan_sources(sources(a="x = 1\n"), skipped)
    assert (result.skipped, result.exit_code) == (skipped, 0)


def test_select_and_ignore():
    files = sources(decoding=STEPS + "    m.lm_head\n", main=LOADS)
    assert {code for _, _, code in seen(scan_sources(files))} == {"DDA201", "DDA202"}
    assert {code for _, _, code in seen(scan_sources(files, select=("lm-head",)))} == {"DDA202"}
    assert {code for _, _, code in seen(scan_sources(files, ignore=("DDA202",)))} == {"DDA201"}


def test_scan_and_scan_sources_agree(tmp_path):
    for name, source in sources(main=LOADS, decoding=STEPS).items():
        (tmp_path / name).write_text(source.text)
    assert scan([tmp_path]).findings == scan_sources(sources(main=LOADS, decoding=STEPS)).findings


@pytest.mark.parametrize(
    "expr",
    [
        "f'{m.model.embed_tokens}'",
        "f'''\n{m.model.embed_tokens}'''",
    ],
)
def test_inside_an_f_string_nothing_is_edited(expr):
    """A rewrite may clash with the string's quotes, and parsers before 3.12 misplace what stands inside."""
    files = sources(a=f"from transformers import PreTrainedModel\ndef f(m: PreTrainedModel):\n    return {expr}\n")
    (finding,) = scan_sources(files).findings
    assert finding.fix is None
    assert finding.span.line == 3


@pytest.mark.parametrize(
    "statement",
    [
        "m.model.embed_tokens = 1",
        "m.model.embed_tokens += 1",
        "del m.model.embed_tokens",
        "for m.model.embed_tokens in m: pass",
        "with m as m.model.embed_tokens: pass",
        "match m:\n        case m.model.embed_tokens: pass",
        "m.model.embed_tokens(  # why\n    1)",
        "m.model.\\\n        embed_tokens",
    ],
)
def test_a_path_that_is_not_only_read_stays(statement):
    text = f"from transformers import PreTrainedModel\ndef f(m: PreTrainedModel):\n    {statement}\n"
    (finding,) = scan_sources(sources(a=text)).findings
    edits = finding.fix.edits if finding.fix else ()
    stays = not statement.startswith(("m.model.embed_tokens(", "m.model.\\"))
    assert (edits == ()) is stays


LONG = {
    "rebound often": "".join("    x = model(x, past_key_values=cache).logits\n" for _ in range(1000)),
    "long list": "    a = [" + ", ".join(["model.model.layers"] * 3000) + "]\n",
    "long sum": "    a = " + " + ".join(["x"] * 900) + "\n",
    "long elif": "    if x == 0: pass\n" + "".join(f"    elif x == {i}: cache.crop({i})\n" for i in range(400)),
    "deep chain": "    a = model" + ".model" * 800 + ".layers\n    b = x" + ".to(1)" * 800 + "\n",
}


@pytest.mark.parametrize("body", LONG.values(), ids=LONG)
def test_awkward_files_end_soon(body):
    """Each of these is quadratic, or too deep, in a naive walk."""
    head = "from transformers import DynamicCache\ndef f(model, x, cache: DynamicCache):\n"
    begin = time.process_time()
    result = scan_sources(sources(a=head + body))
    assert time.process_time() - begin < 5
    assert result.num_scanned + len(result.failed) == 1


def test_a_scan_imports_neither_torch_nor_libcst():
    code = (
        "import sys; from ddaudit.auditor.engine import scan_sources\n"
        "from ddaudit.auditor.sources.source import SourceFile\n"
        "scan_sources({'a.py': SourceFile('a.py', 'from transformers import DynamicCache\\nDynamicCache()')})\n"
        "print(sorted({'torch', 'transformers', 'libcst'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_without_a_word_of_the_field_nothing_is_learnt(monkeypatch):
    """The cheap gate: facts cost ten times the parsing, which alone says whether the file is Python at all."""
    from ddaudit.auditor.scanning import examining

    learnt = []
    real = examining.learn

    def learn(trees, failed):
        learnt.append(sorted(trees))
        return real(trees, failed)

    monkeypatch.setattr(examining, "learn", learn)
    result = scan_sources(sources(a="x = 1\n", b="import json\n", c="def f(:\n"))
    assert (learnt, result.num_scanned, result.exit_code) == ([], 2, 2)
    scan_sources(sources(a="x = 1\n", decoding=STEPS))
    assert learnt == [["a.py", "decoding.py"]]


def test_a_file_with_nothing_to_find_starts_no_process_and_imports_no_parser(tmp_path):
    """Most runs of a hook: LibCST alone takes longer to import than all the rest."""
    (tmp_path / "a.py").write_text("x = 1\n")
    code = (
        "import sys, subprocess, multiprocessing\n"
        "from ddaudit.auditor.cli import main\n"
        "def no(*args, **kwargs): raise AssertionError('a process')\n"
        "subprocess.Popen = multiprocessing.Process = no\n"
        f"sys.argv = ['ddaudit', 'scan', {str(tmp_path / 'a.py')!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print('exit', end.code)\n"
        "print(sorted({'torch', 'transformers', 'libcst'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.splitlines()[-2:] == ["exit 0", "[]"], found.stderr

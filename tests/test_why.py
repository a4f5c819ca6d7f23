"""`--why` and `explain FILE:LINE`: each step from where a value is made to where it is used."""

from __future__ import annotations

import textwrap

import pytest
from click.testing import CliRunner

from ddaudit.auditor.cli import main
from ddaudit.auditor.engine import scan, scan_sources
from ddaudit.auditor.finding import Confidence
from ddaudit.auditor.sources.source import SourceFile


def evidence(code: str, **files: str) -> tuple[str, ...]:
    """Of the only finding of a fixed path, in `a.py` beside the other files."""
    texts = {"a": code, **files}
    sources = {
        f"{name}.py": SourceFile(f"{name}.py", textwrap.dedent(text).lstrip("\n")) for name, text in texts.items()
    }
    found = scan_sources(sources, select=("model-path",), min_confidence=Confidence.GUESS).findings
    assert len(found) == 1
    return found[0].evidence


def test_what_stands_in_the_line_needs_no_step() -> None:
    code = """
        from transformers import AutoModelForCausalLM

        layers = AutoModelForCausalLM.from_pretrained("name").model.layers
    """
    assert evidence(code) == (
        "a.py:3: `AutoModelForCausalLM.from_pretrained` returns a Transformers model with a head",
    )


def test_an_annotation_is_the_whole_reason() -> None:
    code = """
        from transformers import PreTrainedModel

        def f(model: PreTrainedModel):
            return model.model.layers
    """
    assert evidence(code) == ("a.py:3: the annotation is `PreTrainedModel`",)


def test_aliases_attributes_and_loops_are_steps() -> None:
    code = """
        from transformers import AutoModelForCausalLM

        class Runner:
            def __init__(self, name):
                loaded = AutoModelForCausalLM.from_pretrained(name)
                self.target = loaded

            def layers(self):
                for each in (self.target,):
                    return each.model.layers
    """
    assert evidence(code) == (
        "a.py:5: `AutoModelForCausalLM.from_pretrained` returns a Transformers model with a head",
        "a.py:5: `loaded` is `AutoModelForCausalLM.from_pretrained(name)`",
        "a.py:6: `target` of `Runner` is `loaded`",
        "a.py:9: `each` goes over `(self.target,)`",
    )


def test_calls_returns_and_imports_between_files_are_steps() -> None:
    code = """
        from loading import load

        def layers(model):
            return model.model.layers

        layers(load("name"))
    """
    loading = """
        from transformers import AutoModelForCausalLM

        def load(name):
            return AutoModelForCausalLM.from_pretrained(name)
    """
    assert evidence(code, loading=loading) == (
        "loading.py:4: `AutoModelForCausalLM.from_pretrained` returns a Transformers model with a head",
        "loading.py:4: `load` returns `AutoModelForCausalLM.from_pretrained(name)`",
        "a.py:6: `layers` is given `load('name')` as `model`",
    )


REPOSITORY = {
    "own.py": """
        from torch import nn

        class Tiny(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = nn.Module()

        def layers(tiny: Tiny):
            return tiny.model.layers
    """,
    "main.py": """
        from transformers import PreTrainedModel

        def layers(model: PreTrainedModel):
            return model.model.layers
    """,
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    for name, text in REPOSITORY.items():
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip("\n"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_shows_the_evidence_and_the_fix_below_its_finding(repository) -> None:
    plain, why = (CliRunner().invoke(main, ["scan", ".", *flags]).output.splitlines() for flags in ([], ["--why"]))
    assert why[:4] == [
        *plain[:2],
        "           proven: main.py:3: the annotation is `PreTrainedModel`",
        "           fix: safe, the accessor returns the same module on the families whose path this is",
    ]
    assert [line for line in why if line not in plain] == why[2:4]


def test_an_unsafe_fix_does_not_give_the_reason_of_the_safe_one(repository) -> None:
    """What the decoder as a whole is differs between families; what its parts are does not."""
    (repository / "main.py").write_text(
        "from transformers import PreTrainedModel\n\ndef parts(model: PreTrainedModel, ids):\n"
        "    return model.model(ids), model.model.layers\n"
    )
    whole, layers = scan((repository / "main.py",), select=("model-path",)).findings
    assert whole.fix is not None and layers.fix is not None
    assert (whole.fix.applicability.value, layers.fix.applicability.value) == ("unsafe", "safe")
    assert "several towers" in whole.fix.reason
    assert "the same module" in layers.fix.reason


def test_a_silence_is_explained(repository) -> None:
    shown = CliRunner().invoke(main, ["explain", "own.py:9"])
    assert shown.exit_code == 0, shown.output
    assert "  `tiny`: instance of the repository's own class (own.py:3), proven\n" in shown.output
    assert shown.output.endswith("nothing is found here\n")


def test_a_finding_is_explained(repository) -> None:
    shown = CliRunner().invoke(main, ["explain", "main.py:4"]).output
    assert "  `model`: Transformers model with a head, proven\n    main.py:3: the annotation is" in shown
    assert shown.endswith("found: DDA201 model-path at model.model.layers\n")


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"def f(:\n", "syntax (line 1: "), (b"x = '\xe9'\n", "encoding (")],
    ids=["syntax", "encoding"],
)
def test_what_is_not_examined_is_explained_as_a_scan_does(data: bytes, reason: str, repository) -> None:
    (repository / "bad.py").write_bytes(data)
    shown = CliRunner().invoke(main, ["explain", "bad.py:1"])
    assert (shown.exit_code, shown.stdout) == (2, "")
    said = next(line for line in CliRunner().invoke(main, ["scan", "bad.py"]).output.splitlines() if reason in line)
    assert shown.stderr == f"error: {said}\n"


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_line_past_the_end_is_an_error(end: str, repository) -> None:
    (repository / "two.py").write_text(f"x = 1\ny = x{end}")
    for line, code in ((0, 2), (1, 0), (2, 0), (3, 2), (9, 2)):
        shown = CliRunner().invoke(main, ["explain", f"two.py:{line}"])
        assert shown.exit_code == code, line
        assert shown.stderr == (f"error: two.py has no line {line}: it has 2\n" if code else "")


def test_what_an_expression_can_hold_is_said_once(repository) -> None:
    (repository / "main.py").write_text(
        "from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel\n\n"
        "def layers(model: PreTrainedModel):\n    return model.model.layers\n\n"
        'layers(AutoModelForCausalLM.from_pretrained("name"))\n\n'
        "def either(flag, model: PreTrainedModel):\n    held = DynamicCache() if flag else model\n    return held.x\n"
    )
    lines = CliRunner().invoke(main, ["explain", "main.py:4"]).output.splitlines()
    model = "  `model`: Transformers model with a head, proven"
    assert [line for line in lines if line.startswith("  `model`: ")] == [model]
    # Both reasons stay below it.
    reasons = " ".join(lines[lines.index(model) :])
    assert "the annotation is" in reasons and "from_pretrained` returns a" in reasons
    lines = CliRunner().invoke(main, ["explain", "main.py:10"]).output.splitlines()
    assert sum(line.startswith("  `held`: ") for line in lines) == 1
    assert sum(line.startswith("    or ") for line in lines) == 1, lines


def test_a_folder_has_no_lines(repository) -> None:
    shown = CliRunner().invoke(main, ["explain", ".:4"])
    assert (shown.exit_code, shown.stderr) == (2, "error: . is a folder: name a file and a line of it\n")


def test_a_file_that_is_not_there_is_an_error(repository) -> None:
    shown = CliRunner().invoke(main, ["explain", "none.py:4"])
    assert shown.exit_code == 2
    assert "none.py does not exist" in shown.output

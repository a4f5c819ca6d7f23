"""`ddaudit run` from the command line, over small repositories written here: right, wrong, raising, not importing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_models import qwen3
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ddaudit.auditor.cli import main
from ddaudit.auditor.record import EntryRecord, PlainRecord, RunRecord
from ddaudit.auditor.reports.run_report import format_run, write_run
from ddaudit.runtime import make_cache
from ddaudit.runtime.caches.mode import note_graph
from ddaudit.runtime.checks.decoding import decode_plain
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.loading import Target
from ddaudit.runtime.running import references as references_module
from ddaudit.runtime.running.arguments import parse_argument
from ddaudit.runtime.running.binding import Offer, bind
from ddaudit.runtime.running.references import decode_replayed
from ddaudit.runtime.running.results import drain, read_output

HYBRID = (
    "--model",
    "tiny-hybrid",
    "--random-weights",
    "--device",
    "cpu",
    "--max-new-tokens",
    "24",
    "--num-prompts",
    "2",
)

# Verifies each block by reading the whole text anew: right on any architecture, and slow.
BLOCKS = """
from types import SimpleNamespace
import torch

class BlockDrafter(torch.nn.Module): ...

@torch.no_grad()
def generate(drafter: BlockDrafter, target, input_ids, max_new_tokens, block_size, mask_token_id, beam=1):
    ids, lengths = input_ids, []
    ids = torch.cat([ids, target(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    end = input_ids.shape[1] + max_new_tokens
    while ids.shape[1] < end:
        start = ids.shape[1] - 1
        block = torch.full((1, block_size), mask_token_id)
        block[:, 0] = ids[:, -1]
        embeddings = target.get_input_embeddings()(block)
        positions = torch.arange(start, start + block_size)[None]
        hidden = drafter(noise_embedding=embeddings, position_ids=positions, target_hidden=None)
        block[:, 1:] = target.get_output_embeddings()(hidden[:, 1:]).argmax(-1)
        logits = target(torch.cat([ids[:, :-1], block], 1), use_cache=False).logits[:, start:]
        choice = logits.argmax(-1)
        accepted = int((block[:, 1:] == choice[:, :-1]).cumprod(1).sum())
        ids = torch.cat([ids, block[:, 1 : accepted + 1], choice[:, accepted : accepted + 1]], 1)
        lengths.append(accepted + 1)
    return SimpleNamespace(output_ids=ids[:, :end], acceptance_lengths=lengths)
"""

# The well-known patch: keys and values are cut, a recurrent layer keeps what was rejected.
LEAK = """
import torch
from transformers import DynamicCache

@torch.no_grad()
def leak(target, input_ids, max_new_tokens):
    cache = DynamicCache(config=target.config)
    token = target(input_ids, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    out, length = [token], input_ids.shape[1]
    while len(out) < max_new_tokens:
        wrong = (token + 1) % target.get_output_embeddings().weight.shape[0]
        logits = target(torch.cat([token, wrong], 1), past_key_values=cache, use_cache=True).logits
        length += 1
        for layer in cache.layers:
            if getattr(layer, "keys", None) is not None:
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        token = logits[:, :1].argmax(-1)
        out.append(token)
    return torch.cat(out, 1)
"""

OTHERS = """
import torch

@torch.no_grad()
def one_by_one(model, prompt: list[int], max_tokens, eos_token_id, tokenizer=None):
    ids = torch.tensor([prompt])
    for _ in range(max_tokens):
        token = model(ids, use_cache=False).logits[:, -1:].argmax(-1)
        if token.item() == eos_token_id:
            break
        yield token.item()
        ids = torch.cat([ids, token], 1)

def raises(target, input_ids, max_new_tokens):
    target(input_ids)
    raise KeyError("state")

def leaves(target, input_ids, max_new_tokens):
    raise SystemExit(1)

def wants_more(target, input_ids, tree_width):
    return input_ids

def says_nothing(target, input_ids):
    return "text"

class Decoder:
    def __init__(self, target, drafter, width=1):
        self.target, self.width = target, width

    @torch.no_grad()
    def run(self, input_ids, max_new_tokens):
        for _ in range(max_new_tokens // self.width):
            token = self.target(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
        return input_ids

class Chain:
    @staticmethod
    def short(target, input_ids, max_new_tokens):
        return input_ids
"""


# A model that the runtime refuses, and a refusal of the repository's own.
REFUSED = """
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from ddaudit.runtime import make_cache

def generate(target, input_ids, max_new_tokens):
    config = RecurrentGemmaConfig(vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                  num_attention_heads=2, lru_width=16)
    make_cache(RecurrentGemmaForCausalLM(config))

def own(target, input_ids, max_new_tokens):
    raise NotImplementedError("beams")
"""


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forks") / "blocks"
    folder.mkdir()
    for name, text in {"blocks": BLOCKS, "leaky": LEAK, "others": OTHERS, "broken": "import no_such_package_2"}.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def run(fork, *arguments, model=HYBRID, tmp=None):
    """Exit code, output, and the record where one was written."""
    path = (tmp or fork.parent) / "record.json"
    path.unlink(missing_ok=True)
    result = CliRunner().invoke(main, ["run", str(fork), *model, "--json", str(path), *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    record = RunRecord.from_json(json.loads(path.read_text())) if path.exists() else None
    return result.exit_code, result.output, record


@pytest.mark.parametrize("loader", ["causal-lm", "conditional"])
def test_a_right_fork_is_identical(fork, loader):
    code, output, record = run(fork, "--entry", "blocks:generate", "--loader", loader)
    assert code == 0, output
    entry = record.entries[0]
    assert (entry.name, entry.verdict, entry.tokens) == ("blocks:generate", "identical", 48)
    assert {verdict.reason for verdict in entry.prompts} == {"every token equal"}
    assert entry.acceptance_length_mean > 2 and entry.acceptance_source == "entry"
    assert entry.rounds and set(entry.stage_s) == {"draft", "verify", "commit", "host"}
    assert record.plain.num_distinct_tokens > 20
    assert "executes the code" in output and "identical" in output


def test_a_fork_that_leaks_state_is_lossy(fork):
    """The check can fail: with attention alone cut back, a recurrent layer remembers rejected tokens."""
    code, output, record = run(fork, "--entry", "leaky:leak")
    assert code == 1, output
    entry = record.entries[0]
    assert entry.verdict == "lossy"
    found = entry.prompts[0].divergence
    assert found.gap_reference > 10 * record.noise.gap_max and len(found.context_ids) == 8
    assert "instead of" in output


def test_the_old_keyword_is_no_warning_of_a_run(fork):
    """The scan names each place, and the first of them would stand in the middle of the run's output."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(fork, "--entry", "leaky:leak")
    assert [each for each in caught if "past_key_values" in str(each.message)] == []


def test_a_layer_kind_without_exact_rollback_is_not_a_finding_to_fix(fork):
    """`scan` and `fix` cannot mend what the runtime refuses, so the remedy must not send the user there."""
    (fork / "refused.py").write_text(REFUSED)
    code, _, record = run(fork, "--entry", "refused:generate", "--entry", "refused:own")
    refused, own = record.entries
    assert code == 2 and "outside of the cache" in refused.error and "other layer kinds" in refused.remedy
    assert "ddaudit scan" in own.remedy


def test_the_same_code_is_right_on_full_attention(fork, tmp_path):
    """What makes the leak is the architecture, not the comparison."""
    qwen3().save_pretrained(tmp_path / "qwen3")
    model = ("--model", str(tmp_path / "qwen3"), "--random-weights", *HYBRID[3:])
    code, output, _ = run(fork, "--entry", "leaky:leak", model=model)
    assert code == 0, output


def test_one_failing_entry_does_not_cost_the_others(fork):
    entries = [
        "others:raises",
        "blocks:generate",
        "broken:f",
        "others:wants_more",
        "others:leaves",
        "others:says_nothing",
    ]
    code, output, record = run(fork, *(f"--entry={entry}" for entry in entries))
    assert code == 2
    assert [entry.verdict for entry in record.entries] == ["error", "identical", *["error"] * 4]
    errors = {entry.name: (entry.error, entry.remedy) for entry in record.entries}
    assert errors["others:raises"][0] == "KeyError: 'state' (others.py:16)"
    assert "pip install no_such_package_2" in errors["broken:f"][1]
    assert "`tree_width`" in errors["others:wants_more"][0]
    assert "--arg tree_width" in errors["others:wants_more"][1]
    assert "SystemExit" in errors["others:leaves"][0]
    assert "'text'" in errors["others:says_nothing"][0]
    assert all(text in output for pair in errors.values() for text in pair if text)


def test_a_fork_that_does_not_import_loads_no_model(fork):
    code, output, record = run(fork, "--entry", "broken:f", model=("--model", "no-such-model"))
    assert code == 2 and record.plain is None and record.entries[0].verdict == "error"
    assert "pip install no_such_package_2" in output
    assert "model     not loaded: no entry imports\nversions " in output


def test_generators_lists_and_other_names_are_understood(fork):
    code, output, record = run(fork, "--entry", "others.py:one_by_one")
    assert code == 0, output
    entry = record.entries[0]
    assert (entry.verdict, entry.tokens, entry.rounds) == ("identical", 48, 46)
    assert entry.acceptance_length_mean == 1.0 and entry.acceptance_source == "measured"


def test_a_class_that_holds_the_models_is_made(fork):
    code, output, record = run(fork, "--entry", "others:Decoder.run", "--arg", "width=1", "--arg", "width=3")
    assert code == 1, output
    assert [(entry.name, entry.verdict) for entry in record.entries] == [
        ("others:Decoder.run[width=1]", "identical"),
        ("others:Decoder.run[width=3]", "lossy"),
    ]


def test_a_text_that_stops_at_once_is_lossy(fork):
    code, _, record = run(fork, "--entry", "others:Chain.short")
    assert code == 1 and "24 of 24 tokens short" in record.entries[0].prompts[0].reason


def save_with_words(model, folder):
    """A checkpoint with a tokenizer: token 7 is the word `w7`."""
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(101)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_the_first_divergence_is_shown_with_both_gaps_and_its_text(fork, tmp_path):
    model = qwen3()
    save_with_words(model, tmp_path / "m")
    reference = decode_plain(model, (1, 2, 3), 9)
    right, wrong = reference.generated_ids, (reference.generated_ids[8] + 1) % 101
    text = f"def generate(target, input_ids, max_new_tokens):\n    return {[*right[:8], wrong]}"
    (fork / "wrong.py").write_text(text)
    arguments = ["--entry", "wrong:generate", "--prompt", "w1 w2 w3", "--max-new-tokens", "9"]
    code, output, record = run(fork, *arguments, model=("--model", str(tmp_path / "m")))
    assert code == 1, output
    found = record.entries[0].prompts[0].divergence
    assert found.context_text == " ".join(f"w{token}" for token in right[:8])
    assert found.gap_own_text >= found.gap_reference == pytest.approx(reference.top2_gaps[8], abs=1e-4)
    gaps = f"top-2 gap {found.gap_reference:.3g}, read back {found.gap_own_text:.3g} behind the best"
    tokens = f"token 8: {wrong} 'w{wrong}' instead of {right[8]} 'w{right[8]}'"
    context = f"after {' '.join(map(str, right[:8]))} '{found.context_text}'"
    assert f"{tokens}; {gaps}; {context}\n" in output


def test_texts_go_through_the_tokenizer_and_stop_tokens_end_them(fork, tmp_path):
    """The stop token is the sixth that plain decoding chooses, so every text has that many tokens at most."""
    model = qwen3()
    ids = decode_plain(model, (1, 2, 3), 6).generated_ids
    model.generation_config.eos_token_id = ids[5]
    save_with_words(model, tmp_path / "m")
    (tmp_path / "prompts").write_text("w1 w2 w3\n\nw4 w5\n")
    arguments = ["--entry", "others:one_by_one", "--entry", "blocks:generate", "--prompts", str(tmp_path / "prompts")]
    code, output, record = run(fork, *arguments, model=("--model", str(tmp_path / "m"), "--max-new-tokens", "20"))
    assert code == 0, output
    assert record.prompt_lengths == (3, 2) and "checkpoint" in record.model
    # The generator of `one_by_one` leaves the stop token out, the other goes past it.
    assert [entry.prompts[0].num_tokens for entry in record.entries] == [ids.index(ids[5]), ids.index(ids[5]) + 1]


def test_values_given_twice_sweep(fork):
    arguments = ["--arg", "beam=1", "--arg", "generate.beam=2", "--arg", "max_new_tokens=9"]
    code, output, record = run(fork, "--entry", "blocks:generate", "--entry", "leaky:leak", *arguments)
    assert [entry.name for entry in record.entries] == [
        "blocks:generate[beam=1]",
        "blocks:generate[beam=2]",
        "leaky:leak",
    ]
    assert record.entries[1].arguments == {"beam": 2, "max_new_tokens": 9}
    assert record.entries[2].arguments == {"max_new_tokens": 9}
    code, output, record = run(fork, "--entry", "blocks:generate", "--arg", "bean=1")
    assert code == 2 and record is None and "no entry takes `--arg bean`" in output and "beam" in output


def test_entries_are_found_without_being_named(fork):
    code, _, record = run(fork)
    names = {entry.name for entry in record.entries}
    assert {"blocks:generate", "leaky:leak"} <= names
    assert code == record.exit_code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "GPU"),
        (["--drafter", "scripted:2"], "scripted:P"),
        (["--drafter", "nowhere"], "no built-in profile"),
        (["--entry", "blocks"], "module:function"),
        (["--arg", "beam"], "name=value"),
        (["--prompt", "hello"], "has no tokenizer"),
        (["--json", "no/such/folder/r.json"], "no folder"),
    ],
)
def test_bad_input_is_an_error_with_a_remedy(fork, arguments, message):
    code, output, record = run(fork, "--entry", "blocks:generate", *arguments)
    assert code == 2 and record is None
    assert message in output and "remedy:" in output


@pytest.mark.parametrize("option", ["--num-prompts", "--prompt-tokens", "--max-new-tokens"])
def test_no_prompt_is_refused_before_the_model_loads(fork, option):
    code, output, record = run(fork, option, "0")
    assert code == 2 and record is None and "loading" not in output
    assert f"'{option}': 0 is not in the range x>=1" in output


def test_a_mistaken_drafter_is_refused_before_the_model_loads(fork):
    assert "loading" not in run(fork, "--drafter", "scripted:2")[1]


def test_no_folder_and_no_entry_are_errors(tmp_path):
    assert "no folder" in run(tmp_path / "nowhere", tmp=tmp_path)[1]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.py").write_text("x = 1")
    code, output, _ = run(tmp_path / "empty")
    assert code == 2 and "no entry point" in output


def test_without_torch_the_command_says_what_to_install(fork, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("ddaudit.runtime")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    code, output, _ = run(fork, "--entry", "blocks:generate")
    assert code == 2 and "pip install -e '.[runtime]'" in output


def test_records_survive_json_and_hold_no_path(fork):
    _, _, record = run(fork, "--entry", "leaky:leak")
    text = json.dumps(record.to_json())
    assert RunRecord.from_json(json.loads(text)) == record
    assert str(fork.parent) not in text and record.fork == "blocks"
    assert RunRecord.from_json({**record.to_json(), "of_a_later_release": 1}) == record


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("old")
    good = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None, ())
    broken = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None,
                       (EntryRecord("e", {"a": object()}, "error"),))  # fmt: skip
    with pytest.raises(TypeError):
        write_run(broken, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_run(good, path)
    assert json.loads(path.read_text())["fork"] == "f"


def test_the_table_fits_a_terminal(tmp_path):
    """A long `module:Class.method` pushed the verdicts out of sight."""
    long = "research.speculative_decoding.drafting:BlockDiffusionDrafter.generate_with_a_tree(tree_budget=64)"
    names = ["ab:go", long, f"{long[:-3]}16)", "x." * 70 + ":go"]
    entries = tuple(EntryRecord(name, {}, "identical", tokens=384, tokens_per_s=1773.1) for name in names)
    record = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None, entries)
    lines = format_run(record).partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= 100 and "".join(lines[6:]).startswith(names[3])
    figures = [line for line in lines if line.endswith("identical")]
    assert len(figures) == 4 and len({line.index("384") for line in figures}) == 1
    assert figures[0].startswith("ab:go ") and lines[2::2][:2] == [names[1], names[2]]
    assert lines[0].index("verdict") == figures[0].index("identical")


@pytest.mark.parametrize(("verdicts", "code"), [((), 2), (("identical", "near-tie"), 0), (("lossy", "identical"), 1)])
def test_exit_codes(verdicts, code):
    entries = tuple(EntryRecord(f"e{i}", {}, verdict) for i, verdict in enumerate(verdicts))
    record = RunRecord("1", "3", "2", "5", "f", "cpu", "float32", "m", "d", 0, 1, (1,), None, None, entries)
    assert record.exit_code == code
    assert all(verdict in format_run(record) for verdict in verdicts)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tree_budget=16", ("", "tree_budget", 16)),
        ("go.name=a,b", ("go", "name", "a,b")),
        ("Chain.go.x=[1, None]", ("Chain.go", "x", [1, None])),
        ("x=", ("", "x", "")),
    ],
)
def test_arguments_are_literals_where_they_can_be(text, parts):
    argument = parse_argument(text)
    assert (argument.function, argument.name, argument.value) == parts


PROMPT = [5, 6, 7]


@pytest.mark.parametrize(
    "returned",
    [
        [8, 9],
        [5, 6, 7, 8, 9],
        {"sequences": [[5, 6, 7, 8, 9]]},
        ([8, 9], {"acceptance_lengths": [1, 1]}),
        (0.5, [8, 9]),
        (token for token in [8, 9]),
        ([token] for token in [8, 9]),
    ],
    ids=str,
)
def test_outputs_are_read_by_their_shape(returned):
    assert read_output(drain(returned), PROMPT).generated_ids == (8, 9)


def test_figures_are_read_beside_the_ids():
    found = read_output(([8, 9], {"accept_lengths": [1, 2], "stage_times": {"verify": 0.5}}), PROMPT)
    assert (found.acceptance_lengths, found.stage_s) == ((1.0, 2.0), {"verify": 0.5})


@pytest.mark.parametrize("returned", ["text", None, 3.5, {"score": 1.0}], ids=str)
def test_outputs_without_ids_are_an_error(returned):
    with pytest.raises(RunError, match="no token ids"):
        read_output(returned, PROMPT)


def offer(**changes):
    model = qwen3()
    return Offer(**{
        "target": model, "drafter": "D", "tokenizer": None, "prompt_ids": (1, 2), "prompt_text": None,
        "max_new_tokens": 9, "block_size": 4, "mask_token_id": 3, "target_layer_ids": (0,),
        "stop_token_ids": (), "seed": 0, **changes,
    })  # fmt: skip


def test_models_are_told_apart_by_their_company():
    """`model` is the target when alone and the drafter beside a target."""
    alone = bind(lambda model, ids: 0, None, {}, given := offer())
    assert alone["model"] is given.target and alone["ids"].tolist() == [[1, 2]]
    both = bind(lambda model, target, ids: 0, None, {}, given)
    assert both["model"] == "D" and both["target"] is given.target
    pair = bind(lambda target_model, draft_model, prompt_ids, gamma: 0, None, {}, given)
    assert (pair["target_model"], pair["draft_model"], pair["gamma"]) == (given.target, "D", 3)


@pytest.mark.parametrize(("stop", "one", "several"), [((), -1, [-1]), ((7, 8), 7, [7, 8])])
def test_stop_tokens_take_the_form_that_is_asked_for(stop, one, several):
    bound = bind(lambda eos_token_id, stop_token_ids, stop_ids=None: 0, None, {}, offer(stop_token_ids=stop))
    assert (bound["eos_token_id"], bound["stop_token_ids"]) == (one, several)
    assert bound.get("stop_ids") == (list(stop) or None)


def test_defaults_stand_where_nothing_fits():
    assert bind(lambda ids, width=3, top_p=0.9, k=2: 0, None, {}, offer()).keys() == {"ids"}


def test_a_drafter_that_is_not_there_is_named():
    with pytest.raises(RunError, match="wants a drafter"):
        bind(lambda target, drafter, ids: 0, None, {}, offer(drafter=None))


def test_the_forks_folder_is_left_as_it_was(fork):
    before = sorted(Path(fork).rglob("*"))
    run(fork, "--entry", "blocks:generate", "--entry", "others:raises")
    assert sorted(Path(fork).rglob("*")) == before
    assert not {"blocks", "others", "leaky"} & set(sys.modules)


def test_the_demo_decodes_on_one_thread():
    """More of them fight over so small a model: on two busy cores the demo took four times as long."""
    code = """
import sys
from ddaudit.auditor.commands import run

def stop(*_):
    import torch
    sys.exit(f"threads: {torch.get_num_threads()}")

run.run_folder = stop
run.demo([])
"""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stderr.splitlines()[-1] == "threads: 1"


def test_the_demo_does_the_whole_job(tmp_path):
    result = CliRunner().invoke(main, ["demo", "--json", str(tmp_path / "r.json")])
    assert result.exit_code == 0, result.output
    assert "DDA101" in result.output and "verdict: identical" in result.output
    record = RunRecord.from_json(json.loads((tmp_path / "r.json").read_text()))
    accepted = {entry.name.partition(":")[2]: entry.acceptance_length_mean for entry in record.entries}
    # The tree finds again what the chain loses.
    assert accepted["plain_generate"] == 1.0 and 2.5 < accepted["chain_generate"] < accepted["tree_generate"]


def test_the_demo_without_its_sample_says_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr("ddaudit.auditor.commands.run.SAMPLE", tmp_path / "research_repo")
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 2 and "checkout" in result.output


def replayed_record(speeds, base=50.0):
    entries = tuple(
        EntryRecord(f"e:{i}", {}, "near-tie", tokens=9, tokens_per_s=speed, rounds=3) for i, speed in enumerate(speeds)
    )
    plain = PlainRecord(9, 10.0, 0.9, 2**30, 9)
    graphs = EntryRecord("plain decoding replayed", {}, "near-tie", tokens=9, tokens_per_s=base, rounds=8)
    return RunRecord(
        "1", "3", "2", "5", "f", "H200", "bfloat16", "m", "d", 0, 1, (1,), None, plain, entries,
        execution="replayed", num_graphs=2, plain_replayed=graphs, replay_warnings=("a mask per layer: no graph",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speeds", "said"),
    [
        ([60.0, 75.0], "fastest: e:1, 1.50 times plain decoding replayed"),
        ([40.0, 20.0], "no entry is faster than plain decoding replayed; e:0 comes nearest, at 0.80 of its speed"),
    ],
)
def test_replayed_entries_have_the_replayed_baseline_to_beat(speeds, said):
    """Against an eager baseline alone, graphs would look like the work of the drafts."""
    record = replayed_record(speeds)
    text = format_run(record)
    rows = [line.split() for line in text.partition("\n\n")[2].partition("\n\n")[0].splitlines()]
    assert rows[0][3:6] == ["speed-up", "x", "replay"]
    assert rows[1][:6] == ["plain", "decoding", "9", "10.0", "1.00", "0.20"]
    assert rows[2][:7] == ["plain", "decoding", "replayed", "9", "50.0", "5.00", "1.00"]
    assert rows[3][:5] == ["e:0", "9", f"{speeds[0]:.1f}", f"{speeds[0] / 10:.2f}", f"{speeds[0] / 50:.2f}"]
    assert said in text and "forwards  replayed, 2 graphs captured" in text and "a mask per layer" in text
    assert RunRecord.from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_wrong_replayed_baseline_is_no_success():
    record = replayed_record([60.0])
    assert record.exit_code == 0
    assert replace(record, plain_replayed=replace(record.plain_replayed, verdict="lossy")).exit_code == 1


def test_plain_decoding_through_our_cache_is_plain_decoding(monkeypatch):
    """The loop of the replayed baseline; on a CPU nothing is replayed, so the capture is only said to have been."""
    model, prompts = qwen3(), ((1, 2, 3), (4, 5))
    references = [decode_plain(model, prompt, 20) for prompt in prompts]
    target = Target(model, None, "m", has_random_weights=True, drafter_profile="")
    assert decode_replayed(target, references, None, (), None) is None
    decode = references_module.decode_cached

    def decode_as_replayed(*arguments):
        note_graph()
        return decode(*arguments)

    monkeypatch.setattr(references_module, "decode_cached", decode_as_replayed)
    found = decode_replayed(target, references, None, (), None)
    assert (found.verdict, found.tokens, found.rounds) == ("identical", 40, 38) and found.tokens_per_s > 0
    assert (
        decode(model, make_cache(model), prompts[0], 20, references[0].generated_ids[4:5])[0]
        == (references[0].generated_ids[: references[0].generated_ids.index(references[0].generated_ids[4]) + 1])
    )

"""Records that pass between fixing, running and reporting; the one module that `runtime` shares with `auditor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Parameter:
    """One parameter of an entry point, as written in the source."""

    name: str
    annotation: str
    """The annotation's source text, empty without one."""
    has_default: bool


@dataclass(frozen=True)
class Entry:
    """A function of a research repository that takes a target and input ids and returns generated ids."""

    module: str
    """Import name as the repository itself uses it from its root, such as `ddtree` or `model.dflash`."""
    qualname: str
    """`function` or `Class.method`."""
    path: str
    line: int
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        return f"{self.module}:{self.qualname}"


VERDICTS = ("identical", "distribution-preserving", "near-tie", "inconclusive", "lossy", "biased", "error")
"""From best to worst: an entry's verdict is the worst of its prompts'."""


@dataclass(frozen=True)
class Noise:
    """How far stock Transformers is from itself: the same text in blocks against one token at a time."""

    num_positions: int
    logits_relative: float
    """Largest over the prompts of |blocks - single| / |single|, Frobenius norms."""
    gap_max: float
    """Largest change of the gap between the two best tokens, in logits."""
    gap_p50: float
    gap_p99: float
    num_flips: int
    """Positions where the best token changes."""
    top2_gap_p50: float
    """Median gap between the two best tokens, one token at a time: a noise above it leaves the test little power."""

    @property
    def flip_rate(self) -> float:
        return self.num_flips / self.num_positions if self.num_positions else 0.0


@dataclass(frozen=True)
class Divergence:
    """The first place where an entry's text leaves plain decoding's."""

    prompt: int
    position: int
    """Index among the generated tokens."""
    expected: int
    found: int
    gap_reference: float
    """Top-2 gap at that position when plain decoding made its choice, in logits."""
    gap_own_text: float
    """How far the entry's token is behind the best one when the model reads the entry's own text, in logits."""
    context_ids: tuple[int, ...]
    """The last tokens before it, which both texts share."""
    context_text: str = ""
    """These as text, where the model has a tokenizer; so `expected_text` and `found_text`."""
    expected_text: str = ""
    found_text: str = ""


@dataclass(frozen=True)
class PromptVerdict:
    """What comparing one prompt's text with plain decoding gave."""

    prompt: int
    verdict: str
    num_tokens: int
    reason: str
    divergence: Divergence | None = None
    num_beyond_noise: int = 0
    """Tokens of the entry's own text that the model, reading that text, puts behind another by more than the noise."""
    num_not_best: int = 0
    """Tokens of the entry's own text after the divergence that are not the model's best one."""


@dataclass(frozen=True)
class PlainRecord:
    """Stock Transformers decoding one token at a time: the reference text and the time to beat."""

    tokens: int
    tokens_per_s: float
    decode_s: float
    peak_memory_bytes: int | None
    num_distinct_tokens: int
    """A reference that repeats a few tokens hides faults."""
    costs: tuple[StageCost, ...] = ()
    """Of one token, with `--profile`."""


@dataclass(frozen=True)
class SettledTies:
    """Texts that were written once more for their figures, near-ties settled as plain decoding settled them.

    A scripted drafter knows plain decoding's text. Where an entry's text leaves that at a near-tie, what it proposes
    is right no more, and the acceptance that was asked for is not what gets timed. So each logit of plain decoding's
    own token is raised by `bias`, which is within the noise. The verdict is that of the text before.
    """

    num_prompts: int
    bias: float
    """In logits."""
    num_equal: int
    """Of these texts, those that are plain decoding's token for token."""
    acceptance_length_mean: float | None
    """Of the texts before, whose near-ties fell as they would."""


@dataclass(frozen=True)
class Floor:
    """How fast the device moves data, measured in the same run."""

    copy_bytes_per_s: float
    """A large copy within the device, bytes read and bytes written."""
    weight_bytes: int
    """What each forward of the target must read: the weights of its decoder and head, without an embedding's table."""
    weight_read_s: float
    """All of that read once."""


@dataclass(frozen=True)
class StageCost:
    """One stage of a round: what it takes, and what moving its data alone would take."""

    name: str
    """`draft`, `verify`, `commit`, `host` (all else) or `round`, their sum."""
    seconds: float
    bytes: int
    floor_s: float
    """0 where nothing has to be moved."""

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.floor_s if self.floor_s else None


@dataclass(frozen=True)
class SampleTest:
    """A chi-square test of the tokens that an entry sampled against the target's float64 probabilities."""

    verdict: str
    """`distribution-preserving`, `biased`, or `inconclusive`: the control was not told apart."""
    temperature: float
    num_samples: int
    num_cells: int
    statistic: float
    p_value: float
    """How often tokens drawn from the target would look worse."""
    control_temperature: float
    control_p_value: float
    """The same tokens against a temperature that they were not drawn at: must be rejected."""
    num_more: int | None = 0
    """Samples still needed to reject the control, about; None where none would do."""


@dataclass(frozen=True)
class EntryRecord:
    """One entry point over all prompts."""

    name: str
    arguments: dict[str, Any]
    """What was passed by `--arg`."""
    verdict: str
    tokens: int = 0
    tokens_per_s: float = 0.0
    """After the first token of each prompt."""
    decode_s: float = 0.0
    acceptance_length_mean: float | None = None
    """Tokens a round: the entry's own figure if it returns one, else new tokens over rounds."""
    acceptance_source: str = ""
    """`entry` or `measured`."""
    rounds: int | None = None
    """Forwards of the target after the prefill."""
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_source: str = ""
    """`entry` where it returns stages of its own, else `measured`."""
    measured_s: dict[str, float] = field(default_factory=dict)
    """Seconds of decoding as measured from outside: `draft`, `verify`, `commit` and `host`, the rest."""
    costs: tuple[StageCost, ...] = ()
    """Of a mean round, with `--profile`."""
    settled: SettledTies | None = None
    peak_memory_bytes: int | None = None
    prompts: tuple[PromptVerdict, ...] = ()
    sampling: SampleTest | None = None
    """Of an entry run at a temperature above 0; its texts are not compared with plain decoding's."""
    error: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class StateCheck:
    """The same text through our cache under several rejection patterns, compared at every choice."""

    verdict: str
    """`agree`, `differ`, `not checked` (the runtime refuses the model) or `error`."""
    reason: str
    """Empty for `agree`."""
    num_patterns: int = 0
    num_rounds: int = 0
    num_rejected: int = 0
    """Tokens fed and taken back."""
    num_positions: int = 0
    """Choices compared with the first pattern's."""
    num_flips: int = 0
    logits_relative: float = 0.0
    """Largest over the prompts of |other - first| / |first|, Frobenius norms."""
    largest_difference: float = 0.0
    """Of one logit, and where: in which prompt's text, after which of its tokens."""
    prompt: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """Everything one `run` found out. No path and no time of day, so that two runs can be compared."""

    ddaudit_version: str
    python_version: str
    torch_version: str
    transformers_version: str
    fork: str
    """The folder's name."""
    device: str
    dtype: str
    model: str
    """Where its config came from, its class, and `random weights` where it has no checkpoint."""
    drafter: str
    seed: int
    max_new_tokens: int
    prompt_lengths: tuple[int, ...]
    noise: Noise | None
    plain: PlainRecord | None
    entries: tuple[EntryRecord, ...]
    peak_memory_kind: str = ""
    """`device`: the allocator's peak during the entry; `process`: resident memory of the process so far."""
    state_check: StateCheck | None = None
    """None where nothing was decoded."""
    temperature: float = 0.0
    """Given to the entries that take one."""
    execution: str = "eager"
    """`replayed` where forwards were replayed as CUDA graphs."""
    num_graphs: int = 0
    """Captured during the run."""
    replay_warnings: tuple[str, ...] = ()
    """Why some forwards were not."""
    plain_replayed: EntryRecord | None = None
    """Greedy decoding one token at a time through `make_cache`, replayed; None in eager runs."""
    nominal_acceptance: float | None = None
    """Tokens a round that a scripted drafter's chances give a chain."""
    floor: Floor | None = None

    @property
    def exit_code(self) -> int:
        verdicts = {entry.verdict for entry in self.entries}
        if verdicts and self.plain_replayed:
            verdicts.add(self.plain_replayed.verdict)
        state = self.state_check.verdict if self.state_check else ""
        if not verdicts or verdicts & {"error", "inconclusive"} or state == "error":
            return 2
        return 1 if verdicts & {"lossy", "biased"} or state == "differ" else 0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types. Names stay, more may be added."""
        data = asdict(self)
        if self.noise:
            data["noise"]["flip_rate"] = self.noise.flip_rate
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRecord:
        record: RunRecord = _build(cls, data)
        return record


_NESTED: dict[tuple[type, str], type] = {
    (RunRecord, "noise"): Noise,
    (RunRecord, "plain"): PlainRecord,
    (RunRecord, "entries"): EntryRecord,
    (RunRecord, "state_check"): StateCheck,
    (RunRecord, "plain_replayed"): EntryRecord,
    (RunRecord, "floor"): Floor,
    (PlainRecord, "costs"): StageCost,
    (EntryRecord, "costs"): StageCost,
    (EntryRecord, "settled"): SettledTies,
    (EntryRecord, "prompts"): PromptVerdict,
    (EntryRecord, "sampling"): SampleTest,
    (PromptVerdict, "divergence"): Divergence,
}


def _build(cls: type, data: Mapping[str, Any]) -> Any:
    """`cls` from its JSON form. Unknown names are those of a later release, and are left out."""
    values: dict[str, Any] = {}
    for item in fields(cls):
        if item.name not in data:
            continue
        value, nested = data[item.name], _NESTED.get((cls, item.name))
        if isinstance(value, (list, tuple)):
            value = tuple(_build(nested, part) if nested else part for part in value)
        elif nested and value is not None:
            value = _build(nested, value)
        values[item.name] = value
    return cls(**values)

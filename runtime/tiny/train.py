"""Trains the bundled pair: `python -m ddaudit.runtime.tiny.train --work FOLDER`.

Seven stages, each of which leaves its result in the work folder, so that `--resume` goes on where a run ended, within
a stage too. The pair itself is in `FOLDER/pair`, the record of its making in `FOLDER/record.json`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddaudit.runtime.caches.kernels import serve_cpu
from ddaudit.runtime.drafters.dflash import DFlashDrafter
from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.loading import choose_device
from ddaudit.runtime.tiny.acceptance import accepted_lengths, drafts_along
from ddaudit.runtime.tiny.continuing import continue_texts
from ddaudit.runtime.tiny.corpus import Source, digest, excerpts, read_corpus
from ddaudit.runtime.tiny.distilling import train_drafter
from ddaudit.runtime.tiny.pretraining import bits_per_byte, encode_stream, train_target
from ddaudit.runtime.tiny.recipe import END_ID, FULL, SMALL, Recipe
from ddaudit.runtime.tiny.tokenizing import train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

TREE_BUDGET = 32
_EVALUATED_TOKENS = 128
_CHARS_PER_TOKEN = 8
"""Enough of an excerpt for a prompt of so many tokens."""


@dataclass(frozen=True)
class Work:
    """A training run: its settings, and the folder that its stages share."""

    folder: Path
    recipe: Recipe
    device: torch.device
    seed: int
    library: Path | None
    target_minutes: float | None = None
    drafter_minutes: float | None = None

    @property
    def target_folder(self) -> Path:
        return self.folder / "pair" / "target"

    @property
    def drafter_folder(self) -> Path:
        return self.folder / "pair" / "drafter"

    def record(self) -> dict[str, Any]:
        path = self.folder / "record.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def add_to_record(self, stage: str, facts: dict[str, Any]) -> None:
        text = json.dumps({**self.record(), stage: facts}, indent=1)
        unfinished = self.folder / "record.unfinished"
        unfinished.write_text(text + "\n", encoding="utf-8")
        unfinished.replace(self.folder / "record.json")

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.target_folder)

    def target(self) -> Any:
        """The target as it is shipped, its bfloat16 numbers in float32."""
        model = AutoModelForCausalLM.from_pretrained(self.target_folder, dtype=torch.float32).to(self.device).eval()
        serve_cpu(model)
        return model

    def drafter(self) -> DFlashDrafter:
        drafter: DFlashDrafter = DFlashDrafter.from_pretrained(self.drafter_folder, dtype=torch.float32)
        drafter.to(self.device).eval()
        return drafter

    def held_out(self) -> list[Source]:
        """As the data stage read them: later stages may run on a machine with another Python."""
        stored = json.loads((self.folder / "held_out.json").read_text(encoding="utf-8"))
        return [Source(path, text) for path, text in stored]


def make_data(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    corpus = read_corpus(work.library)
    for name, sources in (("training", corpus.training), ("held_out", corpus.held_out)):
        text = json.dumps([(source.path, source.text) for source in sources])
        (work.folder / f"{name}.json").write_text(text, encoding="utf-8")
    facts: dict[str, Any] = {
        "python_version": platform.python_version() if work.library is None else f"sources of {work.library.name}",
        "held_out_modules": corpus.held_out_modules,
        **{
            f"{name}_{what}": value
            for name, sources in (("training", corpus.training), ("held_out", corpus.held_out))
            for what, value in (
                ("files", len(sources)),
                ("bytes", sum(len(source.text.encode()) for source in sources)),
                ("sha256", digest(sources)),
            )
        },
    }
    progress(f"{facts['training_files']} files, {facts['training_bytes'] / 1e6:.1f} MB; held out: "
             f"{facts['held_out_files']}, {facts['held_out_bytes'] / 1e6:.2f} MB")  # fmt: skip
    return facts


def make_tokenizer(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    texts = [text for _, text in json.loads((work.folder / "training.json").read_text(encoding="utf-8"))]
    tokenizer = train_tokenizer(texts, work.recipe.vocab_size)
    tokenizer.save_pretrained(work.target_folder)
    stream = encode_stream(tokenizer, texts)
    torch.save(stream, work.folder / "stream.pt")
    facts = {"entries": len(tokenizer), "training_tokens": len(stream)}
    progress(f"{facts['entries']} entries, {facts['training_tokens'] / 1e6:.2f} M tokens of training text")
    return facts


def make_target(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    stream = torch.load(work.folder / "stream.pt", weights_only=True)
    model, losses = train_target(
        work.recipe,
        stream,
        work.device,
        work.seed,
        work.folder / "target.state",
        progress,
        work.target_minutes,
    )
    model.to(torch.bfloat16).save_pretrained(work.target_folder)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": losses[-1][0],
        "tokens_seen": losses[-1][0] * work.recipe.rows * work.recipe.row_length,
        "losses": losses,
    }


def make_texts(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    """Continuations of training text by the target, greedy and sampled: what the drafter is trained on."""
    recipe, target = work.recipe, work.target()
    stream = torch.load(work.folder / "stream.pt", weights_only=True)
    generator = torch.Generator().manual_seed(work.seed)
    parts: list[torch.Tensor] = []
    for temperature, count in ((0.0, recipe.num_greedy_texts), (1.0, recipe.num_sampled_texts)):
        starts = torch.randint(len(stream) - recipe.prefix_length, (count,), generator=generator)
        for some in starts.split(recipe.texts_at_once):
            prompts = stream[some[:, None] + torch.arange(recipe.prefix_length)].long().to(work.device)
            num_new = recipe.text_length - recipe.prefix_length
            texts = continue_texts(target, prompts, num_new, temperature, work.seed + len(parts))
            parts.append(texts.short().cpu())
            progress(f"{sum(len(part) for part in parts)} texts, the last at temperature {temperature:g}")
    torch.save(torch.cat(parts), work.folder / "texts.pt")
    return {"greedy": recipe.num_greedy_texts, "sampled": recipe.num_sampled_texts, "tokens": recipe.text_length}


def make_drafter(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    texts = torch.load(work.folder / "texts.pt", weights_only=True).to(work.device)
    drafter, losses = train_drafter(
        work.recipe,
        work.target(),
        texts,
        work.seed,
        work.folder / "drafter.state",
        progress,
        work.drafter_minutes,
    )
    work.drafter_folder.mkdir(parents=True, exist_ok=True)
    # Written by hand, not by `save_pretrained`: public configurations have rope theta at the top.
    (work.drafter_folder / "config.json").write_text(json.dumps(work.recipe.drafter_config(), indent=2) + "\n")
    weights = {name: tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(weights, work.drafter_folder / "model.safetensors", metadata={"format": "pt"})
    return {
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "steps": losses[-1][0],
        "blocks_seen": losses[-1][0] * work.recipe.drafter_rows * work.recipe.anchors,
        "losses": losses,
    }


def measure_held_out(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    """Bits per byte of the held-out files, beside general compressors, which get them as one text."""
    texts = [source.text for source in work.held_out()]
    together = "".join(texts).encode()
    facts = {
        "bits_per_byte": round(bits_per_byte(work.target(), work.tokenizer(), texts), 4),
        "gzip_bits_per_byte": round(8 * len(gzip.compress(together, 9)) / len(together), 4),
        "xz_bits_per_byte": round(8 * len(lzma.compress(together, preset=9)) / len(together), 4),
        "files": _digests(work.target_folder),
    }
    progress(f"{facts['bits_per_byte']} bits per byte; gzip {facts['gzip_bits_per_byte']}")
    return facts


def measure_acceptance(work: Work, progress: Callable[[str], None]) -> dict[str, Any]:
    """Tokens a round along held-out texts, greedy and sampled."""
    target, drafter, tokenizer = work.target(), work.drafter(), work.tokenizer()
    length = work.recipe.prefix_length
    prompts = [
        tokenizer.encode(text, add_special_tokens=False)[:length]
        for _, text in excerpts(work.held_out(), work.recipe.num_prompts, _CHARS_PER_TOKEN * length)
    ]
    given = torch.tensor(prompts, device=work.device)
    found = []
    for temperature in (0.0, 1.0):
        rounds: dict[int | None, list[int]] = {None: [], TREE_BUDGET: []}
        num_tokens, num_distinct = 0, 0
        for text in continue_texts(target, given, _EVALUATED_TOKENS, temperature, work.seed):
            generated = text[length:].tolist()
            generated = generated[: generated.index(END_ID) + 1] if END_ID in generated else generated
            drafts = drafts_along(drafter, target, text[: length + len(generated)], length).cpu()
            num_tokens += len(generated)
            num_distinct += len(set(generated))
            for budget, lengths in rounds.items():
                lengths += accepted_lengths(drafts, generated, budget)
        facts = {
            "temperature": temperature,
            "prompts": len(prompts),
            "tokens": num_tokens,
            "distinct_tokens_a_text": round(num_distinct / len(prompts), 1),
            "chain": round(fmean(rounds[None]), 4),
            f"tree_{TREE_BUDGET}": round(fmean(rounds[TREE_BUDGET]), 4),
        }
        progress(", ".join(f"{name} {value}" for name, value in facts.items()))
        found.append(facts)
    return {"by_temperature": found, "files": _digests(work.drafter_folder)}


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of each file: those that were measured are those that are shipped."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


STAGES: dict[str, Callable[[Work, Callable[[str], None]], dict[str, Any]]] = {
    "data": make_data,
    "tokenizer": make_tokenizer,
    "target": make_target,
    "held_out": measure_held_out,
    "texts": make_texts,
    "drafter": make_drafter,
    "acceptance": measure_acceptance,
}


def run_stages(work: Work, stages: list[str], progress: Callable[[str], None]) -> None:
    """The stages named that are not in the record yet, in their order."""
    work.folder.mkdir(parents=True, exist_ok=True)
    for name in [name for name in STAGES if name in stages]:
        if name in work.record():
            progress(f"{name}: done before")
            continue
        start_s = time.perf_counter()
        facts = STAGES[name](work, lambda text, name=name: progress(f"{name}: {text}"))  # type: ignore[misc]
        settings = {"recipe": asdict(work.recipe), "seed": work.seed}
        work.add_to_record(
            name, {**facts, **settings, **_circumstances(work.device), "seconds": time.perf_counter() - start_s}
        )


def _circumstances(device: torch.device) -> dict[str, str]:
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@click.command()
@click.option("--work", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Results.")
@click.option("--size", type=click.Choice(["full", "small"]), default="full", show_default=True,
              help="The shipped pair's, or one for a CPU.")  # fmt: skip
@click.option("--stage", "stages", multiple=True, type=click.Choice(list(STAGES)), help="Only these; repeatable.")
@click.option("--target-steps", type=click.IntRange(min=1), help="In place of the recipe's.")
@click.option("--drafter-steps", type=click.IntRange(min=1), help="In place of the recipe's.")
@click.option(
    "--target-minutes", type=click.FloatRange(min=0, min_open=True), help="Fewer steps where these do not fit."
)
@click.option(
    "--drafter-minutes", type=click.FloatRange(min=0, min_open=True), help="Fewer steps where these do not fit."
)
@click.option("--stdlib", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Another standard library's folder than the running Python's.")  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="`auto`, `cpu`, `cuda`.")
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True)
@click.option("--resume", is_flag=True, help="Go on in a work folder that holds a run.")
def main(
    folder: Path,
    size: str,
    stages: tuple[str, ...],
    target_steps: int | None,
    drafter_steps: int | None,
    target_minutes: float | None,
    drafter_minutes: float | None,
    stdlib: Path | None,
    device: str,
    seed: int,
    resume: bool,
) -> None:
    """Train the bundled pair from Python's standard library: a hybrid target and its block drafter."""
    recipe = FULL if size == "full" else SMALL
    recipe = replace(
        recipe,
        target=replace(recipe.target, steps=target_steps or recipe.target.steps),
        drafter=replace(recipe.drafter, steps=drafter_steps or recipe.drafter.steps),
    )
    if not resume and (folder / "record.json").exists():
        raise click.UsageError(f"`{folder}` holds a run already: `--resume` goes on with it")
    start_s = time.perf_counter()

    def progress(text: str) -> None:
        click.echo(f"{time.perf_counter() - start_s:7.1f} s  {text}")

    try:
        work = Work(folder, recipe, choose_device(device), seed, stdlib, target_minutes, drafter_minutes)
        run_stages(work, list(stages or STAGES), progress)
    except RunError as error:
        raise click.ClickException(f"{error}; {error.remedy}") from error
    progress(f"the pair is in {folder / 'pair'}, the record in {folder / 'record.json'}")


if __name__ == "__main__":
    main()

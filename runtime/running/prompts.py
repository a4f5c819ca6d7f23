"""The prompts of a run: texts through the model's tokenizer, or seeded random ids."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddaudit.runtime.errors import RunError
from ddaudit.runtime.models.architecture import text_config
from ddaudit.runtime.tiny import TINY
from ddaudit.runtime.tiny.corpus import excerpts, read_held_out

if TYPE_CHECKING:
    from ddaudit.runtime.models.loading import Target
    from ddaudit.runtime.running.run import RunOptions

_CHARS_PER_TOKEN = 8
"""Enough text for a prompt of so many tokens."""


@dataclass(frozen=True)
class Prompt:
    """One prompt; `text` is None for random ids."""

    ids: tuple[int, ...]
    text: str | None = None


def make_prompts(target: Target, options: RunOptions, mask_token_id: int) -> list[Prompt]:
    """The texts given, or `num_prompts` of `prompt_tokens`: held-out text for the bundled target, else random ids."""
    if options.prompt_texts:
        if target.tokenizer is None:
            raise RunError(
                f"{target.description} has no tokenizer for `--prompt`",
                "leave the prompts out: random token ids are used then",
            )
        prompts = [Prompt(_encode(target.tokenizer, text), text) for text in options.prompt_texts]
        if empty := next((prompt for prompt in prompts if not prompt.ids), None):
            raise RunError(f"the prompt {empty.text!r} has no token", "give a prompt of a token at least")
        return prompts
    if options.num_prompts < 1 or options.prompt_tokens < 1:
        raise RunError(
            f"{options.num_prompts} prompts of {options.prompt_tokens} tokens are nothing to run",
            "`--num-prompts` and `--prompt-tokens` must be at least 1",
        )
    if options.model == TINY and target.tokenizer is not None:
        return _held_out_prompts(target.tokenizer, options.num_prompts, options.prompt_tokens)
    rng = random.Random(options.seed)
    vocabulary = [token for token in range(text_config(target.model).vocab_size) if token != mask_token_id]
    return [Prompt(tuple(rng.choices(vocabulary, k=options.prompt_tokens))) for _ in range(options.num_prompts)]


def _held_out_prompts(tokenizer: Any, count: int, length: int) -> list[Prompt]:
    """Pieces of the standard library modules that the bundled target was not trained on, from the Python that runs."""
    prompts = []
    for _, text in excerpts(read_held_out(), count, _CHARS_PER_TOKEN * length):
        ids = tuple(tokenizer.encode(text[: 4 * _CHARS_PER_TOKEN * length], add_special_tokens=False)[:length])
        prompts.append(Prompt(ids, tokenizer.decode(ids)))
    return prompts


def _encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    if getattr(tokenizer, "chat_template", None):
        # As text first: with `tokenize=True` Transformers 5 returns a BatchEncoding.
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    return tuple(tokenizer.encode(text))

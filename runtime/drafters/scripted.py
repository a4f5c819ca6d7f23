"""A drafter whose acceptance is set: with chance P it puts the right token first, whatever the target's weights.

It has a block drafter's call signature and returns hidden states which the target's own head maps to the wanted
logits, so a repository's own drafting, tree building and verification run unchanged. It knows the right tokens
from plain decoding of the same prompt; at a temperature it takes the target's likeliest ones after the text so far.
A random drafter is accepted almost never, which hides faults of rollback and of acceptance.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddaudit.runtime.drafters.text_reading import TextReader
from ddaudit.runtime.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddaudit.runtime.drafters.drafting import DraftPlan

_REFINE_STEPS = 16
_VIOLATORS_PER_STEP = 16
_MARGIN = 0.5
"""Logits between the second token and every other one but the first."""
_ATTEMPTS = 6
"""Draws of a wrong token for a position: a trained head has tokens that no hidden state tells apart."""
_CHUNK = 64
"""Positions whose logits over the whole vocabulary exist at a time."""


class ScriptedDrafter(nn.Module):
    """Proposes the right token first with chance `p`, else second behind a wrong one with chance `q`.

    The choice depends on the seed and the position alone, so a chain loses exactly what a tree can recover.
    """

    _grows_cache = True

    def __init__(
        self,
        target: nn.Module,
        config: Any,
        plan: DraftPlan,
        p: float,
        q: float,
        seed: int,
        returns_logits: bool = False,
    ) -> None:
        # Not super(): the class may be mixed with a repository's drafter, whose layers are not wanted.
        nn.Module.__init__(self)
        head = target.get_output_embeddings()
        if head is None:
            raise RunError(
                f"`{type(target).__name__}` has no output embeddings for a scripted drafter to aim at",
                "use a causal language model, or another `--drafter`",
            )
        self._head = [head]  # in a list: a submodule would be moved, counted and saved with the drafter
        self.config = config
        self.p, self.q, self.seed = p, q, seed
        self.returns_logits = returns_logits
        self.block_size = plan.block_size
        self.mask_token_id = plan.mask_token_id
        self.target_layer_ids = list(plan.target_layer_ids)
        self._hidden = torch.zeros(0, head.weight.shape[1], device=self.device, dtype=self.dtype)
        self._start = 0
        self._drawn: list[int] = []
        self._script: tuple[int, tuple[int, ...]] | None = None
        self._text: TextReader | None = None
        self.num_misordered = 0

    @property
    def device(self) -> torch.device:
        device: torch.device = self._head[0].weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self._head[0].weight.dtype
        return dtype

    def follow(self, prompt_length: int, continuation: Sequence[int]) -> None:
        """Script the drafts for one prompt: `continuation[i]` is the right token at position `prompt_length + i`."""
        self._text = None
        script = (prompt_length, tuple(continuation))
        if script == self._script:
            return
        self._aim(prompt_length, continuation)
        if self.num_misordered > max(1, 0.01 * len(continuation)):
            raise RunError(
                f"the target's head cannot be scripted: {self.num_misordered} of {len(continuation)} positions "
                "do not order the tokens as wanted",
                "use `--drafter random` or a trained drafter",
            )
        self._script = script

    def follow_text(self, target: nn.Module, prompt_ids: Sequence[int], seed: int) -> None:
        """Script the drafts of one sampled text as it is written. The choices depend on `seed`."""
        if self._text is None or self._text.prompt_ids != tuple(prompt_ids):
            self._text = TextReader(target, prompt_ids)
        self._text.begin()
        self._script, self.seed = None, seed

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        noise_embedding: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        target_hidden: torch.Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Hidden states `[B, N, H]` for the `N` tokens of a draft block, each aiming at its own position's token.

        Called with `input_ids`, as an ordinary language model is, it aims at the next position's token and
        returns an output with `logits`.
        """
        block = noise_embedding if noise_embedding is not None else inputs_embeds
        is_next_token = block is None
        if block is None:
            if input_ids is None:
                raise RunError("the scripted drafter was called without `noise_embedding` or `input_ids`")
            block = input_ids
        batch, length = block.shape[:2]
        draft_cache = past_key_values if past_key_values is not None else cache
        seen = draft_cache.get_seq_length() if draft_cache is not None else 0
        context = target_hidden.shape[1] if target_hidden is not None else 0
        if position_ids is not None:
            positions = position_ids.reshape(-1, position_ids.shape[-1])[:, -length:].to(self.device)
        else:
            first = seen + context
            positions = torch.arange(first, first + length, device=self.device)[None]
        if draft_cache is not None and self._grows_cache:
            self._remember(draft_cache, batch, context + length)
        if self._text is not None:
            first = int(positions[0, 0])
            fed = block[0].tolist() if is_next_token else [self._text.token_of(block[0, 0])]
            self._script_next(first + len(fed), self._text.likeliest(first, fed))
        hidden = self._at(positions + 1 if is_next_token else positions).expand(batch, -1, -1)
        if is_next_token:
            from transformers.modeling_outputs import CausalLMOutputWithPast

            return CausalLMOutputWithPast(logits=self._logits(hidden), past_key_values=draft_cache)
        return self._logits(hidden) if self.returns_logits else hidden

    def _script_next(self, start: int, continuation: Sequence[int]) -> None:
        assert self._text is not None
        wanted = self._aim(start, continuation)
        self._text.propose([row[0] for row in wanted])

    @torch.no_grad()
    def _aim(self, start: int, continuation: Sequence[int]) -> list[list[int]]:
        """Hidden states for the tokens from `start` on; which tokens they order, as `_draw` gives them.

        Where they do not, other wrong tokens are drawn for that position, the right one's rank as before.
        """
        wanted = [self._draw(start + i, token) for i, token in enumerate(continuation)]
        self._start = start
        self._drawn = [row.index(token) for row, token in zip(wanted, continuation, strict=True)]
        self._hidden = self._solve(wanted, self._drawn)
        for attempt in range(1, _ATTEMPTS + 1):
            misordered = self._misordered(continuation)
            self.num_misordered = len(misordered)
            if not misordered or attempt == _ATTEMPTS:
                break
            for row in misordered:
                wanted[row] = self._draw(start + row, continuation[row], attempt)
            drawn = [self._drawn[row] for row in misordered]
            self._hidden[misordered] = self._solve([wanted[row] for row in misordered], drawn)
        return wanted

    def _remember(self, cache: Any, batch: int, length: int) -> None:
        """Grow the draft cache as a real drafter does, so that `get_seq_length` and `crop` see the same lengths."""
        entries = torch.zeros(batch, 1, length, 1, device=self.device, dtype=self.dtype)
        for layer in range(self.config.num_hidden_layers):
            cache.update(entries, entries, layer)

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states of those positions. Outside the reference they are zero: every token alike."""
        inside = (positions >= self._start) & (positions < self._start + len(self._hidden))
        index = (positions - self._start).clamp(0, max(len(self._hidden) - 1, 0))
        return self._hidden[index] * inside[..., None]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head[0](hidden)
        return logits

    def _draw(self, position: int, right: int, attempt: int = 0) -> list[int]:
        """First and second token there, then tokens that must not come near: the right one, if it was drawn out.

        Another `attempt` gives other wrong tokens and leaves the right one where it is.
        """
        rng = random.Random(f"{self.seed}/{position}")
        is_first, is_second = rng.random() < self.p, rng.random() < self.q
        vocabulary = self._head[0].weight.shape[0]
        for _ in range(attempt):
            rng.sample(range(vocabulary), 3)
        wrong = [token for token in rng.sample(range(vocabulary), 3) if token != right]
        if is_first:
            return [right, wrong[0]]
        return [wrong[0], right] if is_second else [wrong[0], wrong[1], right]

    def _levels(self) -> tuple[float, float]:
        """Logits of the first and the second token, the others near 0: what a calibrated drafter would give."""
        first, second = max(self.p, 1e-3), max((1 - self.p) * self.q, 1e-3)
        rest = max((1 - self.p) * (1 - self.q), 1e-3) / self._head[0].weight.shape[0]
        low = max(math.log(second / rest), 3 * _MARGIN)
        return max(math.log(first / rest), low + _MARGIN), low

    def _solve(self, wanted: Sequence[list[int]], drawn: Sequence[int]) -> torch.Tensor:
        """Smallest hidden states that give the wanted two tokens their logits `[N, H]`; `drawn` are the right ones'
        ranks.

        Any other token that comes too near the right one is pushed to 0 by one more equation, until none does.
        Rows are taken relative to their mean, which moves all logits alike: trained heads have a large common part.
        """
        weight = self._head[0].weight.detach()
        mean = weight.mean(0, dtype=torch.float32)
        high, low = self._levels()
        tokens = [list(row) for row in wanted]
        hidden = torch.zeros(len(wanted), weight.shape[1], device=self.device)
        open_rows = list(range(len(wanted)))
        for _ in range(_REFINE_STEPS):
            for row in open_rows:
                rows = weight[tokens[row]].float() - mean
                levels = torch.zeros(len(rows), device=self.device)
                levels[0], levels[1] = high, low
                gram = rows @ rows.T
                gram.diagonal().add_(1e-6 * gram.diagonal().mean() + 1e-12)
                hidden[row] = torch.linalg.solve(gram, levels) @ rows
            open_rows = self._add_violators(hidden, tokens, drawn, open_rows)
            if not open_rows:
                break
        return hidden.to(self.dtype)

    def _add_violators(
        self, hidden: torch.Tensor, tokens: list[list[int]], drawn_ranks: Sequence[int], rows: list[int]
    ) -> list[int]:
        """Extend the token lists of positions where the right token is not clear of the others; their rows."""
        still_open = []
        for start in range(0, len(rows), _CHUNK):
            chunk = rows[start : start + _CHUNK]
            logits = self._logits(hidden[chunk].to(self.dtype)).float()
            for row, scores in zip(chunk, logits, strict=True):
                drawn = drawn_ranks[row]
                lowest = scores[tokens[row][min(drawn, 1)]].item() - _MARGIN
                if drawn > 1:
                    # Two tokens above the right one are enough; the others may be where they like.
                    is_clear = scores[tokens[row][drawn]].item() < lowest
                else:
                    above = scores[tokens[row][0]].item()
                    scores[tokens[row][: drawn + 1]] = -math.inf
                    best, ids = scores.topk(min(_VIOLATORS_PER_STEP, len(scores) - 2))
                    near = [token for token, score in zip(ids.tolist(), best.tolist(), strict=True) if score > lowest]
                    tokens[row] += [token for token in near if token not in tokens[row]]
                    is_clear = not near and (drawn == 0 or above > lowest + _MARGIN)
                if not is_clear:
                    still_open.append(row)
        return still_open

    def _misordered(self, continuation: Sequence[int]) -> list[int]:
        """Positions where the right token's rank under the target's own head is not the one that was drawn."""
        found = []
        for start in range(0, len(continuation), _CHUNK):
            logits = self._logits(self._hidden[start : start + _CHUNK]).float()
            right = logits.gather(1, torch.tensor(continuation[start : start + _CHUNK], device=logits.device)[:, None])
            above = (logits > right).sum(1).tolist()
            # A tie counts as above: a repository's own argmax may take either.
            level = (logits >= right).sum(1).tolist()
            for row, (low, high) in enumerate(zip(above, level, strict=True), start):
                drawn = self._drawn[row]
                if low < 2 if drawn > 1 else (low, high) != (drawn, drawn + 1):
                    found.append(row)
        return found


class AccompaniedDrafter(ScriptedDrafter):
    """Runs a `companion` drafter on all that it is given and proposes what is scripted: the time of a real drafter."""

    _grows_cache = False
    companion: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_ids") is None:
            # It counts on what the draft cache held before.
            output = super().forward(*args, **kwargs)
            self.companion(*args, **kwargs)
            return output
        # While a GPU runs the real drafter, which is what is timed.
        self.companion(*args, **kwargs)
        return super().forward(*args, **kwargs)


def companion_of(spec: str) -> str:
    """The drafter that `scripted:P[,Q]+DRAFTER` runs beside the script, empty where it names none."""
    return spec.partition("+")[2] if spec.startswith("scripted:") else ""


def chain_acceptance(spec: str, block_size: int) -> float | None:
    """Tokens a round that `scripted:P` gives a chain of `block_size` - 1 drafts, the target's own token included."""
    if not spec.startswith("scripted:"):
        return None
    p, _ = parse_scripted(spec)
    return sum(p**number for number in range(block_size))


def parse_scripted(text: str) -> tuple[float, float]:
    """The chances P and Q of `scripted:P[,Q]`, whatever runs beside it."""
    numbers = text.partition("+")[0].partition(":")[2].split(",")
    try:
        p, q = float(numbers[0]), float(numbers[1]) if len(numbers) > 1 else 0.5
        if len(numbers) > 2 or not (0 <= p <= 1 and 0 <= q <= 1):
            raise ValueError
    except ValueError:
        raise RunError(
            f"`--drafter {text}` is not `scripted:P[,Q]` with chances between 0 and 1", "try `--drafter scripted:0.7`"
        ) from None
    return p, q

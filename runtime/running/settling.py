"""Settling near-ties as plain decoding settled them, so that an entry is timed at the acceptance asked for.

A scripted drafter knows plain decoding's text. In reduced precision one token and many tokens use different kernels:
with random weights up to a quarter of the best tokens differ between two correct forwards, so an entry's own text
leaves that one within a few rounds, and nothing that is proposed is right any more. Nor can the drafter know the
entry's own text beforehand: which of two nearly level tokens wins depends on the very shape of the forward that
verifies them. So the near-ties are settled instead, in a text of its own after the one that is judged.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ddaudit.runtime.running.metering import num_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from ddaudit.runtime.checks.decoding import Reference


@contextlib.contextmanager
def ties_settled(target: nn.Module, reference: Reference, bias: float) -> Iterator[None]:
    """Raise the logit of the token that plain decoding chose at each position by `bias`, until the end of the block.

    Where it is at most the tolerance of a near-tie, a token that is chosen all the same is one that noise does not
    explain. One small scatter a forward, which is timed along with it.
    """
    start = len(reference.prompt_ids)
    end = start + len(reference.generated_ids)
    # One place more, without a bias, stands for all that lies beyond the text.
    chosen = torch.zeros(end + 1, dtype=torch.long, device=target.device)
    raised = torch.zeros(end + 1, dtype=torch.float32, device=target.device)
    chosen[start:end] = torch.tensor(reference.generated_ids, device=target.device)
    raised[start:end] = bias

    def settle(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            return
        read = _positions(args, kwargs, target.device)
        following = (read[-logits.shape[1] :] + 1).clamp(max=end)
        shape = (logits.shape[0], logits.shape[1], 1)
        tokens, by = chosen[following][None, :, None], raised[following].to(logits.dtype)[None, :, None]
        # A tensor of inference mode may be written there alone.
        with torch.inference_mode(logits.is_inference()):
            logits.scatter_add_(2, tokens.expand(shape), by.expand(shape))

    handle = target.register_forward_hook(settle, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _positions(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> torch.Tensor:
    """`[T]`: where the tokens of this forward stand in their text."""
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor):
        return positions.reshape(-1, positions.shape[-1])[0].to(device)
    length = num_tokens(args, kwargs)
    cache = next((value for value in kwargs.values() if hasattr(value, "get_seq_length")), None)
    # The forward is over, and its cache holds these tokens too.
    first = cache.get_seq_length() - length if cache is not None else 0
    return torch.arange(first, first + length, device=device)

"""What the decoders share: the stage clock, sampling, hidden-state taps, stop tokens and the result."""

import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class Generation:
    output_ids: torch.Tensor
    acceptance_lengths: list[int] = field(default_factory=list)
    stage_times: dict[str, float] = field(default_factory=dict)


class StageClock:
    """Adds up seconds per stage; waits for the GPU so that kernels count where they were launched."""

    def __init__(self):
        self.seconds = defaultdict(float)

    @contextmanager
    def stage(self, name):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[name] += time.perf_counter() - begin


def sample(logits, temperature=0.0):
    """Token ids for logits [..., V]: the likeliest at temperature 0, drawn from the softmax above it."""
    if temperature < 1e-5:
        return logits.argmax(-1)
    probs = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(probs.flatten(0, -2), 1).view(logits.shape[:-1])


def read_taps(hidden_states, layer_ids):
    """Outputs of the tapped layers side by side; entry 0 of hidden_states is the embedding."""
    return torch.cat([hidden_states[layer_id + 1] for layer_id in layer_ids], dim=-1)


def has_stop(tokens, stop_token_ids):
    return bool(stop_token_ids) and any(token in stop_token_ids for token in tokens.tolist())


def cut_at_stop(output_ids, prompt_length, stop_token_ids):
    for index, token in enumerate(output_ids[0, prompt_length:].tolist()):
        if token in (stop_token_ids or []):
            return output_ids[:, : prompt_length + index + 1]
    return output_ids

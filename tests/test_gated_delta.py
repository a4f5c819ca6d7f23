"""The tree mathematics against the recurrence written out one token at a time."""

from __future__ import annotations

import pytest
import torch

from ddaudit.runtime.caches import gated_delta
from ddaudit.runtime.caches.window import ROOT, Window

CPU = torch.device("cpu")
B, K, V, H, GROUPS = 2, 8, 6, 4, 2


def step(state, q, k, v, g, beta):
    """The recurrence of the module's docstring, `[B, H, ...]`, float64."""
    state = g.exp()[..., None, None] * state
    write = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., :, None] * write[..., None, :]
    return state, torch.einsum("bhk,bhkv->bhv", q, state)


def random_tree(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    draw = [int(torch.randint(ROOT, max(node, 1), (1,), generator=generator)) for node in range(length)]
    return tuple(min(parent, node - 1) for node, parent in enumerate(draw))


def inputs(length: int, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = normal(B, length, H // GROUPS, K), normal(B, length, H // GROUPS, K)
    value = normal(B, length, H, V)
    g = -torch.rand(B, length, H, generator=generator) * 0.3
    # Above one as well: OLMo-hybrid doubles β to reach negative eigenvalues.
    beta = 2 * torch.rand(B, length, H, generator=generator)
    return query, key, value, g, beta, normal(B, H, K, V)


def along(path, query, key, value, g, beta, state):
    """Output at the last node of `path` and the state after it, in float64."""
    unit = [x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key)]
    query, key = (x.repeat_interleave(GROUPS, dim=2) for x in unit)
    state, output = state.double(), None
    for t in path:
        args = (query[:, t] * K**-0.5, key[:, t], value[:, t].double(), g[:, t].double(), beta[:, t].double())
        state, output = step(state, *args)
    return output, state


def path_to(parents, node):
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("length", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("fresh", [False, True], ids=["from a state", "from nothing"])
def test_every_node_is_as_if_its_path_were_fed_alone(length, shape, fresh):
    parents = Window.chain(0, length).parents if shape == "chain" else random_tree(length, seed=length)
    window = Window(0, length, parents)
    *tensors, state = inputs(length, seed=7 * length)
    state = torch.zeros_like(state) if fresh else state
    output, factors = gated_delta.verify(*tensors, None if fresh else state, window.ancestors(CPU))
    for node in range(length):
        path = path_to(parents, node)
        expected, expected_state = along(path, *tensors, state)
        torch.testing.assert_close(output[:, node].double(), expected, rtol=1e-4, atol=1e-5)
        committed = gated_delta.commit(None if fresh else state, factors, torch.tensor(path))
        torch.testing.assert_close(committed.double(), expected_state, rtol=1e-4, atol=1e-5)


def test_strong_decay_of_siblings_overflows_nothing():
    """The decay between nodes of different branches may be any exponential: it must be masked before `exp`."""
    length = 12
    parents = (ROOT, *range(5), ROOT, *range(6, 11))
    query, key, value, g, beta, state = inputs(length, seed=3)
    g = g.clone()
    g[:, :6] = -60.0
    window = Window(0, length, parents)
    output, factors = gated_delta.verify(query, key, value, g, beta, state, window.ancestors(CPU))
    assert torch.isfinite(output).all() and torch.isfinite(factors.writes).all()
    expected, _ = along(path_to(parents, 11), query, key, value, g, beta, state)
    torch.testing.assert_close(output[:, 11].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_the_convolution_reads_along_parents(kernel_size):
    channels, length = 5, 14
    parents = random_tree(length, seed=2)
    window = Window(0, length, parents)
    generator = torch.Generator().manual_seed(1)
    fed = torch.randn(B, channels, length, generator=generator)
    state = torch.randn(B, channels, kernel_size, generator=generator)
    weight, bias = torch.randn(channels, kernel_size, generator=generator), torch.randn(channels, generator=generator)
    taps = window.taps(kernel_size, CPU)
    output = gated_delta.convolve(fed, state, taps, weight, bias, torch.nn.functional.silu)
    for node in range(length):
        line = torch.cat([state, fed[..., path_to(parents, node)]], dim=-1)
        alone = torch.nn.functional.conv1d(line, weight[:, None], bias, groups=channels)[..., -1]
        torch.testing.assert_close(output[..., node], torch.nn.functional.silu(alone))

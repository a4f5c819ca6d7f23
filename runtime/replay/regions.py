"""Decoder layers compiled: traced once a kind from the stock code, their like served by the same program.

A layer is traced to the operators it runs, with its weights and the window's memory as inputs, so that all layers of
a kind share one compiled program. Projections of the same input become one product: their weights are laid side by
side in memory, which no other code sees. Each layer's program is held against the stock layer before it is used.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ddaudit.runtime.replay.errors import NotReplayable, relative_difference
from ddaudit.runtime.replay.passes import choose_products, lift, merge_projections, packed_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    Compiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Relative difference of a compiled layer's output; 2e-2 in reduced precision, where fusing skips roundings."""


@dataclass(frozen=True)
class Program:
    """A compiled layer. Its inputs are the tensors of the call, then the named ones."""

    run: Callable[..., Any]
    names: tuple[str, ...]


class Regions:
    """The compiled decoder layers of one model."""

    def __init__(self, layers: Sequence[nn.Module], compiler: Compiler) -> None:
        self._layers = layers
        self._compiler = compiler
        self._programs: dict[Any, Program] = {}
        self._packed: dict[int, dict[str, torch.Tensor]] = {}
        self._checked: set[Any] = set()

    @contextmanager
    def installed(self, tensors_of: Callable[[int], Mapping[str, torch.Tensor]]) -> Iterator[None]:
        """While it lasts, each layer's forward is its program, over the fixed tensors `tensors_of(index)`."""
        with ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                own = vars(layer).get("forward")
                layer.forward = self.detour(index, tensors_of(index))
                undo.callback(_restore, layer, own)
            yield

    def detour(self, index: int, tensors: Mapping[str, torch.Tensor]) -> Callable[..., torch.Tensor]:
        """A forward for layer `index` whose window has these fixed `tensors`, by name.

        Raises:
            NotReplayable: from the call, where the layer cannot be traced or its program gives something else.
        """
        layer, stock = self._layers[index], self._layers[index].forward

        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

            def call(*inputs: torch.Tensor) -> torch.Tensor:
                rest = iter(inputs)
                values = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
                positional, named = pytree.tree_unflatten(values, spec)
                return stock(*positional, **named)

            kind = (_kind(layer), tuple((tensor.shape, tensor.dtype) for tensor in given))
            if kind not in self._programs:
                self._programs[kind] = self._compile(index, call, given, tensors)
            program = self._programs[kind]
            named = self._named(index, tensors)
            output: torch.Tensor = program.run(*given, *(named[name] for name in program.names))[0]
            # Once, and so before anything is captured.
            if (index, kind) not in self._checked:
                _check(output, call(*given), index)
                self._checked.add((index, kind))
            return output

        return forward

    def _compile(
        self, index: int, call: Callable[..., Any], given: list[torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> Program:
        try:
            graph = make_fx(call)(*given)
        except NotReplayable:
            raise
        except Exception as error:  # whatever stock code raises when it asks a traced tensor for a number
            raise NotReplayable(f"layer {index} cannot be traced: {str(error).splitlines()[0]}") from error
        if not isinstance(call(*given), torch.Tensor):
            raise NotReplayable(f"layer {index} returns several tensors")
        graph, names = lift(graph, self._named(index, tensors))
        groups = merge_projections(graph, names)
        for like in range(len(self._layers)):
            if groups and _kind(self._layers[like]) == _kind(self._layers[index]):
                self._pack(like, groups)
        choose_products(graph)
        named = self._named(index, tensors)
        inputs = [*given, *(named[name] for name in names)]
        return Program(self._compiler(graph, inputs), tuple(names))

    def _pack(self, index: int, groups: Sequence[tuple[str, ...]]) -> None:
        """Lay the weights of each group side by side and let the parameters be views of that."""
        packed = self._packed.setdefault(index, {})
        parameters = dict(self._layers[index].named_parameters())
        for names in groups:
            if packed_name(names) in packed:
                continue
            weights = [parameters[name] for name in names]
            together = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
                weight.data = part
            packed[packed_name(names)] = together

    def _named(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        layer = self._layers[index]
        own = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        return {**own, **tensors, **self._packed.get(index, {})}


def inductor(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Callable[..., Any]:
    """Compile with TorchInductor."""
    from torch._inductor import compile as compile_graph

    options = {
        # Padding a product would copy its weight in every round, and padding its output copies the parts of it.
        "shape_padding": False,
        "comprehensive_padding": False,
        # What is independent, such as the queries' and the keys' norms, goes into one launch.
        "combo_kernels": True,
    }
    compiled: Callable[..., Any] = compile_graph(graph, list(inputs), options=options)
    return compiled


def _restore(layer: nn.Module, own: Any) -> None:
    if own is None:
        del layer.forward
    else:
        layer.forward = own


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that do the same: class, weights' shapes, and every number and name in their modules."""
    settings = tuple(
        (path, type(module).__qualname__, name, repr(value))
        for path, module in layer.named_modules()
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str, tuple, type(None))) and name != "layer_idx"
    )
    weights = tuple((name, tensor.shape, tensor.dtype) for name, tensor in layer.named_parameters())
    return settings, weights


def _check(output: torch.Tensor, expected: torch.Tensor, index: int) -> None:
    difference = relative_difference(output, expected)
    tolerance = TOLERANCE.get(output.dtype, 2e-2)
    # Written so that not-a-number does not pass.
    if not difference <= tolerance:
        raise NotReplayable(f"layer {index}, compiled, differs from the stock layer by {difference:.1e}")

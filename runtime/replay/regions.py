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

from ddaudit.runtime.kernels.product import is_fused, num_pieces
from ddaudit.runtime.replay.errors import NotReplayable, relative_difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    Compiler = Callable[[torch.fx.GraphModule, Sequence[torch.Tensor]], Callable[..., Any]]

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}
"""Relative difference of a compiled layer's output; 2e-2 in reduced precision, where fusing skips roundings."""

_aten, _ops = torch.ops.aten, torch.ops.ddaudit


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
        graph, names = _lift(graph, self._named(index, tensors))
        groups = _merge_projections(graph, names)
        for like in range(len(self._layers)):
            if groups and _kind(self._layers[like]) == _kind(self._layers[index]):
                self._pack(like, groups)
        _choose_products(graph)
        named = self._named(index, tensors)
        inputs = [*given, *(named[name] for name in names)]
        return Program(self._compiler(graph, inputs), tuple(names))

    def _pack(self, index: int, groups: Sequence[tuple[str, ...]]) -> None:
        """Lay the weights of each group side by side and let the parameters be views of that."""
        packed = self._packed.setdefault(index, {})
        parameters = dict(self._layers[index].named_parameters())
        for names in groups:
            if _packed_name(names) in packed:
                continue
            weights = [parameters[name] for name in names]
            together = torch.cat([weight.detach() for weight in weights])
            for weight, part in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
                weight.data = part
            packed[_packed_name(names)] = together

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


def _lift(graph: torch.fx.GraphModule, named: Mapping[str, torch.Tensor]) -> tuple[torch.fx.GraphModule, list[str]]:
    """The trace with every tensor that it holds as an input, and their names in the inputs' order.

    Raises:
        NotReplayable: where the trace holds a tensor that has no name, and so would be the same for all layers.
    """
    names_of = {id(tensor): name for name, tensor in named.items()}
    nodes: dict[str, torch.fx.Node] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(graph, node.target)
        if id(tensor) not in names_of:
            raise NotReplayable(f"its layers read a tensor {tuple(tensor.shape)} that is not theirs")
        name = names_of[id(tensor)]
        if name not in nodes:
            nodes[name] = last = _placeholder(graph, last, f"held_{len(nodes)}", tensor)
        node.replace_all_uses_with(nodes[name])
        graph.graph.erase_node(node)
    output = next(node for node in graph.graph.nodes if node.op == "output")
    output.args = ((output.args[0],),)
    # A module without tensors of its own: those left behind would be inputs a second time.
    lifted = torch.fx.GraphModule(torch.nn.Module(), graph.graph)
    return lifted, list(nodes)


def _placeholder(graph: torch.fx.GraphModule, after: torch.fx.Node, name: str, value: torch.Tensor) -> torch.fx.Node:
    with graph.graph.inserting_after(after):
        node = graph.graph.placeholder(name)
    node.meta["val"] = value
    return node


def _packed_name(names: Sequence[str]) -> str:
    return " + ".join(names)


def _merge_projections(graph: torch.fx.GraphModule, names: list[str]) -> list[tuple[str, ...]]:
    """Turn products of one input with several weights into one product; the weights' names, group by group.

    `names` are those of the graph's last inputs, and the merged weights are added behind them.
    """
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    name_of = dict(zip(inputs[len(inputs) - len(names) :], names, strict=True))
    by_input: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node in nodes:
        if node.target is _aten.mm.default and _weight_of(node) in name_of:
            by_input.setdefault(_viewed(node.args[0]), []).append(node)
    groups: list[tuple[str, ...]] = []
    last = inputs[-1]
    for products in by_input.values():
        weights = [_weight_of(product) for product in products]
        if len(products) < 2 or len({*weights}) < len(weights) or any(len(weight.users) > 1 for weight in weights):
            continue
        group = tuple(name_of[weight] for weight in weights)
        last = _placeholder(graph, last, f"packed_{len(groups)}", weights[0].meta["val"])
        groups.append(group)
        names.append(_packed_name(group))
        with graph.graph.inserting_before(products[0]):
            turned = graph.graph.call_function(_aten.t.default, (last,))
            product = graph.graph.call_function(_aten.mm.default, (products[0].args[0], turned))
            start = 0
            parts = []
            for weight in weights:
                end = start + len(weight.meta["val"])
                parts.append(graph.graph.call_function(_aten.slice.Tensor, (product, 1, start, end)))
                start = end
        for node, part in zip(products, parts, strict=True):
            node.replace_all_uses_with(part)
    if groups:
        # Parts of a product are not contiguous, and what was traced as a view of one may need a copy.
        for node in graph.graph.nodes:
            if node.target in (_aten.view.default, _aten._unsafe_view.default):
                node.target = _aten.reshape.default
        graph.graph.eliminate_dead_code()
        _drop_unused_inputs(graph, names)
    graph.graph.lint()
    graph.recompile()
    return groups


def _choose_products(graph: torch.fx.GraphModule) -> None:
    """Take a product by the kernel that is faster for its shape than the library's."""
    for node in graph.graph.nodes:
        weight = _weight_of(node) if node.target is _aten.mm.default else None
        if weight is None or weight.op != "placeholder":
            continue
        inputs, weights = node.args[0].meta["val"], weight.meta["val"]
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            if len(inputs) == 1 and is_fused(weights):
                product = call(_ops.row_product.default, (node.args[0], weight))
            elif (pieces := num_pieces(len(inputs), weights)) > 1:
                # The sum is left to be fused with what follows.
                parts = call(_ops.split_product.default, (node.args[0], weight, pieces))
                total = call(_aten.sum.dim_IntList, (parts, [0]))
                product = call(_aten._to_copy.default, (total,), {"dtype": inputs.dtype})
            else:
                continue
        node.replace_all_uses_with(product)
        graph.graph.erase_node(node)
    graph.recompile()


def _drop_unused_inputs(graph: torch.fx.GraphModule, names: list[str]) -> None:
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    first = len(inputs) - len(names)
    for node, name in zip(inputs[first:], list(names), strict=True):
        if not node.users:
            graph.graph.erase_node(node)
            names.remove(name)


def _weight_of(product: torch.fx.Node) -> Any:
    turned = product.args[1]
    is_turned = isinstance(turned, torch.fx.Node) and turned.target is _aten.t.default
    return turned.args[0] if is_turned else None


def _viewed(node: Any) -> Any:
    while isinstance(node, torch.fx.Node) and node.target in (_aten.view.default, _aten.reshape.default):
        node = node.args[0]
    return node


def _check(output: torch.Tensor, expected: torch.Tensor, index: int) -> None:
    difference = relative_difference(output, expected)
    tolerance = TOLERANCE.get(output.dtype, 2e-2)
    # Written so that not-a-number does not pass.
    if not difference <= tolerance:
        raise NotReplayable(f"layer {index}, compiled, differs from the stock layer by {difference:.1e}")

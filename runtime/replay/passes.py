"""What is done to a layer's trace before it is compiled: its tensors become inputs, and its products better ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ddaudit.runtime.kernels.product import is_fused, num_pieces
from ddaudit.runtime.replay.errors import NotReplayable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_aten, _ops = torch.ops.aten, torch.ops.ddaudit


def lift(graph: torch.fx.GraphModule, named: Mapping[str, torch.Tensor]) -> tuple[torch.fx.GraphModule, list[str]]:
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


def merge_projections(graph: torch.fx.GraphModule, names: list[str]) -> list[tuple[str, ...]]:
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
        names.append(packed_name(group))
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


def choose_products(graph: torch.fx.GraphModule) -> None:
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


def packed_name(names: Sequence[str]) -> str:
    return " + ".join(names)


def _placeholder(graph: torch.fx.GraphModule, after: torch.fx.Node, name: str, value: torch.Tensor) -> torch.fx.Node:
    with graph.graph.inserting_after(after):
        node = graph.graph.placeholder(name)
    # What it looks like: the tensor itself would live as long as the program, and with it all that it is a view of.
    with FakeTensorMode():
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return node


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

"""Reads one function: whether it feeds a target model the tokens it chose, round after round, and returns them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_INPUT_IDS = re.compile(
    r"(?:(?:input|prompt|context|prefix|token|initial|start|src|x)_?)?(?:ids|tokens|idx|token_ids|input_ids)"
    r"|prompts?|prefix|inputs?|context"
)
# What a Transformers model takes or gives and other modules do not.
_MODEL_KEYWORDS = {"use_cache", "logits_to_keep", "num_logits_to_keep", "output_hidden_states", "return_dict"}
_MODEL_OUTPUTS = {"logits", "last_hidden_state"}
_MODEL_CLASS = re.compile(
    r"\b(?:AutoModel\w*|PreTrainedModel|GenerationMixin|\w+For(?:CausalLM|ConditionalGeneration))\b"
)
# Calls and attributes that hand token ids on as token ids.
_KEEPS_IDS = {"argmax", "cat", "clone", "concat", "contiguous", "cpu", "cuda", "detach", "expand", "flatten", "gather"}
_KEEPS_IDS |= {"hstack", "index_select", "int", "item", "list", "long", "multinomial", "narrow", "numpy", "repeat"}
_KEEPS_IDS |= {"reshape", "sample", "squeeze", "stack", "tensor", "to", "tolist", "tuple", "unsqueeze", "view", "where"}
_ENDS_IDS = {"decode", "batch_decode", "len", "print", "sum", "isin", "any", "all"}


def is_decoding_loop(node: Function, callees: Mapping[str, list[Function]]) -> bool:
    """Whether a function is an entry point. `callees` are the repository's functions by bare name."""
    return _Reading(node, callees).is_entry()


def annotation(arg: ast.arg) -> str:
    return ast.unparse(arg.annotation) if arg.annotation else ""


@dataclass
class _Flow:
    """What local names are given: by assignment, by a loop, or by being put into them."""

    values: dict[str, list[ast.expr]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of(cls, nodes: Iterable[ast.AST]) -> _Flow:
        flow = cls()
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        flow._give(target, value)
                case (
                    ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value)
                ):
                    flow._give(target, value)
                case ast.NamedExpr(target=target, value=value):
                    flow._give(target, value)
                case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                    flow._give(target, value)
                case ast.withitem(context_expr=value, optional_vars=ast.expr() as target):
                    flow._give(target, value)
                case ast.Call(func=ast.Attribute(value=target, attr="append" | "extend" | "copy_"), args=[value]):
                    flow._give(target, value)
        return flow

    def _give(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values = [value] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                values = value.elts
            for item, part in zip(target.elts, values, strict=True):
                self._give(item, part)
        elif name := _root(target):
            self.values[name].append(value)

    def sources(self, names: set[str]) -> set[str]:
        """`names` and all the names that their values are computed from."""
        reached: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in reached:
                reached.add(name)
                pending += [source for value in self.values.get(name, ()) for source in _names(value)]
        return reached

    def spread(self, names: set[str], test: Callable[[ast.expr, set[str]], bool]) -> set[str]:
        """`names` and all the names with a value that passes `test`, given the names found so far."""
        found = set(names)
        while more := {
            name for name, values in self.values.items() if name not in found and any(test(v, found) for v in values)
        }:
            found |= more
        return found


class _Reading:
    """One function, read for: a loop that feeds a target model the tokens it chose, and returns them."""

    def __init__(self, node: Function, callees: Mapping[str, list[Function]]) -> None:
        self.node = node
        self.callees = callees
        self.body = list(_own_nodes(node))
        self.flow = _Flow.of(self.body)

    def is_entry(self) -> bool:
        ids = {arg.arg for arg in _all_args(self.node) if _may_be_ids(arg) and not self._is_tokenized(arg.arg)}
        if not ids or any(isinstance(part, ast.Yield | ast.YieldFrom) for part in self.body):
            return False
        targets = [arg.arg for arg in _all_args(self.node) if arg.arg not in ids and self._takes_model(arg.arg)]
        for loop in self.body:
            if isinstance(loop, ast.While | ast.For):
                fed = [
                    given
                    for target in targets
                    for call in self._calls(loop, target)
                    if (given := self._given_ids(call, target)) and self._feeds_back(loop, call, given)
                ]
                if fed and self._returns_ids(loop, ids.union(*fed)):
                    return True
        return False

    def _is_tokenized(self, name: str) -> bool:
        """Whether a parameter is text: given to something that makes ids of it."""
        return any(
            isinstance(part, ast.Call)
            and re.search(r"token|encode|processor|chat_template", ast.unparse(part.func))
            and any(isinstance(arg, ast.Name) and arg.id == name for arg in part.args)
            for part in self.body
        )

    def _takes_model(self, name: str, depth: int = 3) -> bool:
        """Whether a parameter is called as a Transformers model, here or where it is passed on."""
        written = next((annotation(arg) for arg in _all_args(self.node) if arg.arg == name), "")
        annotated = bool(_MODEL_CLASS.search(written))
        for call in self._calls(self.node, name):
            if _is_model_call(call, name):
                if annotated or self._looks_like_model(call):
                    return True
            elif depth and any(
                _Reading(callee, self.callees)._takes_model(parameter, depth - 1)
                for callee, parameter in self._passed_to(call, name)
            ):
                return True
        return False

    def _calls(self, inside: ast.AST, name: str) -> Iterator[ast.Call]:
        """Calls of the model itself, and calls of the repository's functions that get it."""
        for part in ast.walk(inside):
            if isinstance(part, ast.Call) and (_is_model_call(part, name) or self._passed_to(part, name)):
                yield part

    def _passed_to(self, call: ast.Call, name: str) -> list[tuple[Function, str]]:
        """The repository's functions that a call may mean, each with the parameter that gets `name`."""
        function = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        found = []
        for callee in self.callees.get(function, ()):
            if callee is self.node:
                continue
            positional = [arg.arg for arg in (*callee.args.posonlyargs, *callee.args.args)]
            if positional[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute):
                positional = positional[1:]
            given = dict(zip(positional, call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            found += [(callee, key) for key, value in given.items() if isinstance(value, ast.Name) and value.id == name]
        return found

    def _looks_like_model(self, call: ast.Call) -> bool:
        if _MODEL_KEYWORDS & {keyword.arg for keyword in call.keywords}:
            return True
        holders = {name for name, values in self.flow.values.items() if call in values}
        return any(
            isinstance(part, ast.Attribute)
            and part.attr in _MODEL_OUTPUTS
            and (part.value is call or (isinstance(part.value, ast.Name) and part.value.id in holders))
            for part in ast.walk(self.node)
        )

    def _given_ids(self, call: ast.Call, target: str) -> set[str]:
        """Names in what a call gives to the model as ids; all it gives, where the model is one of them."""
        given = [keyword.value for keyword in call.keywords if keyword.arg == "input_ids"] or call.args[:1]
        if not _is_model_call(call, target):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
        return {name for value in given for name in _names(value)} - {target}

    def _feeds_back(self, loop: ast.AST, call: ast.Call, given: set[str]) -> bool:
        """Whether the ids given to the model depend on what it said in the round before."""
        outputs = {
            name
            for name, values in _Flow.of(ast.walk(loop)).values.items()
            if any(inner is call for value in values for inner in ast.walk(value))
        }
        return bool(outputs & self.flow.sources(given))

    def _returns_ids(self, loop: ast.AST, ids: set[str]) -> bool:
        """Whether token ids that the loop writes are returned: alone, or inside what is returned."""
        written = set(_Flow.of(ast.walk(loop)).values) & self.flow.spread(ids, self._are_ids)
        made = self.flow.spread(written, self._are_or_carry_ids)
        returned = [part.value for part in self.body if isinstance(part, ast.Return) and part.value is not None]
        return any(self._are_or_carry_ids(value, made) for value in returned)

    def _are_or_carry_ids(self, value: ast.expr, holders: set[str]) -> bool:
        return self._are_ids(value, holders) or self._carries(value, holders)

    def _are_ids(self, value: ast.expr, holders: set[str]) -> bool:
        """Whether an expression is token ids if the names in `holders` are."""
        match value:
            case ast.Name(id=name):
                return name in holders
            case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.Await(value=inner):
                return self._are_ids(inner, holders)
            case ast.Attribute(value=inner, attr="T" | "data" | "input_ids"):
                return self._are_ids(inner, holders)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                return any(self._are_ids(item, holders) for item in items)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._are_ids(left, holders) or self._are_ids(right, holders)
            case ast.IfExp(body=one, orelse=other):
                return self._are_ids(one, holders) or self._are_ids(other, holders)
            case ast.Call(func=function, args=args):
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                if name in ("argmax", "multinomial"):
                    return True
                if name not in _KEEPS_IDS and name not in self.callees:
                    return False
                owner = [function.value] if isinstance(function, ast.Attribute) else []
                return any(self._are_ids(item, holders) for item in (*owner, *args))
        return False

    def _carries(self, value: ast.expr, ids: set[str]) -> bool:
        """Whether an object, dict or tuple made here holds ids."""
        match value:
            case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Dict(values=items):
                return any(self._are_ids(item, ids) or self._carries(item, ids) for item in items)
            case ast.Call(func=function, args=args, keywords=keywords):
                name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                if name in _ENDS_IDS or not (name[:1].isupper() or name in ("dict", "tuple", "list")):
                    return False
                return any(self._are_ids(item, ids) for item in (*args, *(keyword.value for keyword in keywords)))
        return False


def _own_nodes(node: Function) -> Iterator[ast.AST]:
    """Every node of a function's body but those of the functions inside."""
    pending: list[ast.AST] = list(node.body)
    while pending:
        part = pending.pop()
        yield part
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending += ast.iter_child_nodes(part)


def _all_args(node: Function) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def _may_be_ids(arg: ast.arg) -> bool:
    return bool(_INPUT_IDS.fullmatch(arg.arg)) and annotation(arg) not in ("str", "list[str]", "List[str]", "int")


def _is_model_call(call: ast.Call, name: str) -> bool:
    match call.func:
        case ast.Name(id=function):
            return function == name
        case ast.Attribute(value=ast.Name(id=owner), attr="forward" | "model" | "module" | "__call__"):
            return owner == name
    return False


def _root(target: ast.expr) -> str:
    """The name that an assignment changes: of `out[:, 0]` and `out.x` it is `out`."""
    while isinstance(target, ast.Subscript | ast.Attribute | ast.Starred):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _names(value: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(value) if isinstance(part, ast.Name)}

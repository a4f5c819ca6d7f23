"""Cache compaction by hand: a loop over a cache's layers that moves the kept rows of the last window, then a crop."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddaudit.auditor.facts.library import CHAINABLE
from ddaudit.auditor.facts.scopes import Function
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Applicability, Edit, Fix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.scopes import Scope

GATHERS = frozenset({"index_select", "gather", "take_along_dim", "__getitem__"})
BUILTINS = frozenset({"getattr", "hasattr", "int", "isinstance", "len", "range", "slice"})
# Of tensors and of torch: none of these changes a number.
METHODS = GATHERS | {
    "arange", "as_tensor", "cat", "clone", "contiguous", "copy_", "device", "dim", "expand", "expand_as", "index_copy_",
    "long", "narrow", "numel", "reshape", "size", "tensor", "to", "unsqueeze", "view",
}  # fmt: skip


@dataclass(frozen=True)
class Compaction:
    """One loop, the places in it that move keys or values, and the crop that follows."""

    loop: ast.For
    cache: Value
    moves: tuple[ast.Attribute, ...]
    """`layer.keys` and `layer.values` where they are written or handed to a function that writes."""
    crop: ast.Expr | None
    arguments: tuple[str, str, str] | None
    """Texts of the cache, the past length and the kept indices; None where the loop is not understood."""
    reason: str
    """Why it is not understood."""

    def fix(self, file: FileFacts) -> Fix | str:
        """One call in place of the loop and the crop, or why there is none. The loop and the crop share it."""
        if self.arguments is None or self.crop is None:
            return self.reason
        if (runtime := file.runtime_call("keep_in_cache", self.loop)) is None:
            return "the names `keep_in_cache` and `runtime` mean something else here"
        edit = Edit(
            file.offsets(self.loop)[0], file.offsets(self.crop)[1], f"{runtime[0]}({', '.join(self.arguments)})"
        )
        reason = "keeps the same rows of the window on full attention, and exactly the same tokens elsewhere"
        return Fix((edit,), Applicability.SAFE, reason, (runtime[1],))


def find_compactions(file: FileFacts) -> Iterator[Compaction]:
    """Every loop over a cache's layers that writes their keys or values."""
    for node in file.file.of(ast.For):
        if isinstance(node, ast.For) and (cache := file.holds(node.iter, Kind.CACHE_LAYERS)) is not None:
            inside = (item for statement in node.body for item in ast.walk(statement))
            moves = tuple(find_moves(inside, file))
            if moves and not file.is_legacy_branch(node):
                yield _understand(node, cache, moves, file)


def find_moves(nodes: Iterable[ast.AST], file: FileFacts) -> Iterator[ast.Attribute]:
    """Each `layer.keys` and `layer.values` of a cache that is written, or handed to a function that may write."""
    for node in nodes:
        if not isinstance(node, ast.Attribute) or node.attr not in ("keys", "values"):
            continue
        if file.holds(node.value, Kind.CACHE_LAYER) is None:
            continue
        above = file.parent(node)
        stored = above if isinstance(above, ast.Subscript) and above.value is node else node
        if (
            (isinstance(stored.ctx, ast.Store) and not _keeps_rows(stored, file))
            or (isinstance(above, ast.Call) and node in above.args and _callee(above, file) is not None)
            or (isinstance(above, ast.Attribute) and above.attr in ("copy_", "index_copy_", "narrow"))
        ):
            yield node


def _keeps_rows(stored: ast.Attribute | ast.Subscript, file: FileFacts) -> bool:
    """`layer.keys = layer.keys.to(device)`: the same rows, elsewhere or of another type."""
    match file.parent(stored):
        case ast.Assign(value=ast.Call(func=ast.Attribute(value=ast.Attribute() as taken, attr=attr))):
            return attr in CHAINABLE and file.text(taken) == file.text(stored)
    return False


def _understand(loop: ast.For, cache: Value, moves: tuple[ast.Attribute, ...], file: FileFacts) -> Compaction:
    def refuse(reason: str) -> Compaction:
        return Compaction(loop, cache, moves, crop, None, reason)

    crop = _crop_after(loop, file)
    if crop is None:
        return refuse("no crop of the same cache follows the loop")
    assert isinstance(crop.value, ast.Call) and isinstance(crop.value.func, ast.Attribute)
    split = _split_length(_length(crop.value.args[0], crop.value.func.value))
    if split is None:
        return refuse("the crop's length is not written as the past length plus the number of kept tokens")
    past, kept = split
    scope = file.scope(loop)
    inside = [node for statement in loop.body for node in ast.walk(statement)]
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    is_plain = all(_is_plain(statement, file) for statement in loop.body) and not loop.orelse
    if not is_plain or not _only_moves(inside, past, set(_names(kept)), scope, file):
        return refuse("the loop does more than moving keys and values")
    if {node.attr for node in moves} != {"keys", "values"}:
        return refuse("the loop does not move both keys and values")
    if stored & {name for expr in (past, kept) for name in _names(expr)}:
        return refuse("the loop changes the past length or the kept indices")
    if any(
        isinstance(node, ast.Name) and node.id in stored and node.lineno > (loop.end_lineno or 0)
        for node in file.nodes
        if file.scope(node) is scope
    ):
        return refuse("a name set in the loop is used after it")
    for move in moves:
        statement = file.statement(move)
        if not _is_relative(statement, past, set(_names(kept)), scope, file):
            return refuse("it is not clear that the kept indices count from the start of the window")
    if file.source.has_comment(file.offsets(loop)[0], file.offsets(crop)[1]):
        return refuse("a comment stands inside the code that would be replaced")
    receiver = crop.value.func.value
    return Compaction(loop, cache, moves, crop, (file.text(receiver), file.text(past), file.text(kept)), "")


def _crop_after(loop: ast.For, file: FileFacts) -> ast.Expr | None:
    block = file.block(loop)
    following = block[block.index(loop) + 1 :]
    match following[:1]:
        case [ast.Expr(value=ast.Call(func=ast.Attribute(value=receiver, attr="crop"), args=[_], keywords=[]))]:
            iterated = loop.iter
            while isinstance(iterated, ast.Call) and iterated.args:
                iterated = iterated.args[0]
            if isinstance(iterated, ast.Attribute) and file.text(iterated.value) == file.text(receiver):
                statement = following[0]
                assert isinstance(statement, ast.Expr)
                return statement
    return None


def _length(argument: ast.expr, cache: ast.expr) -> ast.expr:
    """The length that `crop` leaves; written for 5.24 as minus what the cache has."""
    match argument:
        case ast.BinOp(
            left=left, op=ast.Sub(), right=ast.Call(func=ast.Attribute(value=asked, attr="get_seq_length"), args=[])
        ):
            return left if ast.dump(asked) == ast.dump(cache) else argument
    return argument


def _split_length(length: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """`P, I` of `P + len(I)`, `P + I.numel()` or `P + I.shape[0]`, in either order."""
    if not isinstance(length, ast.BinOp) or not isinstance(length.op, ast.Add):
        return None
    for count, past in ((length.right, length.left), (length.left, length.right)):
        match count:
            case ast.Call(func=ast.Name(id="len"), args=[kept]):
                return past, kept
            case ast.Call(func=ast.Attribute(value=kept, attr="numel"), args=[]):
                return past, kept
            case ast.Subscript(value=ast.Attribute(value=kept, attr="shape"), slice=ast.Constant(value=0)):
                return past, kept
    return None


def _is_plain(statement: ast.stmt, file: FileFacts) -> bool:
    """A guard that skips a layer, a local value, or a move."""
    match statement:
        case ast.If(body=[ast.Continue()], orelse=[]):
            return True
        case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
            return True
        case ast.Assign(targets=[target]):
            base = target.value if isinstance(target, ast.Subscript) else target
            return isinstance(base, ast.Attribute) and file.holds(base.value, Kind.CACHE_LAYER) is not None
        case ast.Expr(value=ast.Call() as call):
            return any(
                isinstance(node, ast.Attribute) and file.holds(node.value, Kind.CACHE_LAYER) is not None
                for node in ast.walk(call)
            )
    return False


def _only_moves(nodes: list[ast.AST], past: ast.expr, kept: set[str], scope: Scope, file: FileFacts) -> bool:
    """Whether nothing is reckoned but rows from the past length on, and nothing is called but what reads or moves."""
    past_text = ast.dump(past)
    for node in nodes:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                pairs = ((left, right), (right, left))
                if not any(ast.dump(one) == past_text and _depends(other, kept, scope, file) for one, other in pairs):
                    return False
            case ast.BinOp(op=ast.Sub(), right=right) if ast.dump(right) == past_text:
                pass
            case ast.BinOp() | ast.Await() | ast.Yield() | ast.YieldFrom() | ast.NamedExpr():
                return False
            case ast.Call(func=ast.Name(id=name)):
                if name not in BUILTINS and _callee(node, file) is None:
                    return False
            case ast.Call(func=ast.Attribute(attr=name)):
                if name not in METHODS:
                    return False
            case ast.Call():
                return False
    return True


def _is_relative(root: ast.AST, past: ast.expr, kept: set[str], scope: Scope, file: FileFacts) -> bool:
    """Whether the indices, found in `root` or in what it uses, are added to the past length or index the tail."""
    past_text = ast.dump(past)
    for node in _reach(root, scope, file):
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                for index, offset in ((left, right), (right, left)):
                    if ast.dump(offset) == past_text and _depends(index, kept, scope, file):
                        return True
            case ast.Call(func=ast.Name()):
                function = _callee(node, file)
                if function is not None and _function_is_relative(function, node, past_text, kept, scope, file):
                    return True
    return _indexes_tail(_reach(root, scope, file), {past_text}, lambda e: _depends(e, kept, scope, file))


def _function_is_relative(
    function: Function, call: ast.Call, past_text: str, kept: set[str], scope: Scope, file: FileFacts
) -> bool:
    """The same for a function that is handed the tensor, the past length and the indices."""
    names = function.positional
    given = list(zip(names, call.args, strict=False)) + [(k.arg, k.value) for k in call.keywords if k.arg]
    pasts = {ast.dump(ast.Name(name, ast.Load())) for name, arg in given if ast.dump(arg) == past_text}
    indices = {name for name, arg in given if _depends(arg, kept, scope, file)}
    if not pasts or not indices:
        return False
    nodes = list(ast.walk(function.node))

    def is_index(expr: ast.expr) -> bool:
        return bool(indices & set(_names(expr)))

    added = any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add)
        and (
            (ast.dump(node.left) in pasts and is_index(node.right))
            or (ast.dump(node.right) in pasts and is_index(node.left))
        )
        for node in nodes
    )
    return added or _indexes_tail(nodes, pasts, is_index)


def _indexes_tail(nodes: Iterable[ast.AST], pasts: set[str], is_index: Callable[[ast.expr], bool]) -> bool:
    """Whether a tensor cut at the past length is gathered by the indices."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=tail, attr=attr), args=args) if attr in GATHERS:
                if any(is_index(arg) for arg in args) and _starts_at(tail, pasts):
                    return True
            case ast.Subscript(value=tail, slice=key) if is_index(key) and _starts_at(tail, pasts):
                return True
    return False


def _starts_at(tail: ast.expr, pasts: set[str]) -> bool:
    for node in ast.walk(tail):
        match node:
            case ast.Call(func=ast.Attribute(attr="narrow"), args=[_, start, _]) if ast.dump(start) in pasts:
                return True
            case ast.Slice(lower=ast.expr() as start) if ast.dump(start) in pasts:
                return True
    return False


def _reach(root: ast.AST, scope: Scope, file: FileFacts, depth: int = 4) -> Iterator[ast.AST]:
    """Nodes of `root` and of what its local names are made from."""
    seen: set[str] = set()
    pending: list[tuple[ast.AST, int]] = [(root, depth)]
    while pending:
        current, left = pending.pop()
        for node in ast.walk(current):
            yield node
            if isinstance(node, ast.Name) and left and node.id not in seen:
                seen.add(node.id)
                pending += [(made, left - 1) for made in _makers(node.id, scope, file)]


def _makers(name: str, scope: Scope, file: FileFacts) -> Iterator[ast.AST]:
    """What a name of this function, or a function defined inside it, is made from."""
    home = scope.find(name)
    if home is None or home is file.file.scope:
        return
    for binding in home.names[name]:
        if isinstance(binding, ast.FunctionDef):
            yield binding
        elif isinstance(binding, ast.Name) and isinstance(assignment := file.parent(binding), ast.Assign):
            yield assignment.value


def _depends(expr: ast.expr, names: set[str], scope: Scope, file: FileFacts) -> bool:
    return any(isinstance(node, ast.Name) and node.id in names for node in _reach(expr, scope, file))


def _callee(call: ast.Call, file: FileFacts) -> Function | None:
    for value in file.values(call.func):
        target = file.definition(value)
        if value.kind is Kind.FUNCTION and isinstance(target, Function):
            return target
    return None


def _names(expr: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(expr) if isinstance(node, ast.Name))

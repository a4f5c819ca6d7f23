"""Names of a checkpoint's tensors, written out.

`state["model.embed_tokens.weight"]` is the name in a text-only Llama or Qwen3 checkpoint. A composite one such as
Qwen3.6's has `model.language_model.embed_tokens.weight`, GPT-NeoX other words, a tied model no `lm_head.weight`, and a
compiled or PEFT-wrapped model prefixes every key. Take the tensor from the loaded model
(`model.get_input_embeddings().weight`), or look the key up by its end. Tables of a class's own tied or ignored keys
are fine.

On: every release; composite, tied, compiled and PEFT-wrapped models.
Seen: seen in SafeAILab/EAGLE and kmeng01/rome; the names are those of the published checkpoints.
Fix: none: the model may not be loaded there.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.evidence import TEST
from ddaudit.auditor.facts.values import Kind, Value
from ddaudit.auditor.finding import Severity
from ddaudit.auditor.rule import Bad, Good, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

# `model.layers.…weight`, with `*` for what an f-string fills in.
KEY = re.compile(
    r"^(base_model\.model\.)?((model|transformer|gpt_neox|language_model)\.([\w*]+\.)*|lm_head\.|embed_out\.)"
    r"(weight|bias)$"
)
TABLES = re.compile(r"^_?(tied_weights|keys_to_ignore|no_split|dynamic_tied)")

TESTS = re.compile(r"(^|/)tests?/")


class WeightKey(Rule):
    code = "DDA209"
    kind = "weight-key"
    severity = Severity.ERROR
    message = (
        "`{name}` is the tensor's name in checkpoints of some families only; take it from the loaded model, "
        "such as `get_input_embeddings().weight`, or look the key up by its end"
    )
    nodes = (ast.Constant, ast.JoinedStr)
    markers = (".weight", ".bias")
    EXAMPLES = (
        Good("""
            from torch import nn

            class Heads(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.lm_head = nn.Linear(width, width)

            def export(width):
                heads = Heads(width)
                state = heads.state_dict()
                return {"lm_head.weight": state["lm_head.weight"].detach().clone()}
        """),
        Good("""
            class Model:
                _tied_weights_keys = ["lm_head.weight"]
        """),
        Good("""
            def drafter(state):
                return {name.removeprefix("drafter."): tensor for name, tensor in state.items()}
        """),
        Good("""
            def describe():
                print("model.embed_tokens.weight")
        """),
        Bad("""
            def embedding(state):
                return state["model.embed_tokens.weight"]
        """),
        Bad("""
            def projection(state, i):
                return state[f"model.layers.{i}.self_attn.q_proj.weight"]
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        text = _text(node)
        if text is None or not KEY.match(text) or not _is_key(node, file) or _names_made(node, file):
            return
        # A test names the tensors of a checkpoint that it makes for itself; `test_speed.py` may be a script.
        if TESTS.search(file.source.path) or (TEST.search(file.source.path) and "pytest" in file.file.packages):
            return
        fact = f"{file.source.path}:{file.lineno(node)}: a checkpoint's tensor is named"
        yield self.report(
            file, node, Value(Kind.LIBRARY, text, evidence=(fact,)), fix="the model may not be loaded here",
            claim=Claim(Ask.WEIGHT, text), name=text,
        )  # fmt: skip


def _text(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
    return None


def _names_made(node: ast.AST, file: FileFacts) -> bool:
    """The key of a dict under which a tensor is put that is made there, as in a test."""
    match file.parent(node):
        case ast.Dict(keys=keys, values=values):
            made = values[keys.index(node)] if node in keys else None
            if isinstance(made, ast.Call):
                return any(n.startswith("torch.") for n in file.qualified_names(made.func)) or _copies(made)
    return False


def _copies(made: ast.Call) -> bool:
    """`tensor.detach().clone()`: the dict is written out, and nothing is looked up in it."""
    return any(
        isinstance(part, ast.Attribute) and part.attr in ("clone", "detach", "contiguous", "cpu")
        for part in ast.walk(made.func)
    )


def _is_own_state(above: ast.Subscript, file: FileFacts) -> bool:
    """An entry of the state of the repository's own module."""
    match file.made_from(above.value):
        case ast.Call(func=ast.Attribute(value=module, attr="state_dict")):
            return file.holds(module, Kind.OWN) is not None and file.holds(module, Kind.MODEL) is None
    return False


def _is_key(node: ast.AST, file: FileFacts) -> bool:
    """Used to find a tensor: as an index, in a comparison, a list, or an argument; not printed, not a table."""
    above = file.parent(node)
    for holder in file.ancestors(node):
        match holder:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                if TABLES.match(name):
                    return False
            case ast.Call(func=ast.Name(id="print") | ast.Attribute(attr="info" | "warning" | "debug" | "error")):
                return False
            case ast.JoinedStr() if holder is not node:
                return False
            case ast.FunctionDef() | ast.ClassDef():
                break
    match above:
        case ast.Subscript(slice=key):
            return key is node and not _is_own_state(above, file)
        case ast.Compare() if isinstance(file.parent(above), ast.Assert):
            return False
        case ast.Compare() | ast.Assign() | ast.List() | ast.Tuple() | ast.Set() | ast.Dict():
            return True
        case ast.Call(func=ast.Attribute(attr="get" | "get_tensor" | "pop" | "get_slice" | "get_parameter")):
            return True
    return False

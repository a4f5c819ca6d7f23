"""The output head taken by name, or replaced by something that only sometimes equals it.

`model.lm_head` is not every family's name (`embed_out` on GPT-NeoX before 5.0), and on a composite or wrapped
model it stands elsewhere: `get_output_embeddings()` finds it. Applied by hand it still is not the whole way to the
logits: Granite, Cohere, Gemma 2 and Falcon-H1 scale or cap them after the head (huggingface/trl#5575). The input
embedding matrix equals it on tied models only, and whether a model is tied is decided by the top-level flag of a
composite config, which the text config's own can contradict (huggingface/transformers#43429): compare or take the
output matrix.

On: every release; GPT-NeoX before 5.0 by name; Granite, Cohere, Gemma 2, Falcon-H1 by value; untied models by matrix.
Seen: huggingface/trl#5575, apple/ml-cross-entropy#48, vllm-project/vllm#51063.
Fix: safe for the module, unsafe for a product with its matrix; none where the head is assigned to.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import HEAD_NAMES, INNER_NAMES
from ddaudit.auditor.facts.scopes import Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._paths import asks_encoder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.finding import Finding

INPUT_MATRIX = (
    "the input embedding is the output matrix of tied models only, and Qwen3.6-27B is untied; "
    "use `get_output_embeddings()`"
)
TIE_FLAG = (
    "on composite models the top-level flag decides the tie, and the text config's can differ; "
    "use `get_output_embeddings()`, which is right either way"
)


HEAD_SETTING = re.compile(r"(^|_)(lm_)?head_(module|name|path|tmp)$")


class LmHead(Rule):
    code = "DDA202"
    kind = "lm-head"
    severity = Severity.PORT
    message = "`{path}` is not every model's head, and some scale or cap its logits; use `get_output_embeddings()`"
    nodes = (Named(ast.Attribute, HEAD_NAMES | {"tie_word_embeddings"}), ast.BinOp, ast.Call, ast.Subscript)
    markers = ("lm_head", "embed_out", "get_input_embeddings", "tie_word_embeddings")
    EXAMPLES = (
        Good("""
            from torch import nn

            class Tiny(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.lm_head = nn.Linear(width, 10)

                def forward(self, hidden):
                    return self.lm_head(hidden)
        """),
        Good("""
            from transformers import PreTrainedModel

            def logits(model: PreTrainedModel, hidden):
                return model.get_output_embeddings()(hidden)
        """),
        Good("""
            from transformers import PreTrainedModel

            def logits(model: PreTrainedModel, out):
                if not model.config.is_encoder_decoder:
                    return out.logits
                else:
                    return model.lm_head(out[0])
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def logits(model: PreTrainedModel, hidden):
                return model.lm_head(hidden)
            """,
            """
            from transformers import PreTrainedModel

            def logits(model: PreTrainedModel, hidden):
                return model.get_output_embeddings()(hidden)
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def scores(model: PreTrainedModel, hidden, keep):
                return hidden[keep] @ model.lm_head.weight.T
            """,
            """
            from transformers import PreTrainedModel

            def scores(model: PreTrainedModel, hidden, keep):
                return model.get_output_embeddings()(hidden[keep])
            """,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def untie(model: PreTrainedModel, head):
                model.lm_head = head
        """),
        Bad("""
            from transformers import PreTrainedModel

            def scores(model: PreTrainedModel, direction):
                table = model.get_input_embeddings().weight
                return direction @ table.T
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Attribute(value=base, attr=attr) if attr in HEAD_NAMES:
                model = file.holds(base, Kind.MODEL, Kind.BACKBONE)
                if model is None or file.is_under(node, asks_encoder):
                    return
                if not file.is_set_by_own_class(node) and not file.is_patched_self(base):
                    yield self.report(
                        file, node, model, fix=_fix(node, file), claim=_claim(node, file), path=file.text(node)
                    )
            case ast.Attribute(value=base, attr="tie_word_embeddings"):
                config = file.holds(base, Kind.TEXT_CONFIG)
                if config is not None and isinstance(node.ctx, ast.Load):
                    reason = "the whole branch goes, not only the flag"
                    yield self.report(file, node, config, severity=Severity.SILENT, message=TIE_FLAG, fix=reason)
            case ast.BinOp(op=ast.MatMult(), right=right):
                yield from self._input_matrix(node, right, file)
            case ast.Call(func=ast.Attribute(attr="linear" | "matmul"), args=[_, right, *_]):
                yield from self._input_matrix(node, right, file)
            case ast.Subscript(value=ast.Attribute(value=base, attr="hf_device_map"), slice=name) if _names_head(name):
                if (model := file.holds(base, Kind.MODEL, Kind.BACKBONE)) is not None:
                    yield self.report(file, node, model, fix="the device is looked up by name", path=file.text(name))
            # `hasattr`, and `getattr` with a default, ask whether it has that name.
            case ast.Call(func=ast.Name(id="hasattr")) | ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                return
            case ast.Call(args=[given, name, *_]) if _names_head(name):
                if (model := file.holds(given, Kind.MODEL, Kind.BACKBONE)) is not None:
                    yield self.report(file, name, model, fix="the function finds it by name", path=file.text(name))

    def _input_matrix(self, node: ast.AST, right: ast.expr, file: FileFacts) -> Iterator[Finding]:
        if (table := file.holds(right, Kind.EMBEDDING_WEIGHT)) is not None:
            reason = "the product becomes a call of the head"
            yield self.report(file, node, table, severity=Severity.SILENT, message=INPUT_MATRIX, fix=reason)


def _claim(node: ast.Attribute, file: FileFacts) -> Claim | None:
    """The path of the head below the model, and whether it is called or only taken."""
    path, root = [node.attr], node.value
    while isinstance(root, ast.Attribute) and root.attr in INNER_NAMES and file.holds(root.value, Kind.MODEL):
        path.insert(0, root.attr)
        root = root.value
    if file.holds(root, Kind.MODEL) is None:
        return None
    above = file.parent(node)
    called = isinstance(above, ast.Call) and above.func is node
    return Claim(Ask.HEAD if called else Ask.PATH, ".".join(path))


def _product(head: ast.Attribute, file: FileFacts) -> ast.BinOp | None:
    """`hidden @ model.lm_head.weight.T`, of which `head` is a part."""
    weight = file.parent(head)
    turned = file.parent(weight) if weight is not None else None
    product = file.parent(turned) if turned is not None else None
    match weight, turned, product:
        case ast.Attribute(attr="weight"), ast.Attribute(attr="T" | "mT"), ast.BinOp(op=ast.MatMult(), right=right):
            return product if right is turned and isinstance(product, ast.BinOp) else None
    return None


def _names_head(name: ast.expr) -> bool:
    """A string that names the head, or is made from a name for it, or a name for such a string."""
    match name:
        case ast.Name(id=text) | ast.Attribute(attr=text):
            return HEAD_SETTING.search(text) is not None
        case ast.Constant(value=str(text)):
            return text.partition(".")[0] in HEAD_NAMES
        case ast.JoinedStr(values=parts):
            return any(
                isinstance(part, ast.FormattedValue) and re.search(r"\b(lm_)?head", ast.unparse(part.value))
                for part in parts
            )
    return False


def _fix(node: ast.Attribute, file: FileFacts) -> Fix | str:
    if not file.is_read(node):
        return "the head is assigned to, and a call cannot be"
    root = node.value
    if (product := _product(node, file)) is not None:
        left = file.text(product.left)
        edit = file.edit(product, f"{file.text(root)}.get_output_embeddings()({left})")
        reason = "the head as it is: with its adapter, its quantisation and its bias, which the matrix alone leaves out"
        return Fix((edit,), Applicability.UNSAFE, reason)
    while isinstance(root, ast.Attribute) and root.attr in INNER_NAMES and file.holds(root.value, Kind.MODEL):
        root = root.value
    reason = "the accessor returns the same module where the head has this name"
    edit = file.edit(node, f"{file.operand(root)}.get_output_embeddings()")
    return Fix((edit,), Applicability.SAFE, reason)

"""Fixed paths below a model differ between families and ways of loading.

`model.model.layers` and `model.model.embed_tokens` are right for a text-only class; a composite one, such as
`Qwen3_5ForConditionalGeneration`, keeps its decoder under `model.language_model` and raises AttributeError
(om-ai-lab/VLM-R1#279, NVIDIA/kvpress#129), and PEFT wraps another level around. Transformers has neutral
accessors: `get_input_embeddings()` (its call also keeps Gemma's embedding scale) and `get_decoder()`. The final
norm has none, and its name differs (`final_layernorm` on Jamba, `embedding_norm` on LFM2): `final_norm(model)` of
`ddaudit.runtime` finds it.

The repository's own modules may name their parts as they like.

On: every release; composite classes, GPT-NeoX, GPT-2, Jamba and Falcon-H1, PEFT.
Seen: om-ai-lab/VLM-R1#279, alibaba/Pai-Megatron-Patch#603, NVIDIA/kvpress#129.
Fix: safe where an accessor returns the same module, unsafe for the decoder as a whole; none where the path is
  assigned to.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.claim import Ask, Claim
from ddaudit.auditor.facts.library import EMBEDDING_NAMES, HEAD_NAMES, INNER_NAMES, LAYERS_NAMES, NORM_NAMES
from ddaudit.auditor.facts.scopes import Class, Named
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._paths import PARTS, asks_encoder, is_chosen, tests_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding, Import

# Every model below a head has these, wherever it stands.
NEUTRAL = frozenset(
    {
        "device", "dtype", "config", "training", "parameters", "named_parameters", "modules", "named_modules",
        "state_dict", "to", "eval", "train", "apply", "get_input_embeddings", "get_decoder", "__class__",
    }
)  # fmt: skip


class ModelPath(Rule):
    code = "DDA201"
    kind = "model-path"
    severity = Severity.PORT
    message = "`{path}` is a path of some families and loaders only; reach it through `{accessor}`"
    nodes = (Named(ast.Attribute, PARTS | INNER_NAMES),)
    markers = (".model", ".transformer", ".gpt_neox", ".layers", ".embed_tokens", ".language_model")
    EXAMPLES = (
        Good("""
            from torch import nn

            class Tiny(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.model = nn.Module()
                    self.model.layers = nn.ModuleList()
                    self.embed_tokens = nn.Embedding(10, width)

                def forward(self, ids):
                    return self.model.layers, self.embed_tokens(ids)
        """),
        Good("""
            from transformers import PreTrainedModel

            def blocks(model: PreTrainedModel):
                return model.get_decoder().layers
        """),
        Good("""
            from mlx_lm import load

            def blocks(name):
                model, _ = load(name)
                return model.model.layers
        """),
        Good("""
            from transformers import PreTrainedModel

            def place(model: PreTrainedModel):
                return model.model.device
        """),
        Good("""
            from transformers import PreTrainedModel

            def blocks(model: PreTrainedModel):
                if hasattr(model.model, "language_model"):
                    return model.model.language_model.layers
                return model.get_decoder().layers
        """),
        Good("""
            from transformers import PreTrainedModel

            def blocks(model: PreTrainedModel):
                if hasattr(model, "transformer"):
                    return model.transformer.h
                return model.get_decoder().layers
        """),
        Good("""
            from transformers import PreTrainedModel

            def step(model: PreTrainedModel, ids, states):
                if model.config.is_encoder_decoder:
                    return model.decoder(input_ids=ids, encoder_hidden_states=states)
                return model(ids)
        """),
        Bad(
            """
            from transformers import PreTrainedModel

            def blocks(model: PreTrainedModel):
                if hasattr(model, "model"):
                    return model.model.layers
                return model.transformer.h
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import decoder_layers

            def blocks(model: PreTrainedModel):
                if hasattr(model, "model"):
                    return model.get_decoder().layers
                return decoder_layers(model)
            """,
            findings=2,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def embed(model: PreTrainedModel, ids):
                return model.model.embed_tokens(ids)
            """,
            """
            from transformers import PreTrainedModel

            def embed(model: PreTrainedModel, ids):
                return model.get_input_embeddings()(ids)
            """,
        ),
        Bad(
            """
            from transformers import PreTrainedModel

            def states(model: PreTrainedModel, hidden):
                return model.model.norm(hidden), len(model.model.layers)
            """,
            """
            from transformers import PreTrainedModel
            from ddaudit.runtime import final_norm

            def states(model: PreTrainedModel, hidden):
                return final_norm(model)(hidden), len(model.get_decoder().layers)
            """,
            findings=2,
        ),
        Bad("""
            from transformers import PreTrainedModel

            def replace(model: PreTrainedModel, table):
                model.model.embed_tokens = table
        """),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        assert isinstance(node, ast.Attribute)
        above = file.parent(node)
        if node.attr not in PARTS | INNER_NAMES or file.is_set_by_own_class(node):
            return
        base = file.holds(node.value, Kind.MODEL, Kind.BACKBONE)
        if base is None:
            return
        if isinstance(above, ast.Attribute) and above.attr in PARTS | INNER_NAMES | HEAD_NAMES | NEUTRAL:
            return
        # What only a vendored forward reads is said of by DDA107.
        if isinstance(above, ast.Attribute) and above.attr.endswith(("mask", "_mode")) and not file.is_read(above):
            return
        made = file.made_from(node.value)
        if (isinstance(made, ast.IfExp) and tests_path(made.test)) or is_chosen(node, file):
            return
        if _is_own_wrapper(node.value, file) or file.is_under(node, asks_encoder):
            return
        if file.is_patched_self(node.value) or file.is_built_by_own_class(node.value):
            return
        root, path = _split(node)
        if _is_peft_wrapper(root, path, base, file):
            return
        accessor, fix = _fix(node, root, path, file)
        known = file.holds(root, Kind.MODEL) is not None and "base_model" not in path
        claim = Claim(Ask.PATH, ".".join(path)) if known else None
        yield self.report(file, node, base, fix=fix, claim=claim, path=file.text(node), accessor=accessor)


def _is_own_wrapper(base: ast.expr, file: FileFacts) -> bool:
    """Under a test that says that this is an instance of the repository's own class."""
    for above in file.ancestors(base):
        match above:
            case ast.If(test=ast.Call(func=ast.Name(id="isinstance"), args=[given, named])):
                classes = named.elts if isinstance(named, ast.Tuple) else [named]
                if file.text(given) == file.text(base) and any(file.holds(item, Kind.OWN_CLASS) for item in classes):
                    return True
    return False


def _split(node: ast.Attribute) -> tuple[ast.expr, list[str]]:
    """The model that a path starts from, and the path's names."""
    path: list[str] = []
    current: ast.expr = node
    while isinstance(current, ast.Attribute) and current.attr in PARTS | INNER_NAMES | {"base_model"}:
        if isinstance(current.value, ast.Name) and current.value.id == "self" and path and current.attr != "model":
            break
        path.insert(0, current.attr)
        current = current.value
    return current, path


def _is_peft_wrapper(root: ast.expr, path: list[str], model: Value, file: FileFacts) -> bool:
    """A way through PEFT, which is a finding of its own; what lies below comes once that is gone.

    A class of the repository that keeps a model as `base_model` is no wrapper of PEFT's.
    """
    if path[:2] != ["base_model", "model"]:
        return False
    own = file.holds(root, Kind.OWN)
    owner = file.definition(own) if own is not None else None
    if isinstance(owner, Class) and "Peft" not in owner.node.name:
        return False
    return len(path) == 2 or "peft" in " ".join((ast.unparse(root), *model.evidence)).lower()


def _fix(node: ast.Attribute, root: ast.expr, path: list[str], file: FileFacts) -> tuple[str, Fix | str]:
    text, argument = file.operand(root), file.argument(root)
    imports: tuple[Import, ...] = ()
    applicability = Applicability.SAFE
    reason = "the accessor returns the same module on the families whose path this is"
    if node.attr in EMBEDDING_NAMES:
        replacement = f"{text}.get_input_embeddings()"
    elif node.attr == "layers":
        replacement = f"{text}.get_decoder().layers"
    elif node.attr in LAYERS_NAMES | NORM_NAMES:
        name = "final_norm" if node.attr in NORM_NAMES else "decoder_layers"
        runtime = file.runtime_call(name, node)
        replacement = f"{runtime[0] if runtime else name}({argument})"
        if runtime is None:
            return replacement, f"the names `{name}` and `runtime` mean something else here"
        imports = (runtime[1],)
    else:
        replacement = f"{text}.get_decoder()"
        applicability = Applicability.UNSAFE
        reason = "of a model with several towers the path may be all of them, and the accessor gives the text decoder"
    if not file.is_read(node):
        return replacement, "the path is assigned to, and a call cannot be"
    if file.holds(root, Kind.MODEL, Kind.BACKBONE) is None:
        return replacement, "the model that the path starts from is not known"
    return replacement, Fix((file.edit(node, replacement),), applicability, reason, imports)

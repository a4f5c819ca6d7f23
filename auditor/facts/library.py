"""What names of Transformers and its neighbours mean. Read in Transformers 4.57 and 5.24; nothing is imported."""

from __future__ import annotations

import ast
import re
from functools import cache

from ddaudit.auditor.facts.values import Kind

# Frameworks whose models share names with Transformers' and are none of them.
LOOKALIKES = frozenset({"mlx", "mlx_lm", "mlx_vlm", "jax", "flax", "tinygrad", "tensorflow", "keras", "vllm", "sglang"})

MODEL_CLASS = re.compile(
    r"(For(CausalLM|ConditionalGeneration|ImageTextToText|Vision2Seq|Seq2SeqLM|MultimodalLM|PreTraining)"
    r"|LMHeadModel|^PreTrainedModel|PeftModel\w*|^GenerationMixin)$"
)
INSTANCE_CLASSES: tuple[tuple[re.Pattern[str], Kind], ...] = (
    (MODEL_CLASS, Kind.MODEL),
    (re.compile(r"^(PreTrained|Pretrained)Config$"), Kind.CONFIG),
    (re.compile(r"^(\w*Cache)$"), Kind.CACHE),
    (re.compile(r"(Tokenizer|TokenizerFast|Processor|PreTrainedTokenizer\w*)$"), Kind.TOKENIZER),
    (re.compile(r"(^|[a-z])Trainer$"), Kind.TRAINER),
    (re.compile(r"DecoderLayer$"), Kind.LAYER),
    (re.compile(r"Model$"), Kind.BACKBONE),
)
# Encoders of images, sound and sentences, which no target is: a vision tower is asked for any of its layers.
NO_DECODER = re.compile(
    r"(Vision|Audio|Speech)(Encoder)?Model\b|(^|\.)(CLIP|Siglip|ViT|Dino|Wav2Vec|Whisper|Clap|MPNet)|Bert|Roberta"
)
# Loaded from a checkpoint it is the target's; as an annotation it can be a drafter's own.
FAMILY_CONFIG = re.compile(r"^transformers\.(\w+\.)*[A-Z]\w*Config$")
MAKERS = frozenset({"from_pretrained", "from_config", "_from_config"})

DRAFTER = re.compile(r"draft|eagle|assistant", re.IGNORECASE)
MODULE_BASE = re.compile(
    r"(^torch\.nn\.(modules\.\w+\.)?\w+$)|(^transformers\..*(PreTrainedModel|Layer|Attention|MLP|Norm|Embedding|Block|Stack)$)"
    r"|(\.Module$)"
)

# Methods that return the object they are called on.
CHAINABLE = frozenset(
    {
        "to", "eval", "train", "cuda", "cpu", "half", "float", "bfloat16", "double", "type", "requires_grad_",
        "share_memory", "merge_and_unload",
    }
)  # fmt: skip
# Calls that return their first argument, or something that stands for it.
TRANSPARENT_CALLS = frozenset(
    {
        "copy.copy", "copy.deepcopy", "typing.cast", "peft.get_peft_model",
        "peft.PeftModel.from_pretrained", "peft.prepare_model_for_kbit_training",
        "torch.nn.DataParallel", "torch.nn.parallel.DistributedDataParallel",
        "accelerate.dispatch_model", "accelerate.utils.extract_model_from_parallel",
    }
)  # fmt: skip
TENSOR_METHODS_KEEPING_SHAPE = frozenset(
    {
        "to", "clone", "contiguous", "detach", "float", "half", "bfloat16", "bool", "cuda", "cpu", "double", "type",
        "masked_fill", "masked_fill_", "fill_", "copy_", "logical_not", "logical_and", "logical_or", "triu", "tril",
        "expand", "repeat",
    }
)  # fmt: skip
TENSOR_MAKERS = frozenset({"zeros", "ones", "full", "empty", "rand", "randn"})
FOUR_D_MASK_MAKERS = re.compile(r"(^|\.)_?prepare_4d_\w*mask\w*$|(^|\.)_?\w*4d_causal_attention_mask\w*$")

# Arguments that only the forward of a Transformers model takes, and fields that only its output has.
FORWARD_KEYWORDS = frozenset(
    {
        "past_key_values", "cache", "use_cache", "output_hidden_states", "output_attentions", "logits_to_keep",
        "num_logits_to_keep", "inputs_embeds", "cache_position",
    }
)  # fmt: skip
# Those that a decoder layer, which shares most, does not take.
MODEL_ONLY_KEYWORDS = frozenset({"output_hidden_states", "logits_to_keep", "num_logits_to_keep", "inputs_embeds"})
OUTPUT_FIELDS = frozenset({"logits", "hidden_states", "past_key_values", "cache", "attentions"})
CACHE_KEYWORDS = ("past_key_values", "cache", "past_key_value")

# Paths below a model that only a Transformers causal language model has.
MODEL_PATHS = frozenset(
    {
        "model.layers", "model.embed_tokens", "model.norm", "model.language_model", "transformer.h",
        "transformer.wte", "transformer.ln_f", "gpt_neox.layers", "model.decoder", "model.model",
        "base_model.model", "get_input_embeddings", "get_output_embeddings", "get_decoder",
        "config.get_text_config", "language_model.model", "get_base_model",
    }
)  # fmt: skip
# Weaker ones: they count where the name says model too.
NAMED_MODEL_PATHS = frozenset({"lm_head", "config", "generate", "embed_out", "gradient_checkpointing_enable"})
MODEL_NAMES = re.compile(
    r"^_*((target|base|hf|causal|peft|verifier|main|big|large|teacher|vl|llm|lm|language|orig|raw|full)_)*"
    r"(model|lm|llm|target|vlm|verifier|base)(_(model|lm|hf))*$",
    re.IGNORECASE,
)
# Not the stacks of tensors inside one, nor the cache of a head that the repository itself adds.
CACHE_NAMES = re.compile(
    r"^_*(?!(\w+_)?(k|v|keys?|values?)_caches?$|(adapter|medusa|hydra|eagle|ea)_)"
    r"(\w+_)?(past|cache|past_key_values?|kv_cache|pkv|layer_past)(_(target|draft|model|cache))*$"
)
# Names that one index says enough about.
PAST_NAMES = re.compile(r"^_*((target|draft|base|model)_)?(past_key_values?|past_kv|layer_past|pkv)(_(target|draft))?$")
OUTPUT_NAMES = re.compile(r"^(\w+_)?(out|outs|output|outputs)(_\w+)?$")
CACHE_PATHS = frozenset({"get_seq_length", "key_cache", "value_cache", "to_legacy_cache", "get_usable_length"}) | {
    "seen_tokens", "get_max_cache_shape", "get_max_length", "get_mask_sizes", "is_croppable", "reorder_cache",
}  # fmt: skip

# Attention below a decoder layer; what they are called where the layer has one at all.
ATTENTION_NAMES = frozenset({"self_attn", "self_attention", "attn", "attention"})
ATTENTION_CLASS = re.compile(r"^transformers\.(\w+\.)*(\w+Attention\w*)$")
MODELLING = re.compile(r"^transformers\.models\.(\w+)\.modeling_\w+")
# How a decoder layer is written where nothing says what it is: `….layers[i]`, and names of path templates.
LAYER_TEXT = re.compile(
    r"""((layers|blocks|\.h)\[[^\[\]]*\]|(layers|\.h)\.(\{[^{}]*\}|\d+)["']|(^|_)(layer|block))$|\blayer_module"""
)
PROJECTIONS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "query_key_value", "c_attn"})
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_head"})
EMBEDDING_NAMES = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings"})
LAYERS_NAMES = frozenset({"layers", "h", "blocks"})
NORM_NAMES = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
INNER_NAMES = frozenset({"model", "transformer", "gpt_neox", "language_model", "decoder"})
WRAPPER_NAMES = frozenset({"module", "_orig_mod"})


def is_attention_name(node: ast.AST) -> bool:
    """A literal that is the name of an attention module."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip(".") in ATTENTION_NAMES


@cache
def instance_kind(qualified_name: str) -> Kind | None:
    """What an instance of this class is, and what a parameter annotated with it holds."""
    package, _, rest = qualified_name.partition(".")
    name = qualified_name.rpartition(".")[2]
    if package == "torch":
        return Kind.TENSOR if name.endswith("Tensor") else None
    if qualified_name == "nnsight.LanguageModel":
        return Kind.MODEL
    if package not in ("transformers", "peft") or not rest or not name[:1].isupper():
        return None
    if name in ("AutoModel", "AutoConfig", "AutoTokenizer", "AutoProcessor") or name.startswith("AutoModelFor"):
        return {"AutoModel": Kind.BACKBONE, "AutoConfig": Kind.CONFIG}.get(
            name, Kind.MODEL if name.startswith("AutoModel") else Kind.TOKENIZER
        )
    for pattern, kind in INSTANCE_CLASSES:
        if pattern.search(name) and not (kind is Kind.BACKBONE and NO_DECODER.search(name)):
            return kind
    return None


@cache
def is_language_model(name: str) -> bool:
    """A class name of a model with a head, and not that of an abstract base, a factory or a drafter."""
    last = name.rpartition(".")[2]
    other = last.startswith(("Bert", "Peft", "Auto")) or last.endswith(("PreTrainedModel", "GenerationMixin"))
    # `LlamaForCausalLM_KIVI` is one as well.
    stem = re.sub(r"(?<=LM|on|xt)_\w+$", "", last)
    return MODEL_CLASS.search(stem) is not None and not other and not DRAFTER.search(last)


def is_model_class(name: str) -> bool:
    """A class of Transformers' models, an abstract one too."""
    return instance_kind(name) in (Kind.MODEL, Kind.BACKBONE)


@cache
def is_stock_class(qualified_name: str) -> bool:
    """A Transformers class that can be loaded as it is, unlike the abstract `…PreTrainedModel`."""
    return (
        instance_kind(qualified_name) in (Kind.MODEL, Kind.BACKBONE)
        and not qualified_name.endswith(("PreTrainedModel", "GenerationMixin"))
        and qualified_name.startswith("transformers.")
    )

"""Arguments that Transformers 5 has removed, so that the call raises TypeError.

What `from_pretrained` does not know it hands to the model's constructor: `load_in_8bit=`, `load_in_4bit=` (now
`quantization_config=BitsAndBytesConfig(…)`), `use_auth_token=` (now `token=`), `use_flash_attention_2=` (now
`attn_implementation=`), `resume_download=` and `torchscript=` raise there, even as False or None. `TrainingArguments`
has lost `evaluation_strategy=` (`eval_strategy=`), `no_cuda=` (`use_cpu=`), `logging_dir=`, `overwrite_output_dir=`,
`group_by_length=`, `warmup_ratio=` and others. Loaders of configurations and tokenizers still swallow them.

On: 5.17 and 5.24 on every model; 4.57.1 takes all but `use_flash_attention_2`, `evaluation_strategy` and `use_ipex`.
Seen: each was tried on the three releases (measured).
Fix: unsafe for a plain new name; none where another object takes its place.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from ddaudit.auditor.facts import library
from ddaudit.auditor.facts.names import RELEASE
from ddaudit.auditor.facts.values import Kind
from ddaudit.auditor.finding import Applicability, Edit, Fix, Severity
from ddaudit.auditor.rule import Bad, Good, Rule
from ddaudit.rules._loaders import loader, unpacked_into

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddaudit.auditor.facts.repository import FileFacts
    from ddaudit.auditor.facts.values import Value
    from ddaudit.auditor.finding import Finding

OF_LOADERS = {
    "load_in_8bit": "give `quantization_config=BitsAndBytesConfig(load_in_8bit=True)`",
    "load_in_4bit": "give `quantization_config=BitsAndBytesConfig(load_in_4bit=True)`",
    "use_auth_token": "use `token=`",
    "use_flash_attention_2": "use `attn_implementation=`",
    "resume_download": "leave it out: downloads are resumed anyway",
    "torchscript": "leave it out",
}
OF_TRAINING = {
    "evaluation_strategy": "use `eval_strategy=`",
    "no_cuda": "use `use_cpu=`",
    "push_to_hub_token": "use `hub_token=`",
    "per_gpu_train_batch_size": "use `per_device_train_batch_size=`",
    "per_gpu_eval_batch_size": "use `per_device_eval_batch_size=`",
    "logging_dir": "set `TENSORBOARD_LOGGING_DIR`",
    "group_by_length": 'use `train_sampling_strategy="group_by_length"`',
    "warmup_ratio": "use `warmup_steps=`, which takes a ratio below one",
    **dict.fromkeys(
        (
            "overwrite_output_dir", "save_safetensors", "fp16_backend", "half_precision_backend", "use_ipex",
            "use_mps_device", "jit_mode_eval", "include_inputs_for_metrics", "include_tokens_per_second", "past_index",
            "tpu_num_cores", "torchdynamo", "ray_scope", "mp_parameters", "adafactor",
            "fsdp_transformer_layer_cls_to_wrap",
        ),
        "leave it out, or see what took its place",
    ),
}  # fmt: skip
RENAMED = {"use_auth_token": "token", "evaluation_strategy": "eval_strategy"}
REASON = "what takes its place is not one argument for another"
OLD = "the new name is older than Transformers 5, but not than every release"


class RemovedKeyword(Rule):
    code = "DDA408"
    kind = "deprecated-kwarg"
    severity = Severity.ERROR
    message = "`{name}=` is gone from Transformers {release}, so the call raises TypeError: {remedy}"
    since = "5.0"
    nodes = (ast.Call, ast.Subscript, ast.Dict)
    markers = (*OF_LOADERS, "TrainingArguments")
    EXAMPLES = (
        Good("""
            from transformers import AutoModelForCausalLM, BitsAndBytesConfig

            quantized = BitsAndBytesConfig(load_in_8bit=True)
            model = AutoModelForCausalLM.from_pretrained("name", quantization_config=quantized)
        """),
        Good("""
            def load(load_model, name):
                return load_model(name, load_in_8bit=True)
        """),
        Good("""
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained("name", use_auth_token=True)
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            def load(name, is_small):
                return AutoModelForCausalLM.from_pretrained(name, load_in_8bit=is_small)
        """),
        Bad("""
            from transformers import AutoModelForCausalLM

            def load(name):
                options = {"device_map": "auto"}
                options["load_in_4bit"] = True
                return AutoModelForCausalLM.from_pretrained(name, **options)
        """),
        Bad(
            """
            from transformers import TrainingArguments

            args = TrainingArguments("out", evaluation_strategy="steps")
            """,
            """
            from transformers import TrainingArguments

            args = TrainingArguments("out", eval_strategy="steps")
            """,
        ),
    )

    def decide(self, node: ast.AST, file: FileFacts) -> Iterator[Finding]:
        match node:
            case ast.Call(keywords=[_, *_]):
                yield from self._call(node, file)
            case ast.Subscript(value=ast.Name() as options, slice=ast.Constant(value=str(name)), ctx=ast.Store()):
                if name in OF_LOADERS and (called := unpacked_into(options, file)) and _is_model_loader(called):
                    yield self._report(node, name, OF_LOADERS[name], called, file)
            case ast.Dict(keys=keys):
                match file.parent(node):
                    case ast.Assign(targets=[ast.Name() as options]) | ast.AnnAssign(target=ast.Name() as options):
                        for key in keys:
                            name = str(key.value) if isinstance(key, ast.Constant) else ""
                            called = unpacked_into(options, file) if name in OF_LOADERS else None
                            if key is not None and called is not None and _is_model_loader(called):
                                yield self._report(key, name, OF_LOADERS[name], called, file)

    def _call(self, node: ast.Call, file: FileFacts) -> Iterator[Finding]:
        called = None
        for keyword in node.keywords:
            name = keyword.arg or ""
            if name not in OF_LOADERS and name not in OF_TRAINING:
                continue
            called = called or loader(node, file)
            if called is None:
                return
            if name in OF_LOADERS and _is_model_loader(called):
                yield self._report(keyword, name, OF_LOADERS[name], called, file)
            elif name in OF_TRAINING and called.origin.endswith("TrainingArguments"):
                yield self._report(keyword, name, OF_TRAINING[name], called, file)

    def _report(self, node: ast.AST, name: str, remedy: str, called: Value, file: FileFacts) -> Finding:
        fix: Fix | str = REASON
        if name in RENAMED and isinstance(node, ast.keyword):
            start = file.offsets(node)[0]
            fix = Fix((Edit(start, start + len(name), RENAMED[name]),), Applicability.UNSAFE, OLD)
        return self.report(file, node, called, fix=fix, name=name, release=RELEASE, remedy=remedy)


def _is_model_loader(called: Value) -> bool:
    if not called.origin.startswith("transformers."):
        # A class of the repository that hands its keywords on.
        return True
    owner = called.origin.rpartition(".")[0]
    name = owner.rpartition(".")[2]
    is_model = library.instance_kind(owner) in (Kind.MODEL, Kind.BACKBONE) or library.is_language_model(name)
    return called.origin.endswith(".from_pretrained") and is_model

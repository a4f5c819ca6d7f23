"""More examples than a rule's page has room for: code that must stay as it is, and forms that a fix must get right.

`MORE[slug]` are bodies of `def f(model, ids, cache)`, whose arguments are annotated. A body alone must give no finding;
a pair is the body before and after the fix, None where only a report is right.
"""

from __future__ import annotations

from ddaudit.auditor.rule import Bad, Good

HEAD = "from transformers import DynamicCache, PreTrainedModel\n\n"
DEF = "def f(model: PreTrainedModel, ids, cache: DynamicCache, n=4):\n"
RUNTIME = "from ddaudit.runtime import "

Pair = tuple[str, "str | None"]
FINE: dict[str, tuple[str, ...]] = {
    "bare-cache": (
        "past = DynamicCache(config=model.config.get_text_config())\nreturn model(ids, cache=past)",
        "past = DynamicCache(None, model.config)\nreturn model(ids, cache=past)",
        "options = {'config': model.config}\npast = DynamicCache(**options)\nreturn model(ids, cache=past)",
        "return isinstance(cache, DynamicCache)",
        "kinds = {'dynamic': DynamicCache}\nreturn kinds",
    ),
    "cache-crop": (
        "return ids.crop(n)",
        "from PIL import Image\nreturn Image.open('a.png').crop((0, 0, n, n))",
        "crop = 3\nreturn crop",
        "return cache.crop",
        "if cache.is_croppable:\n    cache.crop(-n)",
    ),
    "cache-internals": (
        "return cache.get_seq_length()",
        "past = {'keys': ids}\nreturn past['keys']",
        "return [layer.get_seq_length() for layer in cache.layers]",
        "return [layer.keys for layer in cache.layers if hasattr(layer, 'keys')]",
        "key_cache = [ids]\nreturn key_cache[0]",
    ),
    "stock-cache-rollback": (
        "past = DynamicCache(config=model.config)\nmodel(ids, cache=past)\nreturn past.get_seq_length()",
        "past = DynamicCache(config=model.config)\nmodel(ids, cache=past)\nreturn [past, ids[:, :n]]",
    ),
    "hand-compaction": (
        "for layer in cache.layers:\n    print(layer.keys.shape)",
        "for layer in model.get_decoder().layers:\n    layer.keys = ids",
        "for layer in cache.layers:\n    layer.keys = layer.keys.to('cpu')\n    layer.values = layer.values.to('cpu')",
    ),
    "model-path": (
        "return model.get_input_embeddings()(ids)",
        "model.model.eval()\nreturn model.model.dtype",
        "layers = model.get_decoder().layers\nreturn layers[0]",
        "norm = model.get_decoder().norm\nreturn norm",
    ),
    "lm-head": (
        "return model.get_output_embeddings().weight.shape[0]",
        "lm_head = model.get_output_embeddings()\nreturn lm_head(ids)",
        "return model(ids).logits @ ids",
        "table = model.get_output_embeddings().weight\nreturn ids @ table.T",
        "return model.config.tie_word_embeddings",
    ),
    "layer-output-index": (
        "return model(ids, output_hidden_states=True).hidden_states[0]",
        "def hook(module, args, output):\n    ids.copy_(output[0])\n"
        "model.get_decoder().layers[0].mlp.register_forward_hook(hook)",
        "def hook(module, args):\n    ids.copy_(args[0])\n"
        "model.get_decoder().layers[0].register_forward_pre_hook(hook)",
        "def hook(module, args, output):\n    return output\nmodel.get_decoder().layers[0].register_forward_hook(hook)",
    ),
    "wrapper-path": (
        "return model.get_base_model()",
        "return model.base_model.config",
        "import torch\nstep = torch.compile(ids.add)\nreturn step(ids)",
    ),
    "mask-token-filter": (
        "mask_token_id = n\nreturn ids[ids == mask_token_id]",
        "mask = ids != n\nreturn ids[mask]",
        "attention_mask = n\nreturn ids[ids != attention_mask]",
    ),
    "flat-config-attribute": (
        "return model.config.text_config.hidden_size",
        "return model.config.model_type, model.config.architectures",
        "config = model.get_decoder().config\nreturn config.hidden_size",
        "return getattr(model.config.get_text_config(), 'head_dim', None)",
        "hidden_size = ids.shape[-1]\nreturn hidden_size",
    ),
    "deprecated-keyword": (
        "return model(ids, cache=cache)",
        "return model(ids).logits",
        "past_key_values = cache\nreturn dict(past_key_values=past_key_values)",
        "def inner(ids, past_key_values=None):\n    return ids\nreturn inner(ids, past_key_values=cache)",
        "def hook(tokenizer):\n    return tokenizer\nreturn hook(tokenizer=ids)",
    ),
    "unguarded-synchronize": (
        "import torch\nif ids.is_cuda:\n    torch.cuda.synchronize()",
        "import torch\nassert torch.cuda.is_available()\ntorch.cuda.synchronize()",
        "import torch\ntry:\n    torch.cuda.synchronize()\nexcept AssertionError:\n    pass",
        "import torch\nevent = torch.cuda.Event()\nevent.synchronize()",
    ),
    "chat-template-encoding": (
        "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
        "return tokenizer.apply_chat_template(ids, return_dict=False)[0]",
        "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
        "return model.generate(**tokenizer.apply_chat_template(ids, return_tensors='pt'))",
        "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
        "text = tokenizer.apply_chat_template(ids, tokenize=False)\nreturn len(text)",
        "from transformers import AutoProcessor\nprocessor = AutoProcessor.from_pretrained('a')\n"
        "return processor.apply_chat_template(ids, return_tensors='pt')['input_ids']",
    ),
}
FOUND: dict[str, tuple[Pair, ...]] = {
    "bare-cache": (
        ("return model(ids, cache=DynamicCache())", "return model(ids, cache=DynamicCache(config=model.config))"),
        ("past = DynamicCache() if n else None\nreturn model(ids, cache=past)",
         "past = DynamicCache(config=model.config) if n else None\nreturn model(ids, cache=past)"),
        ("past: DynamicCache = DynamicCache()\nreturn model(ids, cache=past)",
         "past: DynamicCache = DynamicCache(config=model.config)\nreturn model(ids, cache=past)"),
        ("past = DynamicCache(  # grows\n)\nreturn model(ids, cache=past)", None),
    ),
    "cache-crop": (
        ("cache.crop(max_length=n)", "crop_cache(cache, n)"),
        ("cache.crop(n if n else 1)", "crop_cache(cache, n if n else 1)"),
        ("cache.crop(-n)", "crop_cache(cache, cache.get_seq_length() - n)"),
        ("cache.crop(-n - 1)", None),
        ("cache.crop(n - 1), print(n)", "crop_cache(cache, n - 1), print(n)"),
    ),
    "cache-internals": (
        ("return cache[0][0].shape[-2]", "return cache.get_seq_length()"),
        ("return cache[1][0].shape[2]", None),
        ("cache.seen_tokens = n", None),
        ("return cache.seen_tokens + n, f'{n}'", "return cache.get_seq_length() + n, f'{n}'"),
        ("return DynamicCache.from_legacy_cache(ids)", None),
        ("return cache.layers[0].keys.shape", None),
    ),
    "hand-compaction": (
        ("for layer in cache.layers:\n"
         "    layer.keys[:, :, n : n + len(ids)] = layer.keys[:, :, ids + n]\n"
         "    layer.values[:, :, n : n + len(ids)] = layer.values[:, :, ids + n]\n"
         "cache.crop(n + len(ids) - cache.get_seq_length())",
         "keep_in_cache(cache, n, ids)"),
    ),
    "model-path": (
        ("blocks = model.model.layers\nreturn len(blocks)", "blocks = model.get_decoder().layers\nreturn len(blocks)"),
        ("return -model.model.embed_tokens.weight.sum()", "return -model.get_input_embeddings().weight.sum()"),
        ("for each in model.transformer.h:\n    each.eval()", "for each in decoder_layers(model):\n    each.eval()"),
        ("del model.model.layers", None),
        ("model.model.layers[n:] = []", "model.get_decoder().layers[n:] = []"),
        ("return f'{model.model.norm}'", None),
    ),
    "lm-head": (
        ("return model.lm_head.weight", "return model.get_output_embeddings().weight"),
        ("return model.lm_head.weight @ ids", "return model.get_output_embeddings().weight @ ids"),
        ("return ids @ model.lm_head.weight.mT", "return model.get_output_embeddings()(ids)"),
        ("del model.lm_head", None),
    ),
    "flat-config-attribute": (
        ("config = model.config\nreturn config.hidden_size",
         "config = model.config\nreturn config.get_text_config().hidden_size"),
        ("return model.config.n_layer", "return model.config.get_text_config().num_hidden_layers"),
        ("return getattr(model.config, 'head_dim')", "return getattr(model.config.get_text_config(), 'head_dim')"),
        ("model.config.use_cache = False", "model.config.get_text_config().use_cache = False"),
        ("model.config.vocab_size += n", None),
    ),
    "deprecated-keyword": (
        ("return model(ids, past_key_values=cache, use_cache=True)[0]",
         "return model(ids, cache=cache, use_cache=True)[0]"),
        ("return model(\n    ids,\n    past_key_values=(\n        cache\n    ),\n)",
         "return model(\n    ids,\n    cache=(\n        cache\n    ),\n)"),
        ("out = model(ids)\nout.past_key_values = None", None),
        ("return dict(model(ids))['past_key_values']", "return dict(model(ids))['cache']"),
    ),
    "unguarded-synchronize": (
        ("import torch\ntorch.cuda.synchronize(ids.device)",
         "import torch\nif torch.cuda.is_available():\n    torch.cuda.synchronize(ids.device)"),
        ("from torch import cuda\nif n:\n    cuda.synchronize()",
         "from torch import cuda\nif n:\n    if cuda.is_available():\n        cuda.synchronize()"),
        ("import torch\nprint(n); torch.cuda.synchronize()", None),
        ("from torch.cuda import synchronize\nsynchronize()", None),
    ),
    "chat-template-encoding": (
        ("from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
         "return len(tokenizer.apply_chat_template(ids,))",
         "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
         "return len(tokenizer.apply_chat_template(ids, return_dict=False))"),
        ("from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
         "return tokenizer.apply_chat_template(ids, tokenize=True)[:n]",
         "from transformers import AutoTokenizer\ntokenizer = AutoTokenizer.from_pretrained('a')\n"
         "return tokenizer.apply_chat_template(ids, tokenize=True, return_dict=False)[:n]"),
    ),
    "layer-output-index": (
        ("kept = []\ndef hook(module, args, output):\n    kept.append(output[0])\n"
         "for layer in model.get_decoder().layers:\n    layer.register_forward_hook(hook)",
         "kept = []\ndef hook(module, args, output):\n"
         "    kept.append((output[0] if isinstance(output, tuple) else output))\n"
         "for layer in model.get_decoder().layers:\n    layer.register_forward_hook(hook)"),
        ("def hook(module, args, output):\n    ids[0] = output[0][0]\n"
         "model.get_decoder().layers[0].register_forward_hook(hook)", None),
        ("def hook(module, args, output):\n    output[0].zero_()\n"
         "model.get_decoder().layers[0].register_forward_hook(hook)",
         "def hook(module, args, output):\n    (output[0] if isinstance(output, tuple) else output).zero_()\n"
         "model.get_decoder().layers[0].register_forward_hook(hook)"),
    ),
    "mask-token-filter": (
        ("mask_token_id = n\nreturn ids[ids != mask_token_id]", None),
        ("return ids[:, ids[0] != model.mask_token_id]", None),
    ),
    "wrapper-path": (
        ("import torch\nrunner = torch.compile(model)\nreturn isinstance(runner, PreTrainedModel)",
         "import torch\nrunner = torch.compile(model)\n"
         "return isinstance(getattr(runner, \"_orig_mod\", runner), PreTrainedModel)"),
        ("import torch\nrunner = torch.compile(model)\nruns = {**runner.state_dict()}\nreturn runs",
         "import torch\nrunner = torch.compile(model)\n"
         "runs = {**getattr(runner, \"_orig_mod\", runner).state_dict()}\nreturn runs"),
    ),
}  # fmt: skip

# The loop and both moves in it.
NUM_FINDINGS = {"hand-compaction": 3}


def program(body: str) -> str:
    return HEAD + DEF + "".join(f"    {line}\n" for line in body.splitlines())


def _fixed(body: str) -> str:
    """The program after the fix, with the import that it needs and without those that nothing uses any more."""
    text = program(body)
    for name in ("crop_cache", "decoder_layers", "keep_in_cache"):
        if f"{name}(" in body:
            text = text.replace("\n\ndef", f"\n{RUNTIME}{name}\n\ndef", 1)
    return text


MORE: dict[str, tuple[Good | Bad, ...]] = {
    slug: (
        *(Good(program(body)) for body in FINE.get(slug, ())),
        *(
            Bad(program(before), after and _fixed(after), NUM_FINDINGS.get(slug, 1))
            for before, after in FOUND.get(slug, ())
        ),
    )
    for slug in {**FINE, **FOUND}
}

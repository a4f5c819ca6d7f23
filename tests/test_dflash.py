"""The DFlash drafter: the public layout, its configuration fields, and one draft by three ways."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, Qwen3Config  # noqa: E402

from ddaudit.runtime import crop_cache  # noqa: E402
from ddaudit.runtime.caches.mode import replay_log  # noqa: E402
from ddaudit.runtime.drafters.dflash import DFlashDrafter  # noqa: E402
from ddaudit.runtime.drafters.drafting import make_drafter, plan_drafts  # noqa: E402
from ddaudit.runtime.errors import RunError  # noqa: E402
from ddaudit.runtime.models.initializing import make_faults_visible  # noqa: E402
from ddaudit.runtime.models.loading import Target  # noqa: E402
from ddaudit.runtime.replay.drafter import replay_drafter  # noqa: E402
from ddaudit.runtime.tiny.distilling import draft_logits, new_drafter, read_taps  # noqa: E402
from ddaudit.runtime.tiny.recipe import SMALL  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

WIDTH, VOCABULARY = 64, 512

KINDS: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"is_causal": True},
    "causal, said inside": {"dflash_config": {"is_causal": True}},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
    "sliding, not causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": False},
}


def config(**changes: Any) -> dict[str, Any]:
    base = {**SMALL.drafter_config(), "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    nested = {**base["dflash_config"], **changes.pop("dflash_config", {})}
    changes = {"use_sliding_window": "sliding_window" in changes, **changes}
    return {**base, **changes, "dflash_config": nested}


def drafter(**changes: Any) -> DFlashDrafter:
    torch.manual_seed(1)
    made = new_drafter(config(**changes)).eval()
    make_faults_visible(made, 1)
    return made


@pytest.fixture(scope="module")
def target() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL.target_config())).eval()
    make_faults_visible(model, 0)
    return model


def public_checkpoint(folder: Path, **changes: Any) -> dict[str, Any]:
    """A folder in the public drafters' layout, written name by name, and its weights."""
    values = config(**changes)
    heads, groups = (values[name] * values["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc.weight": (WIDTH, 2 * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (heads, WIDTH),
            "self_attn.k_proj": (groups, WIDTH),
            "self_attn.v_proj": (groups, WIDTH),
            "self_attn.o_proj": (WIDTH, heads),
            "self_attn.q_norm": (values["head_dim"],),
            "self_attn.k_norm": (values["head_dim"],),
            "mlp.gate_proj": (values["intermediate_size"], WIDTH),
            "mlp.up_proj": (values["intermediate_size"], WIDTH),
            "mlp.down_proj": (WIDTH, values["intermediate_size"]),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


def as_target(model: Any) -> Target:
    return Target(model, None, "a tiny hybrid", True, "")


def test_the_public_layout_loads(tmp_path: Path, target: Any) -> None:
    """A repository without a drafter class of its own is given this one."""
    weights = public_checkpoint(tmp_path / "drafter")
    plan = plan_drafts(str(tmp_path / "drafter"), as_target(target), None)
    made = make_drafter(str(tmp_path / "drafter"), plan, None, as_target(target), seed=0)
    assert type(made) is DFlashDrafter
    assert (made.block_size, made.mask_token_id, made.target_layer_ids) == (8, 1, [0, 2])
    assert set(made.state_dict()) == set(weights)
    assert all(torch.equal(made.state_dict()[name], tensor) for name, tensor in weights.items())


def test_weights_that_are_missing_are_no_random_ones(tmp_path: Path, target: Any) -> None:
    """Transformers fills them up with a warning; nothing fails then, and nothing is accepted."""
    weights = public_checkpoint(tmp_path / "drafter")
    del weights["layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "drafter" / "model.safetensors", metadata={"format": "pt"})
    plan = plan_drafts(str(tmp_path / "drafter"), as_target(target), None)
    with pytest.raises(RunError, match=r"1 weights that .* lacks, such as `layers\.1\.mlp\.up_proj\.weight`"):
        make_drafter(str(tmp_path / "drafter"), plan, None, as_target(target), seed=0)


def test_fields_stand_at_the_top_or_inside() -> None:
    outside = {"mask_token_id": 5, "target_layer_ids": [1]}
    top = new_drafter({**config(), "block_size": 4, "dflash_config": None, **outside})
    inside = new_drafter({**config(), "block_size": None, "dflash_config": {**outside, "block_size": 4}})
    for made in (top, inside):
        assert (made.block_size, made.mask_token_id, made.target_layer_ids) == (4, 5, [1])
    with pytest.raises(ValueError, match="no `block_size`"):
        new_drafter({**config(), "block_size": None})


def test_rope_in_either_form() -> None:
    """A theta that is lost falls back to 10,000, and acceptance with it."""
    flat = new_drafter(config()).rotary_emb.inv_freq
    values = {name: value for name, value in config().items() if name not in ("rope_theta", "rope_scaling")}
    nested = new_drafter({**values, "rope_parameters": {"rope_type": "default", "rope_theta": 100_000}})
    assert torch.equal(flat, nested.rotary_emb.inv_freq)
    assert flat[1] == pytest.approx(100_000 ** (-2 / 16))
    stretched = new_drafter({**values, "rope_theta": 100_000, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert torch.allclose(stretched.rotary_emb.inv_freq * 4, flat)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_block_sees(kind: str) -> None:
    """Beside a loop over every pair of places."""
    made = drafter(**KINDS[kind])
    for layer in made.layers:
        attention = layer.self_attn
        mask = attention.mask(4, 15, torch.device("cpu"))
        for query in range(4):
            for key in range(15):
                place = 11 + query
                wanted = key <= place or not attention.is_causal
                if attention.layer_type == "sliding_attention":
                    wanted = wanted and place - key < 7
                assert (mask is None or bool(mask[0, 0, query, key])) == wanted
    causal = [layer.self_attn.is_causal for layer in made.layers]
    assert causal == {
        "bidirectional": [False, False],
        "sliding": [True, False],
        "sliding, not causal": [False, False],
    }.get(kind, [True, True])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_one_draft_three_ways(kind: str, target: Any) -> None:
    """All blocks of a text at once, as in training; from the whole text before one; and round by round with a cache."""
    made = drafter(**KINDS[kind])
    ids = torch.randint(3, VOCABULARY, (1, 40), generator=torch.Generator().manual_seed(2))
    taps = read_taps(target, ids, made.target_layer_ids)
    anchors = [9, 10, 14, 22, 31]
    together = draft_logits(made, target, ids, taps, torch.tensor([anchors]))[0]
    cache, known = DynamicCache(), 0
    for number, anchor in enumerate(anchors):
        block = torch.full((1, made.block_size), made.mask_token_id)
        block[0, 0] = ids[0, anchor]
        embedded = target.get_input_embeddings()(block)
        end = anchor + made.block_size
        alone = made(torch.arange(end)[None], embedded, taps[:, :anchor])
        positions = torch.arange(known, end)[None]
        # As in research code, which passes on what its own class takes.
        cached = made(
            positions, embedded, taps[:, known:anchor], past_key_values=cache, use_cache=True, is_causal=False
        )
        cache.crop(anchor - end)
        known = anchor
        for hidden in (alone, cached):
            logits = target.get_output_embeddings()(hidden[0, 1:])
            torch.testing.assert_close(logits, together[number], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_replayed_as_eager(kind: str) -> None:
    """Over more tokens than a sliding window reaches, which a proof made before that says nothing of."""
    ours, eager = drafter(**KINDS[kind]), drafter(**KINDS[kind])
    replay_drafter(ours, lambda graph, inputs: graph)
    caches = DynamicCache(), DynamicCache()
    graphs = []
    with replay_log() as log:
        for step, context in enumerate([3, 2, 1, 4, 2, 5, 1, 1, 3, 20, 2]):
            start = caches[0].get_seq_length()
            torch.manual_seed(step)
            block, taps = torch.randn(1, 8, WIDTH), torch.randn(1, context, 2 * WIDTH)
            positions = torch.arange(start, start + context + 8)[None]
            drafts = [
                each(position_ids=positions, noise_embedding=block, target_hidden=taps, past_key_values=cache)
                for each, cache in zip((ours, eager), caches, strict=True)
            ]
            torch.testing.assert_close(*drafts, atol=1e-4, rtol=1e-4)
            for mine, stock in zip(caches[0].layers, caches[1].layers, strict=True):
                torch.testing.assert_close(mine.keys, stock.keys)
            for cache in caches:
                crop_cache(cache, start + context)
            graphs.append(log.num_graphs)
    assert log.refusals == []
    # One for all but the long context.
    assert graphs == [0, *[1] * 8, 2, 2]


def test_a_config_object_of_transformers_does() -> None:
    values = {name: value for name, value in config().items() if name not in ("architectures", "model_type")}
    assert DFlashDrafter(Qwen3Config(**values)).block_size == 8

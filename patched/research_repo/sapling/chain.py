"""Chain drafting: one block is drafted, verified in one forward and kept as far as the target agrees."""

import torch
from transformers import DynamicCache, PreTrainedModel
from ddaudit.runtime import crop_cache, make_cache

from .drafter import BlockDrafter
from .session import Generation, StageClock, cut_at_stop, has_stop, read_taps, sample


@torch.inference_mode()
def chain_generate(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    input_ids: torch.Tensor,
    max_new_tokens: int = 256,
    stop_token_ids: list[int] | None = None,
    temperature: float = 0.0,
) -> Generation:
    clock = StageClock()
    width, mask_id = drafter.block_size, drafter.mask_token_id
    prompt_length = input_ids.shape[1]
    limit = prompt_length + max_new_tokens
    output_ids = torch.full((1, limit + width), mask_id, dtype=torch.long, device=target.device)
    output_ids[:, :prompt_length] = input_ids
    positions = torch.arange(limit + width, device=target.device)[None]
    target_kv = make_cache(target)
    drafter_kv = DynamicCache()

    with clock.stage("prefill"):
        out = target(
            output_ids[:, :prompt_length],
            position_ids=positions[:, :prompt_length],
            past_key_values=target_kv,
            use_cache=True,
            output_hidden_states=True,
            logits_to_keep=1,
        )
    output_ids[:, prompt_length] = sample(out.logits[:, -1], temperature)
    context = read_taps(out.hidden_states, drafter.target_layer_ids)
    acceptance_lengths = []
    start = prompt_length

    while start < limit:
        block = output_ids[:, start : start + width].clone()
        with clock.stage("draft"):
            hidden = drafter(
                noise_embedding=target.get_input_embeddings()(block),
                target_hidden=context,
                position_ids=positions[:, start - context.shape[1] : start + width],
                past_key_values=drafter_kv,
            )
            crop_cache(drafter_kv, start)
            block[:, 1:] = target.get_output_embeddings()(hidden[:, 1:]).argmax(-1)

        with clock.stage("verify"):
            out = target(
                block,
                position_ids=positions[:, start : start + width],
                past_key_values=target_kv,
                use_cache=True,
                output_hidden_states=True,
            )
            choice = sample(out.logits, temperature)

        agree = block[:, 1:] == choice[:, :-1]
        accepted = 1 + int(agree.long().cumprod(dim=1).sum())
        output_ids[:, start : start + accepted] = block[:, :accepted]
        output_ids[:, start + accepted] = choice[:, accepted - 1]
        start += accepted
        crop_cache(target_kv, start)
        context = read_taps(out.hidden_states, drafter.target_layer_ids)[:, :accepted]
        acceptance_lengths.append(accepted)
        if has_stop(output_ids[0, start - accepted : start + 1], stop_token_ids):
            break

    output_ids = output_ids[:, :limit]
    output_ids = output_ids[:, : start + 1]
    output_ids = cut_at_stop(output_ids, prompt_length, stop_token_ids)
    return Generation(output_ids, acceptance_lengths, dict(clock.seconds))

"""One token at a time: the baseline that the drafting decoders must reproduce."""

import torch
from transformers import DynamicCache, PreTrainedModel

from .session import Generation, StageClock, sample


@torch.inference_mode()
def plain_generate(target: PreTrainedModel, input_ids, max_new_tokens=256, stop_token_ids=None, temperature=0.0):
    clock = StageClock()
    kv = DynamicCache()
    output_ids = step_ids = input_ids.to(target.device)
    for _ in range(max_new_tokens):
        with clock.stage("decode"):
            out = target(step_ids, past_key_values=kv, use_cache=True, logits_to_keep=1)
            step_ids = sample(out.logits, temperature)
        output_ids = torch.cat([output_ids, step_ids], dim=1)
        if stop_token_ids and step_ids.item() in stop_token_ids:
            break
    return Generation(output_ids, stage_times=dict(clock.seconds))

"""Tree drafting: the block's likeliest fillings form a tree that one forward verifies under a tree mask."""

import torch
from transformers import DynamicCache, PreTrainedModel
from ddaudit.runtime import crop_cache, keep_in_cache, make_cache

from .drafter import BlockDrafter
from .session import Generation, StageClock, cut_at_stop, has_stop, read_taps, sample


def grow_tree(logits, budget, branching=4):
    """The `budget` likeliest prefixes as (token, parent, depth), parents first; node 0 is the root, left out.

    logits [D, V] belong to depths 1 to D. Each level keeps its best `budget` prefixes, then all levels are
    ranked together: a prefix never scores above its own parent, so the cut never orphans a node.
    """
    scores, tokens = logits.float().log_softmax(-1).topk(branching, dim=-1)
    scores, tokens = scores.tolist(), tokens.tolist()
    grown, level = [], [(0.0, ())]
    for depth_scores, depth_tokens in zip(scores, tokens):
        level = [
            (score + step, prefix + (token,))
            for score, prefix in level
            for step, token in zip(depth_scores, depth_tokens)
        ]
        level = sorted(level, key=lambda item: -item[0])[:budget]
        grown += level
    grown = sorted(grown, key=lambda item: -item[0])[:budget]
    index = {(): 0} | {prefix: i + 1 for i, (_, prefix) in enumerate(grown)}
    return [(prefix[-1], index[prefix[:-1]], len(prefix)) for _, prefix in grown]


def tree_mask(parents, past_length, dtype, device):
    """Additive mask [1, 1, N, past_length + N]: a node sees the past, its ancestors and itself."""
    count = len(parents)
    seen = torch.eye(count, dtype=torch.bool)
    for node in range(1, count):
        seen[node] |= seen[parents[node]]
    mask = torch.zeros(count, past_length + count, dtype=dtype)
    mask[:, past_length:].masked_fill_(~seen, torch.finfo(dtype).min)
    return mask[None, None].to(device)


def walk(tokens, parents, choice):
    """Indices of the accepted path, root first: follow the child that holds the target's choice."""
    path = [0]
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == choice[path[-1]]:
            path.append(node)
    return path


def keep_path(cache: DynamicCache, past_length: int, path: list[int]) -> None:
    """Moves the accepted nodes' keys and values to the front of the window and drops the rest."""
    keep_in_cache(cache, past_length, path)


@torch.inference_mode()
def tree_generate(
    target: PreTrainedModel,
    drafter: BlockDrafter,
    input_ids: torch.Tensor,
    max_new_tokens: int = 256,
    stop_token_ids: list[int] | None = None,
    tree_budget: int = 64,
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
        block = output_ids[:, start : start + width]
        with clock.stage("draft"):
            hidden = drafter(
                noise_embedding=target.get_input_embeddings()(block),
                target_hidden=context,
                position_ids=positions[:, start - context.shape[1] : start + width],
                past_key_values=drafter_kv,
            )
            crop_cache(drafter_kv, start)
            logits = target.get_output_embeddings()(hidden[:, 1:])

        with clock.stage("tree"):
            nodes = grow_tree(logits[0], tree_budget)
            tokens = [int(block[0, 0])] + [token for token, _, _ in nodes]
            parents = [-1] + [parent for _, parent, _ in nodes]
            depths = torch.tensor([0] + [depth for _, _, depth in nodes], device=target.device)
            mask = tree_mask(parents, start, target.dtype, target.device)

        with clock.stage("verify"):
            out = target(
                torch.tensor([tokens], device=target.device),
                position_ids=start + depths[None],
                attention_mask=mask,
                past_key_values=target_kv,
                use_cache=True,
                output_hidden_states=True,
            )
            choice = sample(out.logits[0], temperature).tolist()

        with clock.stage("commit"):
            path = walk(tokens, parents, choice)
            for offset, node in enumerate(path):
                output_ids[:, start + offset] = tokens[node]
            output_ids[:, start + len(path)] = choice[path[-1]]
            keep_path(target_kv, start, path)
            context = read_taps(out.hidden_states, drafter.target_layer_ids)[:, path]
            start += len(path)
        acceptance_lengths.append(len(path))
        if has_stop(output_ids[0, start - len(path) : start + 1], stop_token_ids):
            break

    output_ids = output_ids[:, :limit]
    output_ids = output_ids[:, : start + 1]
    output_ids = cut_at_stop(output_ids, prompt_length, stop_token_ids)
    return Generation(output_ids, acceptance_lengths, dict(clock.seconds))

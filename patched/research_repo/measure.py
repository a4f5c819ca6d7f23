"""Speed and acceptance of plain, chain and tree decoding on a file with one prompt a line."""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sapling.chain import chain_generate
from sapling.diagnostics import cache_bytes, layer_agreement
from sapling.drafter import BlockDrafter
from sapling.plain import plain_generate
from sapling.tree import tree_generate


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="Qwen/Qwen3-4B")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", type=Path, default=Path("prompts.txt"))
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--tree-budget", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--diagnose", action="store_true")
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    target = AutoModelForCausalLM.from_pretrained(
        args.target, dtype=torch.bfloat16, attn_implementation="flash_attention_2"
    ).to("cuda")
    drafter = BlockDrafter.from_pretrained(args.drafter, dtype=torch.bfloat16).to("cuda")
    stop_token_ids = [tokenizer.eos_token_id]

    for prompt in args.prompts.read_text().splitlines():
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        input_ids = tokenizer(text, return_tensors="pt").input_ids.to("cuda")
        if args.diagnose:
            print("agreement by layer", layer_agreement(target, input_ids))
            print("cache bytes", cache_bytes(target, input_ids))
        limits = (args.max_new_tokens, stop_token_ids)
        runs = {
            "plain": lambda: plain_generate(target, input_ids, *limits, args.temperature),
            "chain": lambda: chain_generate(target, drafter, input_ids, *limits, args.temperature),
            "tree": lambda: tree_generate(
                target, drafter, input_ids, *limits, args.tree_budget, args.temperature
            ),
        }
        for name, run in runs.items():
            # Flash attention takes no tree mask.
            target.set_attn_implementation("sdpa" if name == "tree" else "flash_attention_2")
            begin = time.perf_counter()
            result = run()
            seconds = time.perf_counter() - begin
            count = result.output_ids.shape[1] - input_ids.shape[1]
            lengths = result.acceptance_lengths or [1]
            print(f"{name:6} {count / seconds:7.1f} tokens/s, {sum(lengths) / len(lengths):.2f} accepted a round")


if __name__ == "__main__":
    main()

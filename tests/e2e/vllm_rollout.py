"""Program for test_mismatch: real vLLM in bfloat16 answers real prompts of the tiny world, and reports its routes.

    python vllm_rollout.py WORLD OUTPUT

Writes with torch.save, of each answer: prompt, response, log-probs of the sampled tokens and routes. Twice: after one
turn, and after a second one, which sees the first and a few tokens of a tool.
"""

import copy
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pandas
import torch
import verl  # noqa: F401  its plugin makes vLLM's CPU build known by its name
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

COUNT = 192
TOOL = [70, 71, 72, 73]
"""Tokens that come from elsewhere, between the turns."""


def main(world: Path, output: Path) -> None:
    """Generate and save."""
    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    rows = pandas.read_parquet(world / "train.parquet").prompt[:COUNT]
    prompts = [
        list(tokenizer.apply_chat_template(list(row), add_generation_prompt=True, return_dict=False)) for row in rows
    ]
    llm = LLM(
        str(world / "model"),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=60,
        max_num_seqs=64,
        gpu_memory_utilization=0.1,
        enable_return_routed_experts=True,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        seed=0,
    )
    conversations = [{"prompt": prompt, "tokens": [], "mask": [], "log_probs": []} for prompt in prompts]
    answer(llm, conversations)
    one_turn = copy.deepcopy(conversations)
    for conversation in conversations:
        conversation["tokens"] += TOOL
        conversation["mask"] += [0] * len(TOOL)
        conversation["log_probs"] += [0.0] * len(TOOL)
    answer(llm, conversations)
    torch.save({"one turn": one_turn, "two turns": conversations}, output)


def answer(llm: LLM, conversations: list[dict]) -> None:
    """One turn of every conversation; its routes replace those of the turn before, as verl's agent loop has it."""
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=12, logprobs=0, seed=1)
    inputs = [{"prompt_token_ids": c["prompt"] + c["tokens"]} for c in conversations]
    for conversation, output in zip(conversations, llm.generate(inputs, sampling, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        ids = list(completion.token_ids)
        conversation["tokens"] += ids
        conversation["mask"] += [1] * len(ids)
        conversation["log_probs"] += [
            position[token].logprob for token, position in zip(ids, completion.logprobs, strict=True)
        ]
        conversation["routes"] = torch.tensor(completion.routed_experts, dtype=torch.int16)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Program for test_study: studies with one planted cause each, from real vLLM and verl's trainer in bfloat16.

    python planted_causes.py WORLD OUT

The engine is told otherwise than the study says: another temperature, a top-p filter, an older checkpoint; or its
routes of one layer are shifted by a row. Everything else is the very code of ``verl-sis study collect``.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
import torch
import verl  # noqa: F401  its plugin makes vLLM's CPU build known by its name
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_sis.cpu.warm_start import WarmStart, train
from verl_sis.records.schema import Header
from verl_sis.records.write import write_tokens
from verl_sis.study.collect.processes import CPU_ENGINE_ARGUMENTS
from verl_sis.study.collect.prompts import read_prompts
from verl_sis.study.collect.rollouts import RolloutEngine
from verl_sis.study.collect.rows import token_columns
from verl_sis.study.collect.run import Collection, model_facts
from verl_sis.study.collect.settings import CollectSettings
from verl_sis.study.collect.trainer import Rank, Trainer

PROMPTS = 256
SHIFTED_LAYER = 2
STALE_STEPS = 5


def main(world: Path, out: Path) -> None:
    """Sample all, then score all with one trainer per checkpoint."""
    newer = trained_on(world / "model", out / "newer")
    settings = CollectSettings(
        model=str(world / "model"), max_tokens=12, max_prompt_tokens=40, contexts=0, attention="sdpa", top_k=50
    )
    facts = model_facts(settings.model)
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    prompts = read_prompts(world / "train.parquet", tokenizer, limit=PROMPTS, max_tokens=40)
    engine = RolloutEngine(replace(settings, engine=CPU_ENGINE_ARGUMENTS), facts, 1)
    numbered = list(enumerate(prompts))
    rollouts = {"none": engine.respond(numbered)}
    for cause, change in {"temperature": {"temperature": 1.05}, "top_p": {"top_p": 0.9}}.items():
        honest = dict(engine._sampling)
        engine._sampling.update(change)
        rollouts[cause] = engine.respond(numbered)
        engine._sampling = honest
    rollouts["routes"] = [replace(response, routes=shifted(response.routes)) for response in rollouts["none"]]
    # vLLM and verl both want the process's default group.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    trainer = Trainer(settings, facts, Rank(0, 1, "127.0.0.1", 29611))
    for cause, responses in rollouts.items():
        record(out / cause, settings, prompts, trainer, responses)
    stale = replace(settings, model=str(newer))
    record(out / "stale", stale, prompts, Trainer(stale, facts, Rank(0, 1, "127.0.0.1", 29611)), rollouts["none"])


def trained_on(model: Path, out: Path) -> Path:
    """The checkpoint a few optimizer steps later."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    newer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    train(newer, tokenizer, WarmStart(steps=STALE_STEPS, learning_rate=3e-4, warmup_steps=1), frozenset(), seed=7)
    newer.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def shifted(routes: np.ndarray) -> np.ndarray:
    """The routes of one layer belong to the row before."""
    wrong = routes.copy()
    wrong[:, SHIFTED_LAYER] = np.roll(routes[:, SHIFTED_LAYER], 1, axis=0)
    return wrong


def record(folder: Path, settings: CollectSettings, prompts: list, trainer: Trainer, responses: list) -> None:
    """Score and write one study."""
    collection = Collection(settings, prompts, folder)
    header = Header(
        kind="collect",
        ks=settings.ks,
        source=collection.source(),
        layers=trainer.layers,
        experts_per_token=trainer.experts_per_token,
    )
    write_tokens(collection.token_file(0), token_columns(trainer.score(responses), settings), header)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

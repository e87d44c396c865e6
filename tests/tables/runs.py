"""Run directories as Hydra and verl leave them: really composed configurations, and a few recorded metrics."""

import copy
import functools
import json

import yaml
from omegaconf import OmegaConf

from tests.contract.compose import compose_run
from verl_sis.tables.runs import read_run

SIS = ("+sis@_global_=grpo",)
R3 = ("+routing_replay@_global_=r3",)

ACTOR = "actor_rollout_ref.actor"
TOP_K = f"{ACTOR}.policy_loss.sis.top_k"
MINI_BATCH = f"{ACTOR}.ppo_mini_batch_size"

EXPERIMENT = {
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B-Base",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.top_p": 0.95,
    MINI_BATCH: 4,
    f"{ACTOR}.strategy": "fsdp2",
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 8,
    "data.train_files": "data/math/train.parquet",
    "data.val_files": ["data/math/math500.parquet", "data/math/amc23.parquet"],
    "reward.custom_reward_function.path": "pkg://verl_sis.rewards.math",
    "reward.custom_reward_function.name": "math_verify",
    "trainer.total_training_steps": 2,
}
"""N = 2 and two rollouts: four optimizer steps."""

TINY = {
    "actor_rollout_ref.model.path": "${oc.env:VERL_SIS_TINY_WORLD}/model",
    "data.train_files": "${oc.env:VERL_SIS_TINY_WORLD}/train.parquet",
    "reward.custom_reward_function.path": "pkg://verl_sis.cpu.reward",
    "reward.custom_reward_function.name": "compute_score",
}

DAPO = {f"{ACTOR}.clip_ratio_high": 0.28, "algorithm.filter_groups.enable": True}
NO_CLIP = {f"{ACTOR}.clip_ratio_low": 1.0, f"{ACTOR}.clip_ratio_high": 1e9, f"{ACTOR}.clip_ratio_c": 1e9}


@functools.cache
def _composed(groups):
    return OmegaConf.to_container(compose_run(*groups), resolve=False)


def config(groups=(), **values):
    """A composed configuration with values set, as overrides set them: only what exists."""
    tree = copy.deepcopy(_composed(groups))
    for key, value in {**EXPERIMENT, **values}.items():
        *sections, name = key.split(".")
        section = functools.reduce(dict.__getitem__, sections, tree)
        assert name in section, key
        section[name] = value
    return tree


def write_run(path, rows=None, groups=(), **values):
    """A run directory with seed 1 if no other is given; by default it has one validation, at its end."""
    (path / ".hydra").mkdir(parents=True)
    text = yaml.dump(config(groups, **{"data.seed": 1, **values}), Dumper=yaml.CSafeDumper)
    (path / ".hydra" / "config.yaml").write_text(text)
    write_rows(path, {2: math(0.5)} if rows is None else rows)
    return path


def make_run(path, rows=None, groups=(), **values):
    """The same, read."""
    return read_run(write_run(path, rows, groups, **values), path.name)


def write_rows(path, rows):
    """``metrics.jsonl`` of verl's logger "file", by step of the trainer."""
    lines = [json.dumps({"step": step, "data": data}) for step, data in rows.items()]
    (path / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))


def math(average):
    """Held-out results whose mean over the four benchmarks is the average."""
    offsets = {"math500": 0.25, "amc23": 0.05, "aime24": -0.1, "aime25": -0.2}
    return {f"val-core/{source}/acc/mean@1": average + offset for source, offset in offsets.items()}


def levels(*values):
    """Held-out results of the levels of the tiny task."""
    return {f"val-core/tiny_arithmetic_level{i}/acc/mean@1": value for i, value in enumerate(values, 1)}


def training(reward, **more):
    """What verl logs of each step, so far as figures show it."""
    return {"critic/rewards/mean": reward, "actor/entropy": 0.5, "actor/grad_norm": 0.25, **more}


def sis(accept, tokens, residual, divergence):
    """What verl_sis logs, so far as tables read it."""
    return {
        "actor/sis/accept_rate": accept,
        "actor/sis/tokens": tokens,
        "actor/sis/residual_mass/mean": residual,
        "actor/sis/residual_mass/max": residual * 10,
        "actor/sis/D": divergence,
        "actor/sis/D_sis": divergence / 4,
        "actor/sis/accept_rate_by_age/0": 1.0,
        "actor/sis/accept_rate_by_age/1": 2 * accept - 1,
        "actor/mismatch/k3": 1e-3,
    }


def two_steps(last, *logged):
    """A run of two rollouts: training metrics twice, and a validation at the end."""
    first, second = logged or ({}, {})
    return {1: training(0.25, **first), 2: training(0.5, **second, **last)}

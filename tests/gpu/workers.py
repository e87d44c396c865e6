"""Real workers of verl on one GPU, FSDP2 and Megatron, on a tiny mixture of experts."""

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.worker import harness

RESPONSES, LENGTH = 64, 48


def prepare() -> None:
    """Environment of one rank on the GPU; call before verl is imported."""
    import os

    harness.prepare_environment()
    os.environ["VERL_PLATFORM"] = "nvidia"


def build_fsdp(model: Path, sis: dict[str, Any] | None, *, micro_batch_size: int = 16) -> Any:
    """A worker on FSDP2 in bfloat16; verl alone if ``sis`` is None."""
    return harness.build_worker(
        harness.Settings(model=model, sis=sis, micro_batch_size=micro_batch_size, learning_rate=1e-5, dtype="bf16")
    )


def build_megatron(model: Path, sis: dict[str, Any] | None, *, micro_batch_size: int = 16) -> Any:
    """A worker on verl's Megatron engine, its model loaded by Megatron-Bridge; verl alone if ``sis`` is None."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.config.actor import McoreActorConfig, PolicyLossConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    from verl_sis.integration.actor import ActorTrainingWorker

    engine_config = McoreEngineConfig(
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=micro_batch_size,
        infer_micro_batch_size_per_gpu=micro_batch_size,
    )
    worker = (TrainingWorker if sis is None else ActorTrainingWorker)(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(path=str(model), use_remove_padding=True),
            engine_config=engine_config,
            optimizer_config=McoreOptimizerConfig(lr=1e-5, total_training_steps=100, lr_warmup_steps=0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor_config = McoreActorConfig(
        rollout_n=1,
        ppo_mini_batch_size=RESPONSES,
        ppo_micro_batch_size_per_gpu=micro_batch_size,
        megatron=engine_config,
        policy_loss=PolicyLossConfig() if sis is None else harness.sis_choice(sis),
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker


BUILD = {"fsdp2": build_fsdp, "megatron": build_megatron}


def sampled_rollout(model: Path) -> harness.Rollout:
    """Responses sampled from the model on the GPU, by transformers."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).cuda().eval()
    generator = torch.Generator("cuda").manual_seed(0)
    prompts = torch.randint(6, 90, (RESPONSES, 4), generator=generator, device="cuda")
    tokens = prompts
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = module(input_ids=tokens, use_cache=False).logits[:, -1].float()
            drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
    tokens = tokens.cpu()
    return harness.Rollout(list(tokens[:, :4]), list(tokens[:, 4:]))


def step(worker: Any, rollout: harness.Rollout) -> dict[str, Any]:
    """Old pass and an update of two epochs; returns the update's metrics."""
    output = harness.old_pass(worker, rollout)
    old = harness.response_log_probs(output, rollout)
    return harness.update(worker, rollout, old, epochs=2, columns={"rollout_log_probs": old})


def median_seconds(worker: Any, rollout: harness.Rollout, rounds: int = 5) -> float:
    """Seconds of a step, the first of which is not counted."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(worker, rollout)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])

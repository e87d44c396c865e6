"""A real verl TrainingWorker on verl's VeOmni engine, on CPUs, with VeOmni's own model, sharding and optimizer.

VeOmni shards a model over at least two ranks, so these workers are built in the processes of ``tests.worker.ranks``.
What is replaced, and why, stands in ``tests.veomni.stand_ins``.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from tests.veomni import stand_ins
from tests.worker import harness


@dataclass
class Settings:
    """What varies between tests."""

    sis: dict[str, Any] = field(default_factory=dict)
    ulysses: int = 1
    experts: int = 1
    """Ranks that share the experts."""
    replay: str = "disabled"
    packed: bool = True
    micro_batch_size: int = 4
    max_tokens: int | None = None
    """Token budget of dynamic micro-batches; None for micro-batches of fixed size."""
    float32: bool = True
    """Compute in float32, to be compared with other engines; verl's own choice is bfloat16."""
    checkpointing: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)


@cache
def engine_class() -> type:
    """Verl's VeOmni engine, registered for the CPU."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.veomni import transformer_impl

    stand_ins.install()
    return EngineRegistry.register(model_type="language_model", backend=["veomni"], device="cpu")(
        transformer_impl.VeOmniEngineWithLMHead
    )


def build_worker(model: Path, settings: Settings) -> Any:
    """Build a worker as ``ActorRolloutRefWorker.init_model`` does."""
    from veomni.distributed.parallel_state import clear_parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        HFModelConfig,
        TrainingWorkerConfig,
        VeOmniEngineConfig,
        VeOmniOptimizerConfig,
    )
    from verl.workers.config.actor import VeOmniActorConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_sis.integration.actor import ActorTrainingWorker

    stand_ins.compute_in_float32(engine_class(), settings.float32)
    # Of a process VeOmni keeps the first.
    clear_parallel_state()
    dynamic = settings.max_tokens is not None
    engine_config = VeOmniEngineConfig(
        **{
            "strategy": "veomni",
            "use_torch_compile": False,
            "mixed_precision": True,
            "attn_implementation": stand_ins.ATTENTION if settings.packed else "sdpa",
            "moe_implementation": "eager" if settings.experts == 1 else stand_ins.EXPERTS,
            "forward_prefetch": False,
            "use_remove_padding": settings.packed,
            "ulysses_parallel_size": settings.ulysses,
            "expert_parallel_size": settings.experts,
            "router_replay": EngineRouterReplayConfig(mode=settings.replay),
            "use_dynamic_bsz": dynamic,
            "micro_batch_size_per_gpu": settings.micro_batch_size,
            "infer_micro_batch_size_per_gpu": settings.micro_batch_size,
            "max_token_len_per_gpu": settings.max_tokens,
            "infer_max_token_len_per_gpu": settings.max_tokens,
            **settings.engine,
        }
    )
    worker = ActorTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                **{
                    "path": str(model),
                    "use_remove_padding": settings.packed,
                    "enable_gradient_checkpointing": settings.checkpointing,
                    **settings.model,
                }
            ),
            engine_config=engine_config,
            optimizer_config=VeOmniOptimizerConfig(lr=1e-3, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor_config = VeOmniActorConfig(
        strategy="veomni",
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=settings.micro_batch_size,
        use_dynamic_bsz=dynamic,
        use_remove_padding=settings.packed,
        veomni=engine_config,
        policy_loss=harness.sis_choice(settings.sis),
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker

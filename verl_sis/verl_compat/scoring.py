"""A training worker of verl outside of a training run, for forward passes over given tokens."""

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""verl's names for the dtypes of a mixed-precision policy."""


def build_scoring_worker(model: str, *, dtype: str, attention: str, max_tokens: int) -> Any:
    """Build verl's ``TrainingWorker`` as an actor does: FSDP2, parameters in float32, packed dynamic micro-batches.

    The process must have the environment of a torch.distributed rank.

    Args:
        model: Directory or hub name.
        dtype: Of the forward pass.
        attention: transformers' name of the implementation.
        max_tokens: Most tokens in a micro-batch.

    Returns:
        The worker, its model loaded.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    engine: dict[str, Any] = {
        "strategy": "fsdp2",
        "use_torch_compile": False,
        "model_dtype": "fp32",
        "mixed_precision": dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), SHORT_DTYPES[dtype]),
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": max_tokens,
        "infer_max_token_len_per_gpu": max_tokens,
    }
    settings: dict[str, Any] = {
        "path": model,
        "override_config": {"attn_implementation": attention},
        "use_remove_padding": True,
        "enable_gradient_checkpointing": False,
    }
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(**settings),
            engine_config=FSDPEngineConfig(**engine),
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    return worker


def score_with(worker: Any, loss_fn: Callable[..., Any], batch: TensorDict) -> None:
    """Run the old-log-prob pass of a worker, with a loss function that looks at the logits.

    Args:
        worker: Of ``build_scoring_worker``.
        loss_fn: Called twice per micro-batch (see ``verl_sis.integration.passes``).
        batch: Samples as verl's trainer lays them out, with ``LOGITS_HOOK_FLAG``.
    """
    worker.loss_fn = loss_fn
    worker.infer_batch(batch)

"""FSDP engines for the device "cpu". Importing this module registers them.

``verl_sis.register`` imports it as soon as a process has imported verl's engines. verl's own are registered for "cuda"
and "npu" only, although nothing in FSDP2 needs an accelerator.
"""

from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_sis.errors import SisConfigError


class _RequiresFSDP2:
    """Checks the strategy before verl's engine, the next class in line, is built."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        # FSDP1 refuses CPU parameters with sync_module_states=True, in words that do not say what to change.
        if engine_config.strategy != "fsdp2":
            raise SisConfigError(
                f"expected strategy 'fsdp2' on the CPU platform, found '{engine_config.strategy}', which cannot shard "
                "parameters that live on a CPU. Set actor_rollout_ref.actor.strategy=fsdp2 (and critic.strategy=fsdp2)."
            )
        # verl's registration decorator hides the signature of what it decorates from type checkers.
        build: Any = super().__init__
        build(model_config, engine_config, optimizer_config, checkpoint_config)


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngineWithLMHead(_RequiresFSDP2, FSDPEngineWithLMHead):
    """verl's FSDP engine for policies, on a CPU."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CPUFSDPEngineWithValueHead(_RequiresFSDP2, FSDPEngineWithValueHead):
    """verl's FSDP engine for critics, on a CPU."""

"""verl's VeOmni engine: it derives from the FSDP engine, whose logits hook it calls; routes it replays itself.

Only ever asked about in a process that has built that engine, so that VeOmni is imported by then.
"""

import sys
from typing import Any

from verl_sis.errors import SisConfigError
from verl_sis.verl_compat.contract import Touchpoint

_ENGINE = "verl.workers.engine.veomni.transformer_impl"

VEOMNI_CONTRACT: tuple[Touchpoint, ...] = (
    Touchpoint(
        _ENGINE,
        "VeOmniEngineWithLMHead.prepare_model_outputs",
        "Leaves the logits, and with them the hook, to the FSDP engine. Can go when verl hands losses a top-K itself.",
        parameters=("self", "output", "output_args", "micro_batch", "logits_processor_func"),
        fragments=("super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)",),
    ),
    Touchpoint(
        _ENGINE,
        "VeOmniEngineWithLMHead.prepare_model_inputs",
        "Packs, pads and slices tokens as the FSDP engine does, and takes logits away for fused kernels only.",
        fragments=(
            "model_inputs, output_args = super().prepare_model_inputs(micro_batch)",
            "if use_fused_kernels and use_remove_padding:",
        ),
    ),
    Touchpoint(
        _ENGINE,
        "EngineEvalModeCtx.__enter__",
        "The old pass runs under verl's own Ulysses group, by which SIS finds its rows.",
        fragments=("set_ulysses_sequence_parallel_group(self.engine.ulysses_parallel_group)",),
    ),
    Touchpoint(
        _ENGINE,
        "EngineTrainModeCtx.__enter__",
        "So does the update.",
        fragments=("set_ulysses_sequence_parallel_group(self.engine.ulysses_parallel_group)",),
    ),
    Touchpoint(
        _ENGINE,
        "VeOmniEngine.forward_backward_batch",
        "One micro-batch after the other, and routes replayed or recorded where verl's trainer says so.",
        fragments=(
            "loss, meta_info = self.forward_step(",
            'tu.get_non_tensor_data(data, "enable_routing_replay", default=False)',
        ),
    ),
    Touchpoint(
        _ENGINE,
        "VeOmniEngine.is_mp_src_rank_with_outputs",
        "Metrics come from the first rank of each Ulysses group.",
        fragments=('device_mesh["ulysses"].get_local_rank() == 0',),
    ),
)
"""What SIS on the VeOmni engine builds on, beyond ``CONTRACT``."""


def is_veomni_engine(engine: Any) -> bool:
    """Whether an engine is verl's VeOmni engine for language models."""
    module = sys.modules.get(_ENGINE)
    # verl's registration decorator hides its class from type checkers.
    return module is not None and isinstance(engine, module.VeOmniEngineWithLMHead)


def check_veomni_engine(engine: Any) -> None:
    """Check that a VeOmni engine makes logits as SIS knows them.

    Raises:
        SisConfigError: With what to type instead.
    """
    config = engine.engine_config
    refused = {
        "actor_rollout_ref.model.use_fused_kernels=False": (
            config.use_fused_kernels,
            "SIS reads the logits, and VeOmni's fused log-probs never materialise them",
        ),
        "actor_rollout_ref.actor.veomni.pad_to_length=False": (
            config.pad_to_length,
            "verl refuses its logits hook with static padding",
        ),
    }
    for correction, (active, reason) in refused.items():
        if active:
            raise SisConfigError(f"SIS on verl's VeOmni engine: {reason}. Type {correction}")

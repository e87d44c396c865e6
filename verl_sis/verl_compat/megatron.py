"""verl's Megatron engine: which token stands in which row, the groups of the process, and what cannot run under SIS.

Only ever called in a process that has built that engine, so that megatron-core is imported by then. Megatron pads each
sequence to a multiple of the tensor- and context-parallel sizes, shares its rows among the context-parallel ranks
(zigzag: a piece from both ends to each; contiguous: one piece), and pads the vocabulary so that it splits evenly.
"""

import sys
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis.errors import SisConfigError
from verl_sis.verl_compat.batch import packed
from verl_sis.verl_compat.contract import Touchpoint

_ENGINE = "verl.workers.engine.megatron.transformer_impl"

MEGATRON_CONTRACT: tuple[Touchpoint, ...] = (
    Touchpoint(
        _ENGINE,
        "MegatronEngineWithLMHead._lm_head_logits_processor",
        "The logits hook: called on temperature-scaled, vocab-parallel logits before the log-probs, which overwrite "
        "them; what it returns is gathered over context parallelism. Can go when verl hands losses a top-K itself.",
        parameters=("self", "logits", "label", "temperature", "logits_processor_func", "batch", "data_format"),
        fragments=(
            "logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))",
            "ret.update(logits_processor_func(student_logits=logits_bak, data=batch, data_format=data_format))",
            'ret["log_probs"] = vocab_parallel_log_probs_from_logits(logits_bak, label)',
        ),
    ),
    Touchpoint(
        _ENGINE,
        "MegatronEngineWithLMHead.forward_step",
        "Lays the tokens out by these arguments; ours repeats the layout on their indices, so it must be the same.",
        fragments=(
            'data_format = "thd" if self.engine_config.use_remove_padding else "bshd"',
            'forced_max_seqlen=tu.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)',
            "cp_layout = self._get_context_parallel_layout(unwrapped_model)",
            "partial(postprocess_micro_batch_func, data=batch",
        ),
    ),
    Touchpoint(
        _ENGINE,
        "MegatronEngineWithLMHead.postprocess_micro_batch_func",
        "The second call of the loss function, with the micro-batch that the hook saw.",
        fragments=("loss_function(model_output=model_output, data=data, dp_group=self.get_data_parallel_group())",),
    ),
    Touchpoint(
        _ENGINE,
        "MegatronEngine._get_context_parallel_layout",
        "How sequences are shared among the context-parallel ranks.",
        fragments=('return "contiguous"', 'return "zigzag"'),
    ),
    Touchpoint(
        _ENGINE,
        "MegatronEngine.is_mp_src_rank_with_outputs",
        "Metrics come from one rank of each model-parallel group, the one that holds the loss; all others have none.",
        fragments=("mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1",),
    ),
    Touchpoint(
        "verl.models.mcore.util",
        "preprocess_thd_engine",
        "Packs and shares the rows: called on token indices, which gives the row of each token.",
        parameters=("input_ids", "pre_process", "cp_layout"),
    ),
    Touchpoint(
        "verl.models.mcore.util",
        "preprocess_bshd_engine",
        "The same for the padded layout.",
        parameters=("input_ids", "pre_process", "forced_max_seqlen"),
    ),
    Touchpoint(
        "verl.utils.megatron.tensor_parallel",
        "vocab_parallel_log_probs_from_logits",
        "Megatron's cross-entropy computes in float32 whatever the logits' dtype: its log-probs give the normaliser.",
        fragments=("vocab_parallel_cross_entropy",),
    ),
)
"""What SIS on the Megatron engine builds on, beyond ``CONTRACT``."""


def is_megatron_engine(engine: Any) -> bool:
    """Whether an engine is verl's Megatron engine for language models."""
    module = sys.modules.get(_ENGINE)
    return module is not None and isinstance(engine, module.MegatronEngineWithLMHead)


def check_megatron_engine(engine: Any) -> None:
    """Check that a Megatron engine lays out its logits as SIS knows.

    Raises:
        SisConfigError: With what to type instead.
    """
    config, transformer = engine.engine_config, engine.tf_config
    prefix = "actor_rollout_ref.actor.megatron"
    replays = config.router_replay.mode != "disabled"
    refused = {
        f"{prefix}.dynamic_context_parallel=False": (
            config.dynamic_context_parallel,
            "dynamic context parallelism moves samples between ranks from pass to pass, away from their top-K",
        ),
        f"{prefix}.pad_to_length=False": (config.pad_to_length, "verl refuses its logits hook with static padding"),
        "actor_rollout_ref.model.use_fused_kernels=False": (
            config.use_fused_kernels,
            "SIS reads the logits, and fused kernels never materialise them",
        ),
        f"~{prefix}.override_transformer_config.fp8": (
            transformer.fp8,
            "under fp8 verl pads sequences by another rule",
        ),
        f"~{prefix}.override_transformer_config.overlap_moe_expert_parallel_comm": (
            transformer.overlap_moe_expert_parallel_comm,
            "overlapped expert communication interleaves micro-batches, and SIS looks at one after the other",
        ),
        "actor_rollout_ref.model.mtp.enable=False": (
            engine.model_config.mtp.enable,
            "multi-token prediction replaces the step that makes the logits, and was never run",
        ),
        "actor_rollout_ref.model.use_remove_padding=True": (
            replays and not config.use_remove_padding,
            "verl lays out the routes that it replays for packed sequences only",
        ),
        f"{prefix}.sequence_parallel=True": (
            replays and config.tensor_model_parallel_size > 1 and not config.sequence_parallel,
            "verl shares the routes that it replays among the tensor-parallel ranks as sequence parallelism does",
        ),
    }
    for correction, (active, reason) in refused.items():
        if active:
            raise SisConfigError(f"SIS on verl's Megatron engine: {reason}. Type {correction}")


def tensor_parallel() -> tuple[int, int, Any]:
    """Rank, size and group of the tensor-parallel ranks, which share the vocabulary."""
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_group(),
    )


def sum_over_context_parallel(values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over the context-parallel ranks, on each of them."""
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    if parallel_state.get_context_parallel_world_size() > 1 and values.numel():
        torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
    return values


def context_parallel_layout(engine: Any) -> str:
    """``zigzag`` or ``contiguous``, as the engine shares the rows of sequences."""
    from verl.utils.megatron_utils import unwrap_model

    return engine._get_context_parallel_layout(unwrap_model(engine.module[-1]))


def megatron_rows(data: TensorDict, data_format: str, cp_layout: Any) -> torch.Tensor:
    """Packed index of the token in each row of this rank's logits; -1 for padding.

    Indices go through the very functions of verl that pad and share ``input_ids``.

    Args:
        data: Micro-batch as the engine sees it; ``input_ids`` nested.
        data_format: ``thd`` (packed) or ``bshd`` (padded to the longest sequence).
        cp_layout: ``zigzag`` or ``contiguous``, as ``context_parallel_layout`` says.

    Returns:
        int64 ``[n]``, ``n`` the rows of this rank, sequence by sequence.
    """
    from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
    from verl.utils import tensordict_utils as tu

    tokens, _ = packed(data, "input_ids")
    input_ids: Any = data["input_ids"]
    # From 1, because verl pads with 0.
    index = torch.nested.nested_tensor_from_jagged(
        torch.arange(1, len(tokens) + 1, device=tokens.device), input_ids.offsets()
    )
    if data_format == "thd":
        rows = preprocess_thd_engine(index, pre_process=True, cp_layout=cp_layout)[0]
    else:
        longest: Any = tu.get_non_tensor_data(data=data, key="forced_max_seqlen", default=None)
        rows = preprocess_bshd_engine(index, pre_process=True, forced_max_seqlen=longest)[0]
    return rows.flatten() - 1

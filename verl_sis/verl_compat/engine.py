"""verl's FSDP engine: passes of its own for a dump, and, for routing replay, which token stands in which row."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis.errors import SisStateError
from verl_sis.verl_compat.batch import LOGITS_HOOK_FLAG, packed, sequence_parallel_size

NO_TOKEN = -1
"""Packed index of a row that holds no token, i.e. padding."""


def text_config(engine: Any) -> Any:
    """Configuration of the (text) model that an engine trains, as transformers has it."""
    return engine.model_config.hf_config.get_text_config()


def model_of(engine: Any) -> torch.nn.Module:
    """The module that an engine calls, wrapped for FSDP."""
    return engine.module


def current_device() -> torch.device:
    """Where verl runs the models of this process."""
    from verl.utils.device import get_device_id, get_device_name

    name = get_device_name()
    return torch.device(name) if name == "cpu" else torch.device(name, get_device_id())


def forward_dtype(engine: Any) -> str:
    """Dtype that verl's FSDP engine computes in, e.g. ``bfloat16``; VeOmni's, which sets none, in verl's default."""
    return str(getattr(engine, "_autocast_dtype", torch.bfloat16)).removeprefix("torch.")


def true_on_all_ranks(value: bool) -> bool:
    """Whether a value is true on every rank of the worker group; each of them must ask."""
    found = torch.tensor(int(value), device=current_device())
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MIN)
    return bool(found)


def forward_as_in_update(worker: Any, batch: TensorDict, loss_function: Callable[..., Any]) -> None:
    """Run the model on a batch in the micro-batches of the update, without gradients, and leave nothing behind.

    Collective: every rank must call it, with its share of the same batch. Dropout draws from a copy of the random
    state, so what comes after draws what it would have drawn.

    Args:
        worker: verl's ``TrainingWorker``; its engine in the mode that the pass is to run in.
        batch: Of the whole update; a copy, for the engine adds to it.
        loss_function: Called as an engine calls it when the logits hook is on; returns loss and metrics.
    """
    from verl.utils import tensordict_utils as tu

    config = worker.engine_config
    defaults = {
        "use_remove_padding": worker.model_config.get("use_remove_padding", False),
        "use_dynamic_bsz": config.use_dynamic_bsz,
        "max_token_len_per_gpu": config.max_token_len_per_gpu,
        "micro_batch_size_per_gpu": config.micro_batch_size_per_gpu,
        "use_fused_kernels": config.use_fused_kernels,
    }
    missing = {name: value for name, value in defaults.items() if name not in batch}
    tu.assign_non_tensor(batch, **{**missing, LOGITS_HOOK_FLAG: True, "calculate_entropy": False})
    device = current_device()
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices=devices, device_type=device.type):
        worker.engine.infer_batch(batch, loss_function=loss_function)


def model_rows(engine: Any, data: TensorDict) -> torch.Tensor:
    """Packed index of the token in each row that the decoder layers of this rank see; ``NO_TOKEN`` for padding.

    Indices go through the very functions of verl that pad and slice ``input_ids`` in ``prepare_model_inputs``: packing,
    static padding and Ulysses slices, or rows padded to the longest.

    Args:
        engine: verl's FSDP engine.
        data: Micro-batch on the engine's device.

    Returns:
        int64 ``[n]``, ``n`` the rows of this rank.
    """
    from verl.utils import tensordict_utils as tu
    from verl.utils.ulysses import ulysses_pad_and_slice_inputs
    from verl.workers.engine.utils import pad_packed_inputs

    column: Any = data["input_ids"]
    index = torch.arange(column.values().shape[0], device=column.device)
    if not tu.get_non_tensor_data(data, "use_remove_padding", True):
        jagged = torch.nested.nested_tensor_from_jagged(index, column.offsets())
        shape = (len(column), int(column.offsets().diff().max()))
        return torch.nested.to_padded_tensor(jagged, padding=NO_TOKEN, output_size=shape).flatten()
    static_pad: int = engine._get_packed_pad_size(len(index))
    row, _ = pad_packed_inputs(index[None], None, static_pad, pad_value=NO_TOKEN)
    if engine.use_ulysses_sp:
        row, _, _ = ulysses_pad_and_slice_inputs(row, sp_size=engine.ulysses_sequence_parallel_size, pad_value=NO_TOKEN)
    return row.squeeze(0)


def check_model_rows(rows: torch.Tensor, data: TensorDict, model_inputs: dict[str, Any]) -> None:
    """Check ``model_rows`` against the tokens that the engine is about to feed.

    A vision-language model under Ulysses is fed all tokens and slices them after embedding; it is not compared.

    Raises:
        SisStateError: If they are not the same tokens.
    """
    fed = model_inputs["input_ids"].reshape(-1)
    tokens, _ = packed(data, "input_ids")
    if len(fed) == len(rows) * sequence_parallel_size() != len(rows):
        return
    if len(fed) != len(rows):
        raise SisStateError(f"verl's engine feeds {len(fed)} tokens, expected {len(rows)}: its padding is not as known")
    wrong = (tokens[rows.clamp(min=0)] != fed) & (rows != NO_TOKEN)
    if bool(wrong.any()):
        raise SisStateError(
            f"verl's engine feeds other tokens than expected in {int(wrong.sum())} of {len(rows)} rows: routes would "
            "be replayed for the wrong tokens"
        )


def around_forward(
    engine: Any, before: Callable[[TensorDict, dict[str, Any]], None], after: Callable[[TensorDict], None]
) -> None:
    """Have an engine call ``before`` and ``after`` around each forward pass of its model.

    The engine's ``prepare_model_inputs`` and ``prepare_model_outputs`` frame that pass; they are wrapped on the
    instance, so other engines of the process are untouched.

    Args:
        engine: verl's FSDP engine.
        before: Called with the micro-batch and the model's inputs.
        after: Called with the micro-batch once the model has run, before its outputs are processed.
    """
    prepare_inputs, prepare_outputs = engine.prepare_model_inputs, engine.prepare_model_outputs

    def prepare_model_inputs(micro_batch: TensorDict) -> Any:
        model_inputs, output_args = prepare_inputs(micro_batch=micro_batch)
        before(micro_batch, model_inputs)
        return model_inputs, output_args

    def prepare_model_outputs(*, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any):
        after(micro_batch)
        return prepare_outputs(
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )

    engine.prepare_model_inputs = prepare_model_inputs
    engine.prepare_model_outputs = prepare_model_outputs

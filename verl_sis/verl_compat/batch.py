"""verl's batches, its sequence parallelism, and its log-probs, as SIS needs to see them."""

import functools
from typing import Any

import torch
from tensordict import TensorDict

LOGITS_HOOK_FLAG = "distillation_use_topk"
"""Non-tensor flag of a batch under which verl's engines call the loss function with ``student_logits=`` first."""


def packed(data: TensorDict, name: str) -> tuple[torch.Tensor, list[int]]:
    """A jagged nested column ``[B, j, ...]`` as its packed values ``[N, ...]`` and the end of each row."""
    column: Any = data[name]
    return column.values(), column.offsets()[1:].tolist()


def response_lengths(data: TensorDict) -> list[int]:
    """Number of response tokens of each row, by the rule of verl's ``no_padding_2_padding``.

    Args:
        data: Micro-batch whose ``responses`` are nested (default trainer) or padded with an attention mask (legacy).
    """
    responses: Any = data["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    attention_mask: Any = data["attention_mask"]
    return attention_mask[:, data["prompts"].shape[1] :].sum(dim=1).tolist()


def response_width(data: TensorDict) -> int:
    """Width ``T`` of the padded responses in verl's ``ppo_loss``, by the rule of ``no_padding_2_padding``."""
    from verl.utils import tensordict_utils as tu

    responses: Any = data["responses"]
    if not responses.is_nested:
        return responses.shape[1]
    width: Any = tu.get_non_tensor_data(data=data, key="max_response_len", default=-1)
    return width if width >= 0 else max(response_lengths(data))


def padded(data: TensorDict, name: str) -> torch.Tensor:
    """A per-response column as ``[B, T]``, padded with zeros exactly as verl's ``ppo_loss`` pads its own columns."""
    return data.select(name).to_padded_tensor()[name]


def sequence_parallel_size() -> int:
    """Number of Ulysses sequence-parallel ranks of the engine that is running; 1 without."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_world_size

    return 1 if get_ulysses_sequence_parallel_group() is None else get_ulysses_sequence_parallel_world_size()


def sequence_parallel_rank() -> int:
    """Rank in the Ulysses sequence-parallel group of the engine that is running; 0 without."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_rank

    return 0 if get_ulysses_sequence_parallel_group() is None else get_ulysses_sequence_parallel_rank()


def gather_packed(local: torch.Tensor) -> torch.Tensor:
    """Concatenate the slices ``[local_size, ...]`` of all Ulysses ranks along the packed axis, padding included."""
    from verl.utils.ulysses import gather_outputs_and_unpad

    return gather_outputs_and_unpad(local, gather_dim=0)


@functools.cache
def log_probs_keep_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether verl's log-probs of logits of this dtype are float32-accurate here.

    They are for float32 logits, and for bfloat16 logits under flash-attention's cross-entropy. Without flash-attention
    bfloat16 logits give bfloat16 log-probs, off by up to 2^-9 of their value: no basis for a residual mass. verl offers
    no way to ask, so a small case is computed and compared with float64.
    """
    from verl.utils.torch_functional import logprobs_from_logits

    with torch.no_grad():
        logits = torch.linspace(-4.0, 4.0, 8 * 64, device=device).sin().mul(5).view(8, 64).to(dtype)
        labels = torch.arange(8, device=device) * 7
        exact = torch.log_softmax(logits.double(), dim=-1).gather(1, labels[:, None]).squeeze(1)
        return bool((logprobs_from_logits(logits, labels).double() - exact).abs().max() < 1e-5)

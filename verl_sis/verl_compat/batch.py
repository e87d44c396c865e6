"""verl's batches, its sequence parallelism, and its log-probs, as SIS needs to see them."""

import functools
import hashlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import torch
from tensordict import TensorDict


class _Merges(Protocol):
    def merge(self, other: Any) -> None: ...


Mergeable = TypeVar("Mergeable", bound=_Merges)

LOGITS_HOOK_FLAG = "distillation_use_topk"
"""Non-tensor flag of a batch under which verl's engines call the loss function with ``student_logits=`` first."""


SAMPLE_KEY = "sis_sample_key"
"""Column ``[B]`` int64 that the worker adds to its own copy of a batch; it follows verl's selection and chunking."""


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


def sample_keys(data: TensorDict) -> torch.Tensor:
    """A key of each sample's token sequence and of where its response starts.

    Equal sequences have equal top-K and routes and share a key, on any rank and in any run; 64 bits of BLAKE2b, so that
    two different sequences of a batch of a million share one with a probability of 3e-8.

    Args:
        data: Batch with nested ``input_ids``.

    Returns:
        ``[B]`` int64 on the CPU.
    """
    keys = []
    token_ids, ends = packed(data, "input_ids")
    tokens = token_ids.to(device="cpu", dtype=torch.int64).contiguous().numpy()
    for (start, end), length in zip(pairwise([0, *ends]), response_lengths(data), strict=True):
        digest = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=8)
        digest.update(tokens[start:end].tobytes())
        keys.append(int.from_bytes(digest.digest(), "little", signed=True))
    return torch.tensor(keys, dtype=torch.int64)


def attach_sample_keys(data: TensorDict) -> None:
    """Add the column ``SAMPLE_KEY``, once: the keys are a function of the tokens."""
    if SAMPLE_KEY not in data:
        data[SAMPLE_KEY] = sample_keys(data)


def is_old_pass(data: TensorDict) -> bool:
    """Whether a forward pass of the actor scores the samples that will be trained on.

    ``compute_loss`` is False for it; under LoRA the reference pass comes to the actor too, with the adapter off.
    """
    from verl.utils import tensordict_utils as tu

    if tu.get_non_tensor_data(data, "compute_loss", True):
        return False
    return not tu.get_non_tensor_data(data, "no_lora_adapter", False)


def response_columns(tensor: torch.Tensor, data: TensorDict) -> torch.Tensor:
    """Response part of a nested per-token output, as verl's ``ppo_loss`` slices and pads it.

    Args:
        tensor: Nested ``[B, j]``, one value per token of prompt and response, each predicting the next token.
        data: The batch it was computed from.

    Returns:
        ``[B, T]``.
    """
    from verl.workers.utils.padding import no_padding_2_padding

    return no_padding_2_padding(tensor, data)


def with_metrics(output: Any, transform: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply ``transform`` to the metrics of a worker's output; ranks that verl takes no outputs from return None."""
    from verl.utils import tensordict_utils as tu

    if output is not None:
        tu.assign_non_tensor(output, metrics=transform(dict(tu.get(output, "metrics"))))
    return output


def merge_exchanged(total: Mergeable, found: Any) -> Mergeable:
    """Merge statistics into ``total`` out of the nested lists (ranks, micro-batches) that verl's metric exchange makes.

    Args:
        total: What to merge into.
        found: One of the same class, or iterables of them, nested to any depth.

    Returns:
        ``total``.
    """
    queue = [found]
    while queue:
        item = queue.pop()
        if isinstance(item, type(total)):
            total.merge(item)
        else:
            queue.extend(item)
    return total


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


def gather_packed_integers(local: torch.Tensor) -> torch.Tensor:
    """``gather_packed`` for integers of any width; NCCL has no int16, so bytes travel."""
    if sequence_parallel_size() == 1:
        return local
    return gather_packed(local.contiguous().view(torch.uint8)).view(local.dtype)


def sum_over_sequence_parallel(values: torch.Tensor) -> torch.Tensor:
    """Sum of a tensor over all Ulysses ranks, on each of them."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group

    if sequence_parallel_size() > 1:
        torch.distributed.all_reduce(values, group=get_ulysses_sequence_parallel_group())
    return values


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

"""Stand-ins for what megatron-core asks of CUDA or of Transformer Engine without need; test-only.

megatron-core 0.16 names the device "cuda" where it makes small tensors; its own attention knows neither packed
sequences nor context parallelism, and its own norm no sequence parallelism. Here tensors for "cuda" are made on the
CPU, attention is dense, with a mask made from where each row of the packed or padded layout stands, and the norm is
torch's, its weight marked for the exchange of gradients. Everything else is megatron-core's and verl's own code.
"""

from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaIsCpu(TorchFunctionMode):
    """Makes tensors that are asked for on "cuda" on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``func`` with another device."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        # Gradient clipping asks for the name of the type.
        return result.replace("torch.", "torch.cuda.") if func is torch.Tensor.type and len(args) == 1 else result


class OneStream:
    """The only stream there is: everything on it has happened."""

    def record_event(self) -> "OneStream":
        return self

    def synchronize(self) -> None:
        pass


def splits_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the token dispatcher makes of sizes on a GPU before it exchanges tokens."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradient is added up over the ranks that share the rows."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


@cache
def install() -> None:
    """Do so in this thread from now on; CUDA's random states, which only dropout uses, are not kept."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = splits_as_numpy
    moe_utils.te_general_gemm = None  # what it asks for; without Transformer Engine it forgets to define it
    transformer_block.LayerNormImpl = Norm
    CudaRNGStatesTracker.add = lambda *_: None
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    stream = OneStream()
    torch.cuda.Stream = torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: nullcontext()
    CudaIsCpu().__enter__()


def positions(seq_starts: list[int], rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and position of each row of a context-parallel rank, zigzag as Transformer Engine shares rows.

    Args:
        seq_starts: Where each sequence starts in the padded row of all ranks together, and where the last one ends.
        rank: Context-parallel rank.
        size: Number of them.
    """
    sequences, places = [], []
    for sequence, (start, stop) in enumerate(pairwise(seq_starts)):
        pieces = torch.arange(stop - start).chunk(2 * size) if size > 1 else [torch.arange(stop - start)]
        own = [pieces[rank], pieces[2 * size - rank - 1]] if size > 1 else pieces
        places += own
        sequences += [torch.full_like(piece, sequence) for piece in own]
    return torch.cat(sequences), torch.cat(places)


def attention_class() -> type:
    """Dense causal attention, in the place of megatron-core's ``DotProductAttention``."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule

    class DenseAttention(MegatronModule):
        """Softmax attention within each sequence, over the keys of all context-parallel ranks."""

        def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **_: Any) -> None:
            super().__init__(config=config)
            self.scale = config.kv_channels**-0.5

        def forward(
            self, query: Any, key: Any, value: Any, attention_mask: Any, packed_seq_params: Any = None, **_: Any
        ) -> torch.Tensor:
            """``[t, heads, head_dim]`` packed, or ``[s, b, heads, head_dim]``; returns ``[..., heads * head_dim]``."""
            rank = parallel_state.get_context_parallel_rank()
            size = parallel_state.get_context_parallel_world_size()
            shape = query.shape
            if packed_seq_params is None:
                starts = [0, shape[0] * size]
            else:
                starts = packed_seq_params.cu_seqlens_q_padded.tolist()
                query, key, value = (part.unsqueeze(1) for part in (query, key, value))
            own, *others = (positions(starts, other, size) for other in (rank, *range(size)))
            if size > 1:
                group = parallel_state.get_context_parallel_group()
                key, value = (
                    torch.cat(torch.distributed.nn.functional.all_gather(part.contiguous(), group=group))
                    for part in (key, value)
                )
            sequence, place = (torch.cat(parts) for parts in zip(*others, strict=True))
            allowed = (own[0][:, None] == sequence) & (own[1][:, None] >= place)
            query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=allowed, scale=self.scale, enable_gqa=True
            )
            output = output.permute(2, 0, 1, 3).flatten(2)
            return output if packed_seq_params is None else output.squeeze(1)

    return DenseAttention

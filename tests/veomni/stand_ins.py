"""What of VeOmni 0.1.12 and of verl's engine around it cannot run on a CPU, and what stands for it; test-only."""

import sys
from functools import cache, partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.worker.ulysses_on_cpu import packed_attention

ATTENTION = "veomni_flash_attention_4_with_sp"
"""VeOmni's and transformers' own code down to the kernel, which is dense here; Ulysses exchanges rows and heads."""

EXPERTS = "fused_triton"
"""VeOmni's expert parallelism down to the two matrix products over groups of rows, which are Triton's on a GPU."""

PRODUCTS = "veomni.ops.kernels.moe._kernels.kernel.group_gemm"


@cache
def install() -> None:
    """Replace them in this process."""
    from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
    from veomni.ops.kernels import moe
    from veomni.ops.kernels.attention import flash
    from verl.workers.engine.veomni import transformer_impl

    # Asks torch.cpu for the memory of a GPU.
    transformer_impl.log_gpu_memory_usage = lambda *_, **__: None
    flash._load_veomni_local_flash_kernel = lambda _: SimpleNamespace(
        flash_attn_func=refuse, flash_attn_varlen_func=attention_of_packed
    )
    # To import the module of the two products already asks for a GPU.
    products = ModuleType(PRODUCTS)
    products.group_gemm_same_nk, products.group_gemm_same_mn = rows_times_weights, rows_times_rows
    sys.modules[PRODUCTS] = products
    moe.is_fused_moe_available = lambda: True
    from veomni.distributed.moe import moe_layer

    moe_layer.dist = SimpleNamespace(get_rank=torch.distributed.get_rank, all_gather_into_tensor=gather_flat)
    KERNEL_REGISTRY.register(
        KernelSpec(
            name="triton",
            op_name="moe_experts",
            variant="standard",
            factory=moe._triton_kernel_factory,
            hardware=HardwareRequirement(device_type="any"),
        ),
        force=True,
    )


def refuse(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> None:
    """Padded rows under flash-attention: not asked for in these tests."""
    raise NotImplementedError("only packed sequences have a stand-in")


def attention_of_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    """Causal attention within each of the packed sequences; ``[n, heads, head_dim]``."""
    assert causal and cu_seqlens_q.equal(cu_seqlens_k)
    positions = torch.cat([torch.arange(length) for length in cu_seqlens_q.diff().tolist()])[None]
    return packed_attention(q[None], k[None], v[None], position_ids=positions, softmax_scale=softmax_scale)[0]


def groups(ends: torch.Tensor) -> list[slice]:
    """The rows of each expert, from where they end."""
    return [slice(start, end) for start, end in pairwise([0, *ends.tolist()])]


def rows_times_weights(
    a: torch.Tensor,
    b: torch.Tensor,
    cumsum_M: torch.Tensor,
    max_M: int,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> torch.Tensor:
    """Rows ``[n, k]`` of each expert times its weights ``[G, k, m]``, or transposed."""
    assert not transpose_a
    weights = b.transpose(1, 2) if transpose_b else b
    return torch.cat([a[rows] @ weight for rows, weight in zip(groups(cumsum_M), weights, strict=True)])


def rows_times_rows(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    cumsum_K: torch.Tensor,
    max_K: int,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> None:
    """Rows ``[n, m]`` of each expert, transposed, times rows ``[n, k]``, into ``c`` ``[G, m, k]``."""
    assert transpose_a and not transpose_b
    for rows, product in zip(groups(cumsum_K), c, strict=True):
        product.copy_(a[rows].T @ b[rows])


def gather_flat(output: torch.Tensor, values: torch.Tensor, group: Any) -> None:
    """Gather ``[n]`` of each rank into ``[ranks, n]``, which gloo wants flat."""
    torch.distributed.all_gather_into_tensor(output.view(-1), values, group=group)


def compute_in_float32(engine: Any, chosen: bool) -> None:
    """Keep verl from choosing bfloat16 for VeOmni's forward pass."""
    from veomni.arguments import MixedPrecisionConfig
    from verl.workers.engine.veomni import transformer_impl

    dtype = torch.float32 if chosen else torch.bfloat16
    engine._autocast_dtype = dtype
    transformer_impl.MixedPrecisionConfig = partial(MixedPrecisionConfig, param_dtype=str(dtype).split(".")[1])

"""The same worker with verl's fused kernels and without, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FUSED: dict[str, Any] = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
"""Settings of verl's model configuration."""


@contextmanager
def forward_restored() -> Iterator[None]:
    """Undo what verl does to the class of a model, so that later workers of this process are built unfused."""
    from transformers import Qwen3MoeForCausalLM

    forward = Qwen3MoeForCausalLM.forward
    try:
        yield
    finally:
        Qwen3MoeForCausalLM.forward = forward

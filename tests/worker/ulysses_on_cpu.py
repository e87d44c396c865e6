"""A stand-in for one function: flash-attention over packed sequences, which has no CPU build.

verl's Ulysses patch wraps transformers' ``_flash_attention_forward`` between two all-to-alls. Here verl's wrapper runs
as it is; only the function inside is replaced, by dense attention with a mask made from the position ids. Test-only.
"""

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "sdpa_under_ulysses"


def packed_attention(query, key, value, *_args, position_ids, softmax_scale, **_ignored):
    """Causal attention within each sequence of a packed row; ``[1, n, heads, head_dim]`` as flash-attention has it."""
    sequence = (position_ids[0] == 0).cumsum(0)
    order = torch.arange(len(sequence))
    allowed = (sequence[:, None] == sequence[None, :]) & (order[:, None] >= order[None, :])
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=allowed, scale=softmax_scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, **_):
    """What transformers calls: verl's own Ulysses wrapper, on ``[1, heads, n, head_dim]``."""
    from verl.models.transformers.monkey_patch import _ulysses_flash_attention_forward

    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    output = _ulysses_flash_attention_forward(
        query, key, value, None, query.shape[1], position_ids=position_ids, softmax_scale=scaling
    )
    return output, None


def install() -> None:
    """Make the attention available as ``attn_implementation=NAME``."""
    from verl.models.transformers import monkey_patch

    monkey_patch._flash_attention_forward = packed_attention
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)

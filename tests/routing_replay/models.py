"""A tiny model of each router family, made by transformers from its own configuration class."""

from typing import Any

import torch
import transformers

VOCABULARY = 64
LAYERS = 3

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "num_experts_per_tok": 2,
}
_GROUPED = {
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2-MoE": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "norm_topk_prob": False,
        },
    ),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True}),
    "Qwen3-MoE, first layer dense": (
        "Qwen3Moe",
        {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": False, "mlp_only_layers": [0]},
    ),
    "Qwen3.5-MoE": (
        "Qwen3_5Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["full_attention"] * LAYERS,
        },
    ),
    "Mixtral": ("Mixtral", {"num_local_experts": 8}),
    "gpt-oss": ("GptOss", {"num_local_experts": 8, "layer_types": ["full_attention"] * LAYERS}),
    "DeepSeek-V3": (
        "DeepseekV3",
        {
            **_GROUPED,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "GLM-4-MoE": ("Glm4Moe", _GROUPED),
}
"""Class prefix in transformers and what differs from the common settings, by name."""

SPARSE = {name: tuple(range(LAYERS)) for name in FAMILIES} | {
    "Qwen3-MoE, first layer dense": (1, 2),
    "DeepSeek-V3": (1, 2),
    "GLM-4-MoE": (1, 2),
}
"""Absolute layers with experts."""


def build(family: str, *, dtype: torch.dtype = torch.float32, experts: str = "eager", **changes: Any) -> Any:
    """A randomly initialised causal language model.

    Args:
        family: One of ``FAMILIES``.
        dtype: Of its weights.
        experts: Implementation of the experts: eager, batched_mm or grouped_mm.
        changes: Other settings of its configuration.
    """
    prefix, settings = FAMILIES[family]
    text = "Text" if prefix == "Qwen3_5Moe" else ""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**_COMMON, **settings, **changes})
    config._experts_implementation = experts
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Routers with clear preferences, and layers whose outputs depend on the experts.
                parameter.normal_(0.0, 1.0 if "gate." in name or "router." in name else 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    return model.to(dtype)


def tokens(count: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids ``[1, count]``."""
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))

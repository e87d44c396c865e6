"""A character tokenizer and a small Qwen3-MoE that both transformers and vLLM's CPU backend can run."""

import string
from dataclasses import dataclass
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# Every printable ASCII character: far more than sums need, so that a top-10 leaves most of the vocabulary outside.
_CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. vLLM's CPU kernels need head_dim >= 32 and the other widths divisible by 32."""

    hidden_size: int = 96
    """Width of the residual stream."""

    layers: int = 3
    """Number of transformer layers; each has a mixture of experts."""

    heads: int = 4
    """Attention heads; there are half as many key-value heads."""

    head_dim: int = 32
    """Width of one head."""

    experts: int = 8
    """Experts per layer."""

    experts_per_token: int = 2
    """Experts that the router picks for a token."""

    expert_size: int = 64
    """Inner width of one expert."""


def build_tokenizer() -> Any:
    """Build a transformers tokenizer with one token per character and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(shape: ModelShape, tokenizer: Any, max_length: int, seed: int) -> Any:
    """Build a randomly initialised Qwen3-MoE in fp32.

    Args:
        shape: Sizes of the model.
        tokenizer: Result of `build_tokenizer`.
        max_length: Longest sequence in tokens.
        seed: Of torch's generator; the same seed gives the same weights.

    Returns:
        A ``transformers.Qwen3MoeForCausalLM``.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    # transformers writes the constructors of its configurations at run time, unseen by type checkers.
    configuration: Any = Qwen3MoeConfig
    config = configuration(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=2 * shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // 2,
        head_dim=shape.head_dim,
        num_experts=shape.experts,
        num_experts_per_tok=shape.experts_per_token,
        moe_intermediate_size=shape.expert_size,
        norm_topk_prob=True,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    return model.float()

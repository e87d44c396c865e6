"""Settings of a collection, and what of them would bias it."""

import math
from dataclasses import dataclass, field
from typing import Any

from verl_sis.core.by_k import grid_up_to
from verl_sis.errors import SisConfigError

DTYPES = ("bfloat16", "float16", "float32")

_BIASING_ENGINE_ARGUMENTS = {
    "generation_config": "it can bring sampling filters of its own",
    "override_generation_config": "it can bring sampling filters of its own",
    "logits_processors": "they change the distribution that tokens are drawn from",
    "speculative_config": "log-probs of drafted tokens are not reliable (vLLM issues 30846, 44727)",
    "logprobs_mode": "the study needs processed_logprobs, those of the distribution that tokens are drawn from",
    "max_logprobs": "it follows from --top-k",
    "enable_return_routed_experts": "it follows from the model",
    "model": "it is the command's first argument",
    "dtype": "it is --dtype",
    "seed": "it is --seed",
    "tensor_parallel_size": "it is --tensor-parallel",
    "max_model_len": "it follows from --max-prompt-tokens and --max-tokens",
}


@dataclass(frozen=True)
class CollectSettings:
    """What is collected. Everything here belongs to the study: a resumed collection must have the same.

    Attributes:
        model: Directory or hub name of the model, for both engines.
        samples: Responses per prompt.
        max_tokens: Longest response, tokens.
        max_prompt_tokens: Longest prompt, tokens; longer ones are refused.
        temperature: Of sampling, and applied to the trainer's logits, as verl does.
        top_k: Entries of the old policies that are kept, the largest K of the study.
        dtype: Of the rollout engine and of the trainer's forward pass (its parameters are kept in float32, as verl's
            are).
        attention: Implementation in the trainer; by default flash_attention_2 on GPUs, sdpa on CPUs.
        shard_prompts: Prompts in a shard, the unit of resuming and of memory.
        micro_batch_tokens: Tokens in a forward pass of the trainer.
        precise: Also score with a trainer in float32: it tells rounding from other causes, at the cost of a second copy
            of the model.
        contexts: Tokens of each shard at which whole top-K policies are kept, for ``verl-sis study estimator``.
        seed: Of the sampling.
        engine: Further arguments of vLLM's ``LLM``.
    """

    model: str
    samples: int = 1
    max_tokens: int = 512
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    top_k: int = 50
    dtype: str = "bfloat16"
    attention: str | None = None
    shard_prompts: int = 64
    micro_batch_tokens: int = 8192
    precise: bool = True
    contexts: int = 256
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what would bias the study, and what cannot be.

        Raises:
            SisConfigError: With what was expected, what came, and what to type.
        """
        if not (math.isfinite(self.temperature) and self.temperature > 0.0):
            raise SisConfigError(
                f"--temperature must be above 0, got {self.temperature}: greedy or undefined sampling draws no tokens "
                "from the policy, and every rate of the study would be about another distribution. Type --temperature 1"
            )
        for name in ("samples", "max_tokens", "max_prompt_tokens", "top_k", "shard_prompts", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise SisConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.contexts < 0:
            raise SisConfigError(f"--contexts must be at least 0, got {self.contexts}")
        if self.dtype not in DTYPES:
            raise SisConfigError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name, reason in _BIASING_ENGINE_ARGUMENTS.items():
            if name in self.engine:
                raise SisConfigError(f"--engine {name}=... is not allowed in a study: {reason}. Leave it out")

    @property
    def ks(self) -> tuple[int, ...]:
        """The grid of K."""
        return grid_up_to(self.top_k)

    @property
    def longest(self) -> int:
        """Longest sequence of prompt and response, tokens."""
        return self.max_prompt_tokens + self.max_tokens


@dataclass(frozen=True)
class ModelFacts:
    """What the two engines must know of a model before they are built.

    Attributes:
        vocabulary: Size of the vocabulary.
        sparse: Whether it is a mixture of experts.
        layers: Decoder layers.
    """

    vocabulary: int
    sparse: bool
    layers: int

"""Router families of transformers: where the experts are chosen, and how a choice becomes weights.

Only the choice is replayed. The weights of the replayed experts are gathered from the trainer's own full scores, with
the family's own arithmetic, so the router keeps its gradients. That arithmetic has changed between releases (5.5
returns probabilities where 5.6 and later return logits), so each family lists its variants, and the one that gives back
a fresh router's own weights bit for bit is taken (``choose_weights``).
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_sis.errors import SisConfigError

Weights = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
"""``(module, scores [n, E], ids [n, K]) -> weights [n, K]``, scores as the family's router returns them."""


def _normalized(module: Any, chosen: torch.Tensor) -> torch.Tensor:
    return chosen / chosen.sum(dim=-1, keepdim=True)


def _normalized_if_set(module: Any, chosen: torch.Tensor) -> torch.Tensor:
    return _normalized(module, chosen) if module.norm_topk_prob else chosen


def _softmax_of_logits(finish: Callable[[Any, torch.Tensor], torch.Tensor]) -> Weights:
    """Of transformers 5.6 and later: the router returns logits."""

    def weights(module: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return finish(module, torch.softmax(logits, dim=-1, dtype=torch.float).gather(1, ids))

    return weights


def _of_probabilities(finish: Callable[[Any, torch.Tensor], torch.Tensor]) -> Weights:
    """Of transformers 5.5: the router returns float32 probabilities under the name of logits."""

    def weights(module: Any, probabilities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return finish(module, probabilities.gather(1, ids))

    return weights


def _softmax_of_chosen(module: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """gpt-oss: the softmax is taken over the chosen logits only."""
    chosen = logits.gather(1, ids)
    return torch.softmax(chosen, dim=1, dtype=chosen.dtype)


def _scaled_sigmoid(module: Any, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3: sigmoid scores without the bias that steers the choice, then normalised and scaled."""
    chosen = logits.sigmoid().gather(1, ids)
    if module.norm_topk_prob:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * module.routed_scaling_factor


@dataclass(frozen=True)
class RouterFamily:
    """One kind of module that chooses experts.

    Attributes:
        name: What people call the models, for messages.
        modeling: Its package under ``transformers.models``.
        module_class: Name of the module class that chooses. Its ``forward`` returns ``(scores, weights, ids)``, unless
            ``method`` is set.
        variants: Arithmetic from scores to weights, the newest first.
        method: Method of the class that maps router logits to ``(ids, weights)``; the class holds the router as
            ``gate``.
    """

    name: str
    modeling: str
    module_class: str
    variants: tuple[Weights, ...]
    method: str | None = None


_ALWAYS = (_softmax_of_logits(_normalized), _of_probabilities(_normalized))
_BY_METHOD = "route_tokens_to_experts"
_IF_SET = (_softmax_of_logits(_normalized_if_set), _of_probabilities(_normalized_if_set))

FAMILIES: tuple[RouterFamily, ...] = (
    RouterFamily("Qwen2-MoE", "qwen2_moe", "Qwen2MoeTopKRouter", _IF_SET),
    RouterFamily("Qwen3-MoE", "qwen3_moe", "Qwen3MoeTopKRouter", _IF_SET),
    RouterFamily("Qwen3.5-MoE", "qwen3_5_moe", "Qwen3_5MoeTopKRouter", _ALWAYS),
    RouterFamily("Mixtral", "mixtral", "MixtralTopKRouter", _ALWAYS),
    RouterFamily("gpt-oss", "gpt_oss", "GptOssTopKRouter", (_softmax_of_chosen,)),
    RouterFamily("DeepSeek-V3", "deepseek_v3", "DeepseekV3MoE", (_scaled_sigmoid,), _BY_METHOD),
    RouterFamily("GLM-4-MoE", "glm4_moe", "Glm4MoeMoE", (_scaled_sigmoid,), _BY_METHOD),
)
"""The supported families. A new one needs a line here and a row in ``tests/routing_replay/models.py``."""


def family_of(module: nn.Module) -> RouterFamily | None:
    """The family of a module, or None if it is not one that chooses experts.

    FSDP2 changes the class of a module that it wraps to a subclass of it, so the bases are looked at too.
    """
    names = {base.__name__ for base in type(module).__mro__}
    return next((family for family in FAMILIES if family.module_class in names), None)


def class_of(family: RouterFamily, module: nn.Module) -> type[nn.Module]:
    """The class of a module that its family names, under whatever wraps it."""
    return next(base for base in type(module).__mro__ if base.__name__ == family.module_class)


def choose_weights(family: RouterFamily, module_class: type[nn.Module], config: Any, device: torch.device) -> Weights:
    """The variant of a family that the installed transformers has, proven on a fresh router.

    The model's own routers may be sharded at this point, so one of the same class and configuration is built, with
    random weights; its experts stay on the meta device.

    Args:
        family: A family.
        module_class: Its class in the model.
        config: Configuration of the text model, which the class is built from.
        device: Where the model runs.

    Returns:
        Arithmetic that turns the fresh router's own choices into its own weights, bit for bit, in float32 and bfloat16.

    Raises:
        SisConfigError: If no variant does.
    """
    probes = [_Probe(family, module_class, config, device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    for variant in family.variants:
        if all(probe.reproduced_by(variant) for probe in probes):
            return variant
    raise SisConfigError(
        f"routing replay knows the {family.name} routers of transformers 5.5 to 5.10, but {module_class.__module__}."
        f"{family.module_class} gives other weights for its own choices than any of them. Install transformers "
        ">=5.5.3,<5.11, or train without +routing_replay@_global_=..."
    )


def proven_families() -> list[str]:
    """Names of the families that the installed transformers has, each proven on a router of its default size.

    Raises:
        SisConfigError: If one has another arithmetic than any known variant.
    """
    from transformers import AutoConfig

    names = []
    for family in FAMILIES:
        modeling = importlib.import_module(f"transformers.models.{family.modeling}.modeling_{family.modeling}")
        config = AutoConfig.for_model(family.modeling).get_text_config()
        choose_weights(family, getattr(modeling, family.module_class), config, torch.device("cpu"))
        names.append(family.name)
    return names


class _Probe:
    """A fresh router and what it does with random tokens."""

    _TOKENS = 64

    def __init__(self, family: RouterFamily, module_class: Any, config: Any, device: torch.device, dtype: Any) -> None:
        with torch.device("meta"):
            self._module = module_class(config)
        router = self._module if family.method is None else self._module.gate
        router.to_empty(device=device).to(dtype)
        generator = torch.Generator().manual_seed(0)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        with torch.no_grad():
            for tensor in (*router.parameters(), *router.buffers()):
                tensor.copy_(noise(*tensor.shape))
            output = router(noise(self._TOKENS, config.hidden_size))
            if family.method is None:
                self._scores, self._weights, self._ids = output
            else:
                self._scores = output
                self._ids, self._weights = getattr(self._module, family.method)(output)

    @torch.no_grad()
    def reproduced_by(self, weights: Weights) -> bool:
        return torch.equal(weights(self._module, self._scores, self._ids).to(self._weights.dtype), self._weights)

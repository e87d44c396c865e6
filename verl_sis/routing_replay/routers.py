"""The routers of one model: found by class, keyed by absolute decoder layer, checked for gaps."""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from verl_sis.errors import SisConfigError
from verl_sis.routing_replay.families import FAMILIES, RouterFamily, Weights, choose_weights, class_of, family_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_EXPERTS = re.compile(r"(?:^|\.)layers\.(\d+)\..*\bexperts$")
_MULTI_TOKEN_PREDICTION = re.compile(r"(?:^|\.)(?:mtp|nextn|eagle)[^.]*\.", re.IGNORECASE)


@dataclass(frozen=True)
class Router:
    """A module that chooses experts.

    Attributes:
        layer: Absolute decoder layer, from the module's name. Rollout engines number layers so; neither the order of
            construction nor the ordinal among sparse layers would do, since models may start with dense layers.
        name: Name of the module in the model.
        module: The module.
        family: Its family.
        weights: Arithmetic from scores and ids to weights.
        experts: E.
        experts_per_token: K.
    """

    layer: int
    name: str
    module: nn.Module
    family: RouterFamily
    weights: Weights
    experts: int
    experts_per_token: int


def find_routers(model: nn.Module, config: Any, device: torch.device) -> list[Router]:
    """Find every router of the decoder.

    Args:
        model: The module that the engine calls, wrapped or not.
        config: Configuration of its text model.
        device: Where it runs.

    Returns:
        One router per sparse decoder layer, by layer.

    Raises:
        SisConfigError: If there are none, a sparse layer has none of a known family, or a layer has two.
    """
    found: dict[int, tuple[str, nn.Module, RouterFamily]] = {}
    sparse: dict[int, str] = {}
    for name, module in model.named_modules():
        match, experts = _LAYER.search(name), _EXPERTS.search(name)
        if match is None or _MULTI_TOKEN_PREDICTION.search(name) or int(match[1]) >= config.num_hidden_layers:
            continue
        if experts is not None:
            sparse.setdefault(int(experts[1]), name)
        family = family_of(module)
        if family is None:
            continue
        layer = int(match[1])
        if layer in found:
            raise SisConfigError(
                f"routing replay found two routers in decoder layer {layer}: {found[layer][0]} and {name}. It cannot "
                "tell which of them the rollout engine's routes belong to"
            )
        found[layer] = name, module, family
    _check_coverage(model, found, sparse)
    _, module, family = next(iter(found.values()))
    weights = choose_weights(family, class_of(family, module), config, device)
    return [_router(layer, *found[layer], weights) for layer in sorted(found)]


def has_experts(model: nn.Module) -> bool:
    """Whether a decoder layer of a model is a mixture of experts, of a known family or not.

    Args:
        model: Any transformers model, on any device.
    """
    return any(
        _LAYER.search(name) and (_EXPERTS.search(name) or family_of(module)) for name, module in model.named_modules()
    )


def _check_coverage(model: nn.Module, found: dict[int, Any], sparse: dict[int, str]) -> None:
    known = ", ".join(family.name for family in FAMILIES)
    uncovered = sorted(set(sparse) - set(found))
    if uncovered:
        raise SisConfigError(
            f"routing replay knows the routers of {known}, but found none of them beside {sparse[uncovered[0]]} "
            f"(decoder layers {uncovered}). Replaying some layers only would be silently wrong. Train without "
            "+routing_replay@_global_=..."
        )
    if not found:
        raise SisConfigError(
            f"routing replay was chosen, but {type(model).__name__} has no mixture of experts that it knows ({known}). "
            "Train without +routing_replay@_global_=..."
        )
    if len({family.name for _, _, family in found.values()}) > 1:
        raise SisConfigError("routing replay expects one router family in a model, found several")


def _router(layer: int, name: str, module: nn.Module, family: RouterFamily, weights: Weights) -> Router:
    gate: Any = module if family.method is None else module.gate
    top_k: Any = module.top_k
    return Router(layer, name, module, family, weights, int(gate.weight.shape[0]), int(top_k))

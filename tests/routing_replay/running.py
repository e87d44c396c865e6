"""Run a bare model with and without replay, outside of verl."""

from typing import Any

import torch

from verl_sis.core.routing import RESPONSE, RoutingStatistics
from verl_sis.routing_replay.controller import RoutingReplay
from verl_sis.routing_replay.routers import find_routers
from verl_sis.routing_replay.targets import Rows, Targets


def install(model: Any) -> RoutingReplay:
    """Replay in a model, natively until armed."""
    return RoutingReplay(find_routers(model, model.config.get_text_config(), torch.device("cpu")))


def rows(count: int) -> Rows:
    """Rows of which each predicts a response token."""
    return Rows(torch.arange(count), torch.full((count,), RESPONSE), torch.zeros(count, dtype=torch.bool))


def forward(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits ``[1, n, V]``."""
    return model(input_ids=tokens, use_cache=False).logits


def record(model: Any, replay: RoutingReplay, tokens: torch.Tensor) -> torch.Tensor:
    """The model's own choices, int16 ``[n, C, K]``."""
    with torch.no_grad():
        replay.record(rows(tokens.numel()))
        forward(model, tokens)
        replay.finish_forward()
        recording = replay.recording()
        replay.disarm()
    return recording


def targets(replay: RoutingReplay, ids: torch.Tensor, valid: torch.Tensor | None = None) -> Targets:
    """Targets out of ``[n, C, K]`` ids, for the layers that have routers."""
    valid = torch.ones(len(ids), dtype=torch.bool) if valid is None else valid
    columns = {layer: column for column, layer in enumerate(replay.layers)}
    return Targets.of(ids.to(torch.int16), valid, columns, rows(len(ids)))


def random_ids(replay: RoutingReplay, count: int, seed: int = 0) -> torch.Tensor:
    """Distinct random experts, ``[n, C, K]``."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(count, len(replay.layers), replay.experts, generator=generator)
    return noise.topk(replay.experts_per_token, dim=-1).indices


def replayed(model: Any, replay: RoutingReplay, tokens: torch.Tensor, chosen: Targets) -> torch.Tensor:
    """Logits under replay; stays armed."""
    replay.arm(chosen, count=True)
    logits = forward(model, tokens)
    replay.finish_forward()
    return logits


def observed(replay: RoutingReplay, model: Any, tokens: torch.Tensor, chosen: Targets) -> RoutingStatistics:
    """Statistics of a replayed forward pass."""
    with torch.no_grad():
        replay.arm(chosen, count=True)
        forward(model, tokens)
        observer = replay.finish_forward()
        replay.disarm()
    assert observer is not None
    return observer.statistics(observer.packed())

"""From scored responses to the columns of the token table, and to contexts."""

from typing import Any

import numpy as np
import torch

from verl_sis.core.by_k import acceptance_by_k, sampled_rank
from verl_sis.core.envelope import FILTERED_LOG_PROB, TopK
from verl_sis.study.collect.scoring import Scores
from verl_sis.study.collect.settings import CollectSettings
from verl_sis.study.collect.trainer import ScoredResponse

Columns = dict[str, np.ndarray]


def token_columns(scored: list[ScoredResponse], settings: CollectSettings) -> Columns:
    """Columns of the token table for the responses of a shard.

    Args:
        scored: In order; none empty.
        settings: Of the study.

    Returns:
        By name, as ``verl_sis.records.schema`` has them.
    """
    parts = [_columns_of(item, settings) for item in scored]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _columns_of(item: ScoredResponse, settings: CollectSettings) -> Columns:
    response, count = item.response, len(item.response.ids)
    columns: Columns = {
        "sequence": np.full(count, response.prompt * settings.samples + response.sample),
        "position": np.arange(count),
        "turn": np.zeros(count),
        "token": response.ids,
        "prompt": np.full(count, response.prompt),
        "entropy": item.native.entropy,
        "rollout_log_prob": response.log_prob,
        "old_log_prob": item.native.verl_log_prob,
        "native_log_prob": item.native.log_prob,
        "again_log_prob": item.again.log_prob,
    }
    if item.replay is not None:
        columns["replay_log_prob"] = item.replay.log_prob
    if item.precise is not None:
        columns["precise_log_prob"] = item.precise.log_prob
    if item.layer_overlap is not None:
        columns["layer_overlap"] = item.layer_overlap
    engine, trainer = _engine_top_k(item), _trainer_top_k(item)
    ids = torch.as_tensor(response.ids)
    columns["rollout_rank"] = sampled_rank(engine, ids).numpy()
    columns["native_rank"] = sampled_rank(trainer, ids).numpy()
    queried = item.native.queried
    assert queried is not None
    columns |= engine_columns(response.top_log_prob, queried, columns["rollout_rank"], settings.ks)
    columns |= _pair("engine", settings.ks, engine, columns["rollout_rank"], item.native)
    columns |= _pair("floor", settings.ks, trainer, columns["native_rank"], item.again)
    if item.replay is not None:
        columns |= _pair("replay", settings.ks, engine, columns["rollout_rank"], item.replay)
    return columns


def engine_columns(log_prob: np.ndarray, trainer: np.ndarray, rank: np.ndarray, ks: tuple[int, ...]) -> Columns:
    """What tells a wrong temperature and a filtering sampler from rounding.

    Args:
        log_prob: ``[R, K]`` of the rollout engine's top-K, by decreasing probability.
        trainer: ``[R, K]`` of the same ids, trainer.
        rank: ``[R]`` of the sampled tokens in it.
        ks: Grid of K.

    Returns:
        ``rollout_mass``, ``rollout_mass_before``, ``rollout_filtered`` and ``engine_moments`` of the token table.
    """
    engine = log_prob.astype(np.float64)
    usable = engine > FILTERED_LOG_PROB
    mass = np.where(usable, np.exp(np.where(usable, engine, 0.0)), 0.0).cumsum(axis=1)
    before = np.concatenate([np.zeros((len(mass), 1)), mass], axis=1)
    above = np.where(rank < 0, mass.shape[1], rank)
    return {
        "rollout_mass": mass[:, np.array(ks) - 1],
        "rollout_mass_before": np.take_along_axis(before, above[:, None], axis=1)[:, 0],
        "rollout_filtered": (~usable).sum(axis=1),
        "engine_moments": _moments(trainer.astype(np.float64), engine, usable),
    }


def _moments(x: np.ndarray, y: np.ndarray, usable: np.ndarray) -> np.ndarray:
    """Sums of squares and product of x and y, ``[R, K]`` each, less their means over the usable entries of a row."""
    count = usable.sum(axis=1, keepdims=True).clip(min=1)

    def centred(values: np.ndarray) -> np.ndarray:
        kept = np.where(usable, values, 0.0)
        return np.where(usable, values - kept.sum(axis=1, keepdims=True) / count, 0.0)

    dx, dy = centred(x), centred(y)
    return np.stack([(dx * dx).sum(axis=1), (dx * dy).sum(axis=1), (dy * dy).sum(axis=1)], axis=1)


def _pair(name: str, ks: tuple[int, ...], old: TopK, rank: np.ndarray, current: Scores) -> Columns:
    test = acceptance_by_k(
        ks, old, torch.as_tensor(rank), torch.as_tensor(current.queried), torch.as_tensor(current.log_prob)
    )
    return {
        f"{name}_log_envelope": test.log_envelope.numpy(),
        f"{name}_residual_mass": test.residual_mass.numpy(),
        f"{name}_acceptance": test.acceptance.numpy(),
    }


def _engine_top_k(item: ScoredResponse) -> TopK:
    response = item.response
    return _top_k(response.top_ids, response.top_log_prob, response.log_prob, response.ids)


def _trainer_top_k(item: ScoredResponse) -> TopK:
    native = item.native
    assert native.top_ids is not None and native.top_log_prob is not None
    return _top_k(native.top_ids, native.top_log_prob, native.log_prob, item.response.ids)


def _top_k(ids: np.ndarray, log_prob: np.ndarray, sampled: np.ndarray, tokens: np.ndarray) -> TopK:
    usable = log_prob > FILTERED_LOG_PROB
    return TopK(
        ids=torch.as_tensor(ids),
        log_prob=torch.as_tensor(log_prob),
        sampled_log_prob=torch.as_tensor(sampled),
        contains_sampled=torch.as_tensor(((ids == tokens[:, None]) & usable).any(axis=1)),
    )


def context_columns(scored: list[ScoredResponse], settings: CollectSettings, seed: int) -> dict[str, Columns]:
    """Whole top-K policies at a random choice of tokens, for the estimator laboratory.

    Args:
        scored: Responses of a shard.
        settings: Of the study; ``contexts`` tokens are drawn.
        seed: Of the choice.

    Returns:
        By pair of policies, the columns of ``verl_sis.records.contexts``.
    """
    places = [(i, position) for i, item in enumerate(scored) for position in range(len(item.response.ids))]
    drawn = np.random.default_rng(seed).permutation(len(places))[: settings.contexts]
    chosen = [places[i] for i in sorted(drawn.tolist())]
    pairs: dict[str, Columns] = {}
    for pair in ("engine", "replay", "floor"):
        rows = [_context(pair, scored[i], position, settings) for i, position in chosen]
        known = [row for row in rows if row is not None]
        if known:
            pairs[pair] = {name: np.stack([row[name] for row in known]) for name in known[0]}
    return pairs


def _context(pair: str, item: ScoredResponse, position: int, settings: CollectSettings) -> dict[str, Any] | None:
    current = {"engine": item.native, "replay": item.replay, "floor": item.again}[pair]
    if current is None or current.queried is None:
        return None
    old = _trainer_top_k(item) if pair == "floor" else _engine_top_k(item)
    response = item.response
    return {
        "sequence": np.int64(response.prompt * settings.samples + response.sample),
        "position": np.int32(position),
        "token": response.ids[position],
        "age": np.int16(0),
        "ids": old.ids[position].numpy(),
        "old_log_prob": old.log_prob[position].numpy(),
        "current_log_prob": current.queried[position],
    }

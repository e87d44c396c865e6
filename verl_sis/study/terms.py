"""The terms that a study sums up, as one matrix of a row per term and a column per token."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verl_sis.records.read import Batch
from verl_sis.records.schema import LOG_PROBS
from verl_sis.study import measures


@dataclass(frozen=True)
class Layout:
    """What a study holds, and so what can be summed.

    Attributes:
        ks: Grid of K.
        layers: Absolute decoder layers with experts.
        experts_per_token: K of the router.
        columns: Columns that every file of the study has.
    """

    ks: tuple[int, ...]
    layers: tuple[int, ...]
    experts_per_token: int
    columns: frozenset[str]

    @property
    def comparisons(self) -> list[measures.Comparison]:
        """Comparisons whose columns are there."""
        return measures.available(self.columns)[0]

    @property
    def pairs(self) -> list[str]:
        """Pairs of policies whose columns are there."""
        return measures.available(self.columns)[1]

    @property
    def headline_pair(self) -> str | None:
        """The pair that acceptance is reported for first: in training the update, else the engine's."""
        return next((pair for pair in ("update", "engine", "floor") if pair in self.pairs), None)

    @property
    def routed(self) -> bool:
        """Whether the study has routes."""
        return "layer_overlap" in self.columns

    def needed(self) -> list[str]:
        """Columns to read."""
        names = {"sequence", "position", "turn", "token", "age", "entropy", "rollout_log_prob", "old_log_prob"}
        names |= {name for c in self.comparisons for name in (c.reference, c.other)}
        for pair in self.pairs:
            names |= {f"{pair}_{what}" for what in ("acceptance", "log_envelope", "residual_mass")}
            names |= {*LOG_PROBS[pair], measures.rank_of(pair)}
        names |= {"layer_overlap", "rollout_mass", "rollout_mass_before", "rollout_filtered", "engine_moments"}
        return sorted(names & self.columns)


def matrix(batch: Batch, layout: Layout) -> tuple[list[str], np.ndarray]:
    """All terms of some tokens.

    Args:
        batch: Rows with the columns of ``layout.needed``.
        layout: Of the study.

    Returns:
        Names, M of them, the same for every batch: ``engine.k3``, ``engine.accepted@10``, ``routes.differs@3``, ...;
        and float64 ``[M, n]``.
    """
    names: list[str] = []
    rows: list[np.ndarray] = []
    for name, values in _terms(batch, layout):
        names.append(name)
        rows.append(values)
    return names, np.stack(rows)


def _terms(batch: Batch, layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    rows = len(batch["position"])
    yield "tokens", np.ones(rows)
    if "entropy" in batch:
        finite = np.isfinite(batch["entropy"])
        yield "entropy.tokens", finite.astype(np.float64)
        yield "entropy.sum", np.where(finite, batch["entropy"], 0.0).astype(np.float64)
    comparisons = {c.name: measures.comparison_terms(batch, c) for c in layout.comparisons}
    for comparison, terms in comparisons.items():
        for term, values in terms.items():
            yield f"{comparison}.{term}", values
    for pair in layout.pairs:
        plain, by_k = measures.pair_terms(batch, pair, layout.ks)
        for term, values in plain.items():
            yield f"{pair}.{term}", values
        for term, values in by_k.items():
            for index, k in enumerate(layout.ks):
                yield f"{pair}.{term}@{k}", values[index]
    if layout.routed:
        yield from _routing_terms(batch, layout, comparisons)
    if "engine_moments" in batch:
        yield from _sampling_terms(batch, layout)


def _routing_terms(batch: Batch, layout: Layout, comparisons: dict[str, Batch]) -> Iterator[tuple[str, np.ndarray]]:
    differs = batch["layer_overlap"] < layout.experts_per_token
    anywhere = np.asarray(differs.any(axis=1), dtype=np.float64)
    yield "routes.any", anywhere
    for comparison in ("engine", "replay"):
        if comparison in comparisons:
            yield f"routes.{comparison}_k3", anywhere * comparisons[comparison]["k3"]
    for column, layer in enumerate(layout.layers):
        yield f"routes.differs@{layer}", differs[:, column].astype(np.float64)


def _sampling_terms(batch: Batch, layout: Layout) -> Iterator[tuple[str, np.ndarray]]:
    """What tells a wrong temperature (moments) and a sampler that does not draw from its own log-probs (calibration).

    If a token is drawn from the engine's policy, it is among the first K entries with their probability m; the excess
    of hits over the sum of m has variance ``sum m (1 - m)``.
    """
    moments = np.where(np.isfinite(batch["engine_moments"]), batch["engine_moments"], 0.0).astype(np.float64)
    for column, name in enumerate(("trainer", "product", "engine")):
        yield f"moments.{name}", moments[:, column]
    yield "filtered.tokens", (batch["rollout_filtered"] > 0).astype(np.float64)
    mass = np.clip(batch["rollout_mass"].astype(np.float64), 0.0, 1.0)
    rank = batch["rollout_rank"]
    for column, k in enumerate(layout.ks):
        m = mass[:, column]
        yield f"calibration.mass@{k}", m
        yield f"calibration.hits@{k}", ((rank >= 0) & (rank < k)).astype(np.float64)
        yield f"calibration.variance@{k}", m * (1.0 - m)

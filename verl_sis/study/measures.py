"""What a study measures at each token, from the columns of the token table.

A comparison is a pair of log-probs of the same tokens, ``(reference, other)``. With ``d = log other - log reference``:

    k1 = -d,   k3 = exp(d) - 1 - d,   |d|,   F(2) = [|d| > log 2]

Averages of k1 and k3 estimate ``KL(reference || other)`` where the tokens were drawn from the reference.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from verl_sis.core.envelope import FILTERED_LOG_PROB
from verl_sis.records.read import Batch
from verl_sis.records.schema import LOG_PROBS, OLD_POLICY


@dataclass(frozen=True)
class Comparison:
    """Two log-probs of the same tokens.

    Attributes:
        name: Short, for tables.
        reference: Column of the one that tokens are compared to.
        other: Column of the other.
        meaning: What makes the two differ.
    """

    name: str
    reference: str
    other: str
    meaning: str


COMPARISONS = (
    Comparison("engine", *LOG_PROBS["engine"], "rollout engine against trainer, float32 log-softmax"),
    Comparison("replay", *LOG_PROBS["replay"], "the same with the engine's routes replayed in the trainer (R3)"),
    Comparison("floor", *LOG_PROBS["floor"], "trainer against itself, other micro-batches"),
    Comparison("verl", "rollout_log_prob", "old_log_prob", "rollout engine against trainer, as verl computes both"),
    Comparison("arithmetic", "native_log_prob", "old_log_prob", "verl's log-probs against float32 ones, same logits"),
    Comparison("trainer_rounding", "precise_log_prob", "native_log_prob", "trainer against itself in float32"),
    Comparison("engine_rounding", "precise_log_prob", "rollout_log_prob", "rollout engine against a float32 trainer"),
    Comparison("mode", "old_log_prob", "anchor_log_prob", "train mode against eval mode, before any update"),
    Comparison("staleness", "anchor_log_prob", "log_prob", "policy in training against itself before any update"),
    Comparison("update", *LOG_PROBS["update"], "policy in training against the old policy"),
)
"""Every comparison; a study has those whose two columns it holds."""

COMPARISON_TERMS = ("tokens", "non_finite", "k1", "k3", "abs", "outside_2")
"""Per-token terms of a comparison."""

PAIR_TERMS = ("tested", "divergence")
"""Per-token terms of a pair: 1 where all is finite, and ``|log w|``."""

PAIR_TERMS_BY_K = ("accepted", "expected", "residual", "inside", "divergence_sis", "certain")
"""Per-token terms of a pair at one K: acceptance probability a, its expectation (1 - xi) / M^ over tokens of the old
policy, xi, membership in V_K, ``(1 - a) |log w|``, and ``[xi <= 0.10]``."""

CERTIFICATE_MEAN, CERTIFICATE_P95 = 0.02, 0.10
"""Bounds on the residual mass at K = 10 that a reviewer of the paper asked for: its mean, and its 95th percentile."""

HEADLINE_K = 10


def available(columns: Iterable[str]) -> tuple[list[Comparison], list[str]]:
    """Comparisons and pairs of policies that a study with these columns can speak of."""
    have = set(columns)
    comparisons = [c for c in COMPARISONS if {c.reference, c.other} <= have]
    pairs = [
        pair
        for pair in LOG_PROBS
        if {*LOG_PROBS[pair], f"{pair}_acceptance", f"{pair}_log_envelope", f"{pair}_residual_mass", rank_of(pair)}
        <= have
    ]
    return comparisons, pairs


def rank_of(pair: str) -> str:
    """Column with the sampled token's rank in the old policy's top-K."""
    return f"{OLD_POLICY[pair]}_rank"


def headline(ks: tuple[int, ...]) -> int:
    """Index of the K that single numbers are given for: 10, or the largest below it."""
    return max(i for i, k in enumerate(ks) if k <= HEADLINE_K or i == 0)


def is_log_prob(values: np.ndarray) -> np.ndarray:
    """Finite, and not the large negative number that some engines put for -inf."""
    return np.isfinite(values) & (values > FILTERED_LOG_PROB)


def comparison_terms(batch: Batch, comparison: Comparison) -> Batch:
    """Terms of one comparison, float64 ``[n]`` each; 0 but for ``non_finite`` where a log-prob is undefined."""
    reference, other = batch[comparison.reference], batch[comparison.other]
    finite = is_log_prob(reference) & is_log_prob(other)
    d = np.where(finite, other, 0.0).astype(np.float64) - np.where(finite, reference, 0.0).astype(np.float64)
    size = np.abs(d)
    return {
        "tokens": finite.astype(np.float64),
        "non_finite": (~finite).astype(np.float64),
        "k1": -d,
        "k3": np.expm1(d) - d,
        "abs": size,
        "outside_2": (size > math.log(2.0)).astype(np.float64),
    }


def pair_terms(batch: Batch, pair: str, ks: tuple[int, ...]) -> tuple[Batch, Batch]:
    """Terms of one pair; all 0 where a value is not finite.

    Args:
        batch: Rows with the pair's columns.
        pair: Its name.
        ks: Grid of C values of K.

    Returns:
        ``PAIR_TERMS``, float64 ``[n]``, and ``PAIR_TERMS_BY_K``, float64 ``[C, n]``.
    """
    reference, other = (batch[name] for name in LOG_PROBS[pair])
    by_k = {what: _by_k(batch[f"{pair}_{what}"]) for what in ("acceptance", "log_envelope", "residual_mass")}
    finite = is_log_prob(reference) & is_log_prob(other)
    for values in by_k.values():
        finite = finite & np.isfinite(values).all(axis=0)
    if not finite.all():
        by_k = {what: np.where(finite, values, 0.0) for what, values in by_k.items()}
        reference, other = np.where(finite, reference, 0.0), np.where(finite, other, 0.0)
    a, xi = by_k["acceptance"], by_k["residual_mass"]
    size = np.abs(other.astype(np.float64) - reference.astype(np.float64))
    rank = batch[rank_of(pair)]
    inside = (rank >= 0) & (rank < np.array(ks)[:, None]) & finite
    weight = finite.astype(np.float64)
    return {"tested": weight, "divergence": size}, {
        "accepted": a,
        "expected": (1.0 - xi) * np.exp(-by_k["log_envelope"]) * weight,
        "residual": xi,
        "inside": inside.astype(np.float64),
        "divergence_sis": (1.0 - a) * size,
        "certain": ((xi <= CERTIFICATE_P95) & finite).astype(np.float64),
    }


def _by_k(values: np.ndarray) -> np.ndarray:
    """Float64 ``[C, n]``, each K contiguous, of a column ``[n, C]``."""
    return values.T.astype(np.float64, order="C")

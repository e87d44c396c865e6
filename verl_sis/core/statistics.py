"""Pooled statistics: counts, sums, maxima and histograms over tokens, merged exactly across any split of a batch.

A rate is formed once, from pooled numerator and denominator, never averaged over micro-batches. Sums are taken in
float64, so the split of a batch changes a rate by float64 rounding only. Tokens with a non-finite log-probability are
left out of every sum and counted instead.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from verl_sis.core.envelope import FILTERED_LOG_PROB

KAPPA_GROUPS = 64
"""Number of random groups of sequences behind the standard error of kappa."""

_HISTOGRAM_BINS_PER_DECADE = 50
_HISTOGRAM_DECADES = 9
HISTOGRAM_EDGES = np.logspace(-_HISTOGRAM_DECADES, 1, (_HISTOGRAM_DECADES + 1) * _HISTOGRAM_BINS_PER_DECADE + 1)
"""Edges of the histograms behind quantiles: 50 bins a decade from 1e-9 to 10, so a quantile is exact to 4.7 %."""

MISMATCH_TAUS = (1.05, 2.0, 5.0)
"""F(tau): fraction of tokens whose probability ratio between rollout engine and trainer leaves [1/tau, tau]."""

SUMS = (
    "tokens",
    "responses",
    "accepted",
    "in_top_k",
    "accept_expected",
    "normalized_tokens",
    "residual_mass",
    "envelope",
    "log_ratio_abs",
    "log_ratio_abs_rejected",
    "stored_gap",
    "ratio",
    "ratio_squared",
    "sis_ratio",
    "sis_ratio_squared",
    "non_finite",
    "mismatch_tokens",
    "mismatch_k1",
    "mismatch_k3",
    "mismatch_abs",
    *(f"mismatch_outside_{tau:g}" for tau in MISMATCH_TAUS),
    "mismatch_non_finite",
)
MAXIMA = ("residual_mass", "envelope", "mismatch_abs")
HISTOGRAMS = ("residual_mass", "mismatch_abs")


@dataclass(frozen=True)
class JointMoments:
    """Count, means and centred second moments of pairs (x, y); merged by Chan, Golub and LeVeque's formula (1979).

    Centred, because sums of squares lose the variance of probabilities that are nearly constant.
    """

    count: float = 0.0
    mean_x: float = 0.0
    mean_y: float = 0.0
    square_x: float = 0.0
    square_y: float = 0.0
    product: float = 0.0

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> "JointMoments":
        """Moments of float64 samples ``[n]``."""
        if not x.size:
            return cls()
        dx, dy = x - x.mean(), y - y.mean()
        return cls(float(x.size), float(x.mean()), float(y.mean()), float(dx @ dx), float(dy @ dy), float(dx @ dy))

    def merged(self, other: "JointMoments") -> "JointMoments":
        """Moments of both sets of pairs together."""
        count = self.count + other.count
        if not count:
            return self
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share, weight = other.count / count, self.count * other.count / count
        return JointMoments(
            count,
            self.mean_x + share * dx,
            self.mean_y + share * dy,
            self.square_x + other.square_x + weight * dx * dx,
            self.square_y + other.square_y + weight * dy * dy,
            self.product + other.product + weight * dx * dy,
        )

    def correlation(self) -> float:
        """Pearson's correlation; NaN where a side does not vary beyond float64 rounding of its mean."""
        for square, mean in ((self.square_x, self.mean_x), (self.square_y, self.mean_y)):
            if not square > self.count * (1e-15 * mean) ** 2:
                return math.nan
        return self.product / math.sqrt(self.square_x * self.square_y)


@dataclass
class PooledStatistics:
    """Mergeable statistics of any number of tokens.

    Attributes:
        sums: float64 sums and counts by name (``SUMS``).
        maxima: float64 maxima by name (``MAXIMA``); -inf when empty.
        histograms: int64 counts by name (``HISTOGRAMS``), one bin below, one above ``HISTOGRAM_EDGES``.
        kappa_groups: ``[KAPPA_GROUPS]`` float64, sum of ``z - (1 - xi) / M^`` over the sequences of each group.
        probabilities: Moments of the sampled tokens' probabilities, rollout engine against trainer.
    """

    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    maxima: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MAXIMA, -np.inf))
    histograms: dict[str, np.ndarray] = field(
        default_factory=lambda: {name: np.zeros(len(HISTOGRAM_EDGES) + 1, dtype=np.int64) for name in HISTOGRAMS}
    )
    kappa_groups: np.ndarray = field(default_factory=lambda: np.zeros(KAPPA_GROUPS))
    probabilities: JointMoments = field(default_factory=JointMoments)

    def merge(self, other: "PooledStatistics") -> None:
        """Add the tokens of ``other``."""
        for name, value in other.sums.items():
            self.sums[name] += value
        for name, value in other.maxima.items():
            self.maxima[name] = max(self.maxima[name], value)
        for name, counts in other.histograms.items():
            self.histograms[name] = self.histograms[name] + counts
        self.kappa_groups = self.kappa_groups + other.kappa_groups
        self.probabilities = self.probabilities.merged(other.probabilities)


def is_log_prob(log_prob: torch.Tensor) -> torch.Tensor:
    """Whether a value is a log-probability: finite, and not the large negative number that some engines put for -inf.

    Args:
        log_prob: Any shape.

    Returns:
        bool of the same shape.
    """
    return torch.isfinite(log_prob) & (log_prob > FILTERED_LOG_PROB)


@torch.no_grad()
def acceptance_statistics(
    *,
    mask: torch.Tensor,
    accepted: torch.Tensor,
    contains_sampled: torch.Tensor,
    log_ratio: torch.Tensor,
    log_expected: torch.Tensor,
    normalized: torch.Tensor,
    log_envelope: torch.Tensor,
    residual_mass: torch.Tensor,
    stored_gap: torch.Tensor,
    sample_key: torch.Tensor,
) -> PooledStatistics:
    """Statistics of one batch of acceptance tests.

    Args:
        mask: bool ``[B, T]``, tokens that bear loss.
        accepted: bool ``[B, T]``, z.
        contains_sampled: bool ``[B, T]``, y in V_K.
        log_ratio: float32 ``[B, T]``, log w of the sampled token.
        log_expected: float32 ``[B, T]``, ``log((1 - xi_K) / M^)``.
        normalized: bool ``[B, T]``, tokens whose ``log_envelope`` and ``residual_mass`` are known.
        log_envelope: float32 ``[B, T]``, log M^.
        residual_mass: float32 ``[B, T]``, xi_K.
        stored_gap: float32 ``[B, T]``, distance in nats of the log pi_old kept beside the top-K from the trainer's.
        sample_key: int64 ``[B]``, key of each token sequence.

    Returns:
        Sums over the masked tokens with finite values; the others count as ``non_finite``.
    """
    finite = torch.isfinite(log_expected)
    finite = finite & (~normalized | (torch.isfinite(log_envelope) & torch.isfinite(residual_mass)))
    # Both signs: either policy may have filtered the token.
    finite = finite & is_log_prob(log_ratio) & is_log_prob(-log_ratio)
    used = mask & finite
    log_w = torch.where(used, log_ratio, 0.0).double()
    z = accepted & used
    w = torch.exp(log_w)
    w_sis = torch.where(z, 1.0, w)
    expected = torch.exp(torch.where(used, log_expected, 0.0).double())

    pooled = PooledStatistics()
    _add_sums(
        pooled,
        used,
        {
            "tokens": torch.ones_like(log_w),
            "accepted": z.double(),
            "in_top_k": contains_sampled.double(),
            "accept_expected": expected,
            "log_ratio_abs": log_w.abs(),
            "log_ratio_abs_rejected": torch.where(z, 0.0, log_w.abs()),
            "stored_gap": stored_gap.double(),
            "ratio": w,
            "ratio_squared": w.square(),
            "sis_ratio": w_sis,
            "sis_ratio_squared": w_sis.square(),
        },
    )
    pooled.sums["responses"] = float(mask.any(dim=-1).sum())
    pooled.sums["non_finite"] = float((mask & ~finite).sum())
    _add_envelope(pooled, used & normalized, log_envelope, residual_mass)
    pooled.kappa_groups = _kappa_groups(torch.where(used, z.double() - expected, 0.0).sum(dim=-1), sample_key)
    return pooled


def _add_envelope(
    pooled: PooledStatistics, known: torch.Tensor, log_envelope: torch.Tensor, residual_mass: torch.Tensor
) -> None:
    """M^ and xi_K over the tokens where they are known."""
    envelope = torch.exp(torch.where(known, log_envelope, 0.0).double())
    xi = torch.where(known, residual_mass, 0.0).double()
    _add_sums(pooled, known, {"normalized_tokens": torch.ones_like(xi), "residual_mass": xi, "envelope": envelope})
    _add_extremes(pooled, "residual_mass", xi[known])
    pooled.maxima["envelope"] = float(envelope[known].max()) if bool(known.any()) else -np.inf


def _kappa_groups(surplus: torch.Tensor, sample_key: torch.Tensor) -> np.ndarray:
    """Sum ``z - (1 - xi) / M^`` of whole sequences, float64 ``[B]``, by group; equal sequences share a group."""
    group = torch.remainder(sample_key, KAPPA_GROUPS).cpu()
    return torch.zeros(KAPPA_GROUPS, dtype=torch.float64).index_add_(0, group, surplus.cpu()).numpy()


@torch.no_grad()
def mismatch_statistics(
    *, mask: torch.Tensor, old_log_prob: torch.Tensor, rollout_log_prob: torch.Tensor
) -> PooledStatistics:
    """Train-inference mismatch of the sampled tokens, rollout engine against trainer, at equal weights.

    With ``d = log pi_old(y) - log pi_rollout(y)`` and y drawn from pi_rollout: ``k1 = mean(-d)`` and
    ``k3 = mean(exp(d) - 1 - d)`` both estimate KL(pi_rollout || pi_old).

    Args:
        mask: bool ``[B, T]``, tokens that bear loss.
        old_log_prob: float ``[B, T]``, the trainer's.
        rollout_log_prob: float ``[B, T]``, the engine's.

    Returns:
        Sums over masked tokens where both are finite; the others count as ``mismatch_non_finite``.
    """
    finite = is_log_prob(old_log_prob) & is_log_prob(rollout_log_prob)
    used = mask & finite
    old = torch.where(used, old_log_prob, 0.0).double()
    rollout = torch.where(used, rollout_log_prob, 0.0).double()
    d = old - rollout

    pooled = PooledStatistics()
    _add_sums(
        pooled,
        used,
        {
            "mismatch_tokens": torch.ones_like(d),
            "mismatch_k1": -d,
            "mismatch_k3": torch.expm1(d) - d,
            "mismatch_abs": d.abs(),
            **{f"mismatch_outside_{tau:g}": (d.abs() > math.log(tau)).double() for tau in MISMATCH_TAUS},
        },
    )
    pooled.sums["mismatch_non_finite"] = float((mask & ~finite).sum())
    _add_extremes(pooled, "mismatch_abs", d.abs()[used])
    # 1 - p rather than p: a collapsed policy has p = 1 - 1e-9, and 1 - p keeps its digits.
    pooled.probabilities = JointMoments.of(
        -torch.expm1(rollout[used]).cpu().numpy(), -torch.expm1(old[used]).cpu().numpy()
    )
    return pooled


def _add_sums(pooled: PooledStatistics, used: torch.Tensor, terms: dict[str, torch.Tensor]) -> None:
    """Sum each term over the used tokens; one transfer from the device for all of them."""
    stacked = torch.stack([torch.where(used, term, 0.0).sum() for term in terms.values()]).tolist()
    pooled.sums.update(zip(terms, stacked, strict=True))


def _add_extremes(pooled: PooledStatistics, name: str, values: torch.Tensor) -> None:
    """Histogram and maximum of ``values`` (1-D float64)."""
    values_np = values.cpu().numpy()
    bins = np.searchsorted(HISTOGRAM_EDGES, values_np, side="right")
    pooled.histograms[name] = np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1)
    pooled.maxima[name] = float(values_np.max()) if values_np.size else -np.inf

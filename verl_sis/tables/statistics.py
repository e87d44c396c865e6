"""Means, standard errors and paired comparisons of few seeds.

Differences are sorted before they are resampled, so that a result depends on their values alone.
``verl_sis.study.bootstrap`` resamples responses, of which there are many, and refuses an interval below ten of them;
here the units are seeds, and how little a few of them can show is printed instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verl_sis.errors import RunComparisonError

DRAWS = 10_000
"""Resamples behind an interval."""

LEVEL = 0.95
"""Coverage of the intervals."""

SIGNIFICANCE = 0.05
"""Level of the tests."""

MOST_PAIRS = 20
"""Pairs up to which all 2^n sign patterns are counted."""

Interval = tuple[float, float]
"""Lower and upper end."""

_SEED = 0
_CHUNK = 500


@dataclass(frozen=True)
class Measured:
    """A mean over seeds.

    Attributes:
        mean: Arithmetic mean.
        se: Standard error, the sample's standard deviation (n - 1) over the root of n; None for n = 1.
        n: Number of seeds.
    """

    mean: float
    se: float | None
    n: int


def measured(values: Sequence[float]) -> Measured | None:
    """Mean and standard error; None of nothing.

    Args:
        values: One per seed, finite.
    """
    if not values:
        return None
    spread = standard_deviation(values)
    return Measured(math.fsum(values) / len(values), spread and _root_of(spread, len(values)), len(values))


def _root_of(spread: float, n: int) -> float:
    return spread / math.sqrt(n)


def standard_deviation(values: Sequence[float]) -> float | None:
    """Of a sample, with n - 1; None for n < 2.

    Args:
        values: Finite.
    """
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


@dataclass(frozen=True)
class Paired:
    """Differences of two cells over their common seeds.

    Attributes:
        gain: Mean difference.
        low: Lower end of the bootstrap interval over seeds; None for n < 2.
        high: Upper end.
        p: Exact two-sided p of the sign-flip test.
        smallest_p: The smallest that so few pairs can give, 2 / 2^n.
    """

    gain: Measured
    low: float | None
    high: float | None
    p: float
    smallest_p: float


def paired(differences: Sequence[float]) -> Paired | None:
    """Compare; None without a pair.

    Args:
        differences: One per seed, finite.

    Raises:
        RunComparisonError: More pairs than can be enumerated.
    """
    gain = measured(sorted(differences))
    if gain is None:
        return None
    low, high = seed_interval(differences) or (None, None)
    return Paired(gain, low, high, sign_flip_p(differences), min(1.0, 2.0 ** (1 - gain.n)))


def sign_flip_p(differences: Sequence[float]) -> float:
    """Exact two-sided p under the hypothesis that each difference is as likely as its negative (Fisher, 1935).

    Args:
        differences: One per pair.

    Returns:
        The share of the 2^n sign patterns whose sum is at least as far from 0 as the one seen.

    Raises:
        RunComparisonError: More pairs than can be enumerated.
    """
    if len(differences) > MOST_PAIRS:
        raise RunComparisonError(
            f"the exact test counts 2^n sign patterns for up to {MOST_PAIRS} pairs of seeds, got {len(differences)}. "
            "Name fewer runs"
        )
    sums = np.zeros(1)
    for difference in sorted(abs(value) for value in differences):
        sums = np.concatenate([sums + difference, sums - difference])
    scale = math.fsum(abs(value) for value in differences)
    # Sums of the same numbers in another order differ by rounding.
    return float(np.mean(np.abs(sums) >= abs(math.fsum(differences)) - 1e-9 * scale))


def seed_interval(differences: Sequence[float]) -> Interval | None:
    """Percentile interval of the mean over resampled seeds (Efron, 1979); None for n < 2.

    Args:
        differences: One per seed.
    """
    values = np.sort(np.asarray(differences, dtype=np.float64))
    if len(values) < 2:
        return None
    counts = np.random.default_rng(_SEED).multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS)
    return _interval((counts * values).sum(axis=1) / len(values))


def crossed_interval(differences: np.ndarray) -> Interval | None:
    """Interval of the mean over resampled seeds and resampled problems.

    All seeds answer the same problems, so that a problem drawn twice counts twice in every seed (a crossed bootstrap;
    Owen, 2007). Problems drawn anew in each seed would understate how much the choice of problems matters.

    Args:
        differences: ``[seeds, problems]``, of problem means; with one seed, problems alone are resampled.

    Returns:
        Lower and upper end; None for fewer than two problems.
    """
    seeds, problems = differences.shape
    if problems < 2:
        return None
    # By value, so that neither labels of seeds nor the order of problems matter.
    ordered = differences[np.argsort([math.fsum(row) for row in differences], kind="stable")]
    ordered = ordered[:, np.lexsort(ordered[::-1])]
    generator, means = np.random.default_rng(_SEED), []
    for _ in range(DRAWS // _CHUNK):
        drawn_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), _CHUNK)
        drawn = generator.multinomial(problems, np.full(problems, 1 / problems), _CHUNK)
        means.append(((drawn_seeds @ ordered) * drawn).sum(axis=1) / (seeds * problems))
    return _interval(np.concatenate(means))


def _interval(means: np.ndarray) -> Interval:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Rank correlation, equal values sharing their mean rank (Spearman, 1904).

    Args:
        x: One value per run.
        y: As many.

    Returns:
        rho; None for fewer than three runs or where one side does not vary.
    """
    # Means of the same numbers in another order differ by rounding, and would lose their tie.
    x, y = ([float(f"{value:.9g}") for value in values] for values in (x, y))
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(np.corrcoef(_ranks(x), _ranks(y))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, inverse, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]

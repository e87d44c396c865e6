"""Confidence intervals by resampling whole responses: tokens of one response are not independent."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

DRAWS = 1000
"""Resamples behind an interval."""

LEVEL = 0.95
"""Coverage of the intervals."""

LEAST_GROUPS = 10
"""Responses below which there is no interval: resamples of a few say less than they seem to."""

_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A number with its confidence interval.

    Attributes:
        value: Of the pooled sums.
        low: Lower end; NaN where fewer than ``LEAST_GROUPS`` responses were seen.
        high: Upper end.
    """

    value: float
    low: float = math.nan
    high: float = math.nan

    def __format__(self, spec: str) -> str:
        """The value, and the interval if there is one."""
        value = format(self.value, spec)
        return value if math.isnan(self.low) else f"{value} ({format(self.low, spec)} - {format(self.high, spec)})"


Totals = Mapping[str, np.ndarray]
"""Totals by name, ``[draws]`` each; the first draw is the study itself."""


class Bootstrap:
    """Totals of a study and of ``DRAWS`` resamples of its responses (Efron, 1979, percentile intervals)."""

    def __init__(self, names: list[str], sums: np.ndarray) -> None:
        """Resample.

        Args:
            names: Names of M sums.
            sums: float64 ``[groups, M]``; groups without a response are all zero and take no part.
        """
        used = sums[np.abs(sums).sum(axis=1) > 0]
        self._intervals = len(used) >= LEAST_GROUPS
        weights = np.ones((1, len(used)))
        if self._intervals:
            draws = np.random.default_rng(_SEED).multinomial(len(used), np.full(len(used), 1 / len(used)), DRAWS)
            weights = np.vstack([weights, draws])
        self._totals = dict(zip(names, (weights @ used).T, strict=True))
        # The study's own totals by plain summation, whose result does not depend on the library behind ``@``.
        for name, exact in zip(names, used.sum(axis=0), strict=True):
            self._totals[name][0] = exact

    def __contains__(self, name: str) -> bool:
        """Whether there is such a sum."""
        return name in self._totals

    def total(self, name: str) -> float:
        """The study's own total; 0 if it has none such."""
        return float(self._totals[name][0]) if name in self._totals else 0.0

    def estimate(self, formula: Callable[[Totals], np.ndarray]) -> Estimate:
        """Any function of totals, with its interval.

        Args:
            formula: From totals ``[draws]`` to values ``[draws]``.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            values = formula(self._totals)
        if not self._intervals or not np.isfinite(values[1:]).all():
            return Estimate(float(values[0]))
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(values[1:], [tail, 1 - tail])
        return Estimate(float(values[0]), float(low), float(high))

    def ratio(self, numerator: str, denominator: str) -> Estimate:
        """Ratio of two totals."""
        return self.estimate(lambda totals: totals[numerator] / totals[denominator])

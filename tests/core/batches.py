"""Batches of acceptance tests and of mismatches for the tests of statistics and metrics."""

import dataclasses

import numpy as np
import torch

from verl_sis.core.statistics import PooledStatistics, acceptance_statistics, mismatch_statistics

Columns = dict[str, torch.Tensor]


def random_acceptance(rows: int, width: int, seed: int) -> Columns:
    """Random arguments of ``acceptance_statistics``: ragged mask, all values finite."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, width, generator=generator)

    log_ratio = 0.5 * torch.randn(rows, width, generator=generator)
    return {
        "mask": uniform() < 0.7,
        "accepted": uniform() < 0.8,
        "contains_sampled": uniform() < 0.9,
        "log_ratio": log_ratio,
        "log_expected": -uniform(),
        "normalized": uniform() < 0.6,
        "log_envelope": log_ratio.clamp(min=0) + uniform(),
        "residual_mass": uniform().pow(4),
        "stored_gap": uniform() * 1e-3,
        "sample_key": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
    }


def random_mismatch(rows: int, width: int, seed: int) -> Columns:
    """Random arguments of ``mismatch_statistics``."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator).mul(3).exp() + 1
    noise = 0.3 * torch.randn(rows, width, generator=generator)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    return {"mask": mask, "old_log_prob": old, "rollout_log_prob": old + noise}


def rows_of(columns: Columns, rows: list[int]) -> Columns:
    """The given rows."""
    return {name: column[rows] for name, column in columns.items()}


def pool(acceptance: Columns, mismatch: Columns | None = None) -> PooledStatistics:
    """Statistics of one batch, as the loss collects them."""
    pooled = acceptance_statistics(**acceptance)
    if mismatch is not None:
        pooled.merge(mismatch_statistics(**mismatch))
    return pooled


def assert_same(left: PooledStatistics, right: PooledStatistics, *, rounding: float) -> None:
    """Counts, maxima and histograms are equal; sums within a relative float64 rounding."""
    assert left.maxima == right.maxima
    for name, counts in left.histograms.items():
        assert np.array_equal(counts, right.histograms[name]), name
    for name, value in left.sums.items():
        exact = value.is_integer() and right.sums[name].is_integer()
        tolerance = 0.0 if exact else rounding * max(abs(value), 1.0)
        assert abs(value - right.sums[name]) <= tolerance, (name, value, right.sums[name])
    moments, expected = (dataclasses.astuple(side.probabilities) for side in (left, right))
    np.testing.assert_allclose(moments, expected, rtol=rounding * 100, atol=rounding * 100)
    np.testing.assert_allclose(left.kappa_groups, right.kappa_groups, rtol=0, atol=rounding * 100)

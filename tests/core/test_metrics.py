"""Every metric on a batch small enough for a pencil, quantiles, names, and batches that leave nothing to report."""

import math

import numpy as np
import pytest
import torch

from verl_sis.core.metrics import histogram_quantile, mismatch_metrics, sis_metrics
from verl_sis.core.statistics import HISTOGRAM_EDGES, PooledStatistics

from .batches import pool, random_acceptance, random_mismatch

LOG2 = math.log(2.0)
BIN = HISTOGRAM_EDGES[1] / HISTOGRAM_EDGES[0]


def acceptance_columns(**columns):
    """Two responses of three tokens; the last of the second bears no loss, the first of the first is not normalised.

    row 0: w = 1/2, 2, 1    z = 0, 1, 1    M^ = 1, 2, 2    xi = 0, 0.1, 0.2    y in V_K: yes, yes, yes
    row 1: w = 4, 1/4       z = 0, 1       M^ = 4, 1       xi = 0.4, 0         y in V_K: no, yes
    """
    return {
        "mask": torch.tensor([[True] * 3, [True, True, False]]),
        "accepted": torch.tensor([[False, True, True], [False, True, True]]),
        "contains_sampled": torch.tensor([[True] * 3, [False, True, True]]),
        "log_ratio": torch.tensor([[-LOG2, LOG2, 0.0], [2 * LOG2, -2 * LOG2, 50.0]]),
        "log_expected": torch.tensor([[1.0, 0.45, 0.4], [0.15, 1.0, 0.01]]).log(),
        "normalized": torch.tensor([[False, True, True], [True] * 3]),
        "log_envelope": torch.tensor([[1.0, 2.0, 2.0], [4.0, 1.0, 9.0]]).log(),
        "residual_mass": torch.tensor([[0.0, 0.1, 0.2], [0.4, 0.0, 0.9]]),
        "stored_gap": torch.zeros(2, 3),
        "sample_key": torch.tensor([5, 6]),
        **columns,
    }


def mismatch_columns():
    """Three tokens with log pi_old - log pi_rollout = log 1.5, 0, -log 4; a fourth bears no loss."""
    return {
        "mask": torch.tensor([[True, True], [True, False]]),
        "old_log_prob": torch.tensor([[0.375, 0.25], [0.125, 0.9]]).log(),
        "rollout_log_prob": torch.tensor([[0.25, 0.25], [0.5, 0.01]]).log(),
    }


def test_every_acceptance_metric_of_five_tokens():
    # (1 - xi) / M^ = 1, 0.45, 0.4 | 0.15, 1: sum 3. z sums to 3, so kappa = 1 exactly.
    # Surplus: row 0: 2 - 1.85 = 0.15, row 1: 1 - 1.15 = -0.15; kappa_se = sqrt(0.15^2 + 0.15^2) / 3.
    # sum w = 0.5 + 2 + 1 + 4 + 0.25 = 7.75, sum w^2 = 0.25 + 4 + 1 + 16 + 0.0625 = 21.3125.
    # w~ = 0.5, 1, 1, 4, 1: sum 7.5, squares 0.25 + 1 + 1 + 16 + 1 = 19.25.
    metrics = sis_metrics(pool(acceptance_columns()))
    p95 = metrics.pop("sis/residual_mass/p95")
    assert 0.4 <= p95 <= 0.4 * BIN * (1 + 1e-6)  # ceil(0.95 * 4) = 4th of 0, 0.1, 0.2, 0.4
    assert metrics == pytest.approx(
        {
            "sis/active": 1.0,
            "sis/tokens": 5.0,
            "sis/non_finite": 0.0,
            "sis/accept_rate": 3 / 5,
            "sis/accept_rate_expected": 3 / 5,
            "sis/kappa": 1.0,
            "sis/kappa_se": math.sqrt(2) * 0.15 / 3,
            "sis/in_topk_rate": 4 / 5,
            "sis/residual_mass/tokens": 4.0,
            "sis/residual_mass/mean": 0.7 / 4,
            "sis/residual_mass/max": 0.4,
            "sis/envelope/mean": 9 / 4,
            "sis/envelope/max": 4.0,
            "sis/log_ratio_abs": 6 * LOG2 / 5,
            "sis/D": 6 * LOG2 / 2,  # (1 + 1 + 0) + (2 + 2), over two responses
            "sis/D_sis": 3 * LOG2 / 2,  # rejected: |log 1/2| and |log 4|
            "sis/ess/before": 7.75**2 / (5 * 21.3125),
            "sis/ess/after": 7.5**2 / (5 * 19.25),
        },
        rel=1e-6,
    )


def test_kappa_differs_from_1_when_acceptance_does_not_match_its_expectation():
    # One more token of the five accepted: 4 against 3 expected.
    accepted = torch.tensor([[True, True, True], [False, True, True]])
    metrics = sis_metrics(pool(acceptance_columns(accepted=accepted)))
    assert metrics["sis/kappa"] == pytest.approx(4 / 3, rel=1e-6)
    # Surplus 1.15 and -0.15.
    assert metrics["sis/kappa_se"] == pytest.approx(math.sqrt(1.15**2 + 0.15**2) / 3, rel=1e-6)


def test_every_mismatch_metric_of_three_tokens():
    # k1 = mean(-d) = (-log 1.5 + log 4) / 3. k3 = ((1.5 - 1 - log 1.5) + 0 + (1/4 - 1 + log 4)) / 3.
    # Ratios 3/2, 1 and 1/4: two leave [1/1.05, 1.05], one leaves [1/2, 2], none leaves [1/5, 5].
    # Pearson of (1/4, 1/4, 1/2) and (3/8, 1/4, 1/8), deviations (-1, -1, 2) / 12 and (1, 0, -1) / 8:
    # (-1 + 0 - 2) / sqrt(6 * 2) = -3 / sqrt(12).
    metrics = mismatch_metrics(pool(random_acceptance(0, 1, 0), mismatch_columns()))
    p99 = metrics.pop("mismatch/abs_log_ratio/p99")
    assert 2 * LOG2 <= p99 <= 2 * LOG2 * BIN * (1 + 1e-6)
    assert metrics == pytest.approx(
        {
            "mismatch/tokens": 3.0,
            "mismatch/non_finite": 0.0,
            "mismatch/k1": math.log(4 / 1.5) / 3,
            "mismatch/k3": (-0.25 + math.log(4 / 1.5)) / 3,
            "mismatch/abs_log_ratio/mean": math.log(6) / 3,
            "mismatch/abs_log_ratio/max": 2 * LOG2,
            "mismatch/F_tau1.05": 2 / 3,
            "mismatch/F_tau2": 1 / 3,
            "mismatch/F_tau5": 0.0,
            "mismatch/pearson": -3 / math.sqrt(12),
        },
        rel=1e-6,
    )


def test_another_prefix_names_another_comparison():
    pooled = pool(random_acceptance(0, 1, 0), mismatch_columns())
    renamed = mismatch_metrics(pooled, prefix="mismatch/native")
    assert renamed == {name.replace("mismatch/", "mismatch/native/"): v for name, v in mismatch_metrics(pooled).items()}


def test_no_token_gives_zero_counts_and_undefined_rates():
    metrics = sis_metrics(PooledStatistics()) | mismatch_metrics(PooledStatistics())
    counts = {name: value for name, value in metrics.items() if not math.isnan(value)}
    assert counts == {
        "sis/active": 1.0,
        "sis/tokens": 0.0,
        "sis/non_finite": 0.0,
        "sis/residual_mass/tokens": 0.0,
        "mismatch/tokens": 0.0,
        "mismatch/non_finite": 0.0,
    }


def test_names_are_reduced_by_verl_as_they_are_meant():
    # verl and its v1 aggregator look for these substrings anywhere in a name.
    names = [*sis_metrics(PooledStatistics()), *mismatch_metrics(PooledStatistics())]
    assert len(names) == len(set(names))
    for name in names:
        parts = [part for part in ("min", "max", "sum", "total") if part in name]
        assert parts == (["max"] if name.endswith("/max") else []), name


@pytest.mark.parametrize("quantile", [0.05, 0.5, 0.95, 0.99])
@pytest.mark.parametrize("seed", range(4))
def test_quantile_lies_within_one_bin_above_numpys(seed, quantile):
    values = np.random.default_rng(seed).lognormal(-4, 3, 5000).clip(2e-9, 9.9)
    columns = random_mismatch(1, 5000, seed)
    columns["mask"] = torch.ones(1, 5000, dtype=torch.bool)
    columns["old_log_prob"] = torch.zeros(1, 5000, dtype=torch.float64)
    columns["rollout_log_prob"] = torch.from_numpy(values)[None]
    counts = pool(random_acceptance(0, 1, 0), columns).histograms["mismatch_abs"]
    exact = np.quantile(values, quantile, method="inverted_cdf")
    assert exact < histogram_quantile(counts, quantile) <= exact * BIN * (1 + 1e-12)


def test_a_value_on_an_edge_belongs_to_the_bin_above_it():
    # xi = 1 (all mass outside V_K) sits on the edge 10^0: its quantile is the next edge, never below 1.
    columns = acceptance_columns(residual_mass=torch.ones(2, 3))
    metrics = sis_metrics(pool(columns))
    assert metrics["sis/residual_mass/p95"] == pytest.approx(BIN, rel=1e-9)
    columns["residual_mass"] = torch.zeros(2, 3)
    assert sis_metrics(pool(columns))["sis/residual_mass/p95"] == 0.0


def test_quantile_beyond_the_edges():
    counts = np.zeros(len(HISTOGRAM_EDGES) + 1, dtype=np.int64)
    assert math.isnan(histogram_quantile(counts, 0.5))
    counts[0] = 99
    counts[-1] = 1
    assert histogram_quantile(counts, 0.99) == 0.0
    assert histogram_quantile(counts, 0.995) == math.inf


@pytest.mark.parametrize(
    ("log_ratio", "share"), [(300.0, 0.2), (356.0, math.nan), (700.0, math.nan), (800.0, math.nan)]
)
def test_a_huge_ratio_never_raises(log_ratio, share):
    # Five tokens, one of which carries all the weight: ESS = 1 / 5, or undefined once its square leaves float64.
    columns = acceptance_columns()
    columns["log_ratio"][0, 0] = log_ratio
    assert sis_metrics(pool(columns))["sis/ess/before"] == pytest.approx(share, nan_ok=True)


def pearson_of(old: np.ndarray, rollout: np.ndarray) -> float:
    columns = {
        "mask": torch.ones(1, len(old), dtype=torch.bool),
        "old_log_prob": torch.from_numpy(np.log(old))[None],
        "rollout_log_prob": torch.from_numpy(np.log(rollout))[None],
    }
    return mismatch_metrics(pool(random_acceptance(0, 1, 0), columns))["mismatch/pearson"]


@pytest.mark.parametrize("seed", range(3))
def test_pearson_equals_numpys(seed):
    rng = np.random.default_rng(seed)
    old = rng.uniform(0.01, 1.0, 4000)
    rollout = (old * rng.lognormal(0, 0.05, 4000)).clip(1e-6, 1.0)
    assert pearson_of(old, rollout) == pytest.approx(np.corrcoef(old, rollout)[0, 1], rel=1e-9)


def test_pearson_of_constant_probabilities_is_undefined():
    # Equal probabilities leave no variance: NaN, and never a number above 1.
    for count in (3, 7, 10, 100, 1000, 12345):
        assert math.isnan(pearson_of(np.full(count, np.exp(-1.2)), np.full(count, np.exp(-0.7)))), count


def test_pearson_of_a_collapsed_policy_equals_numpys():
    # Entropy near 0: all probabilities within 1e-7 of 1, rollout and trainer independent.
    rng = np.random.default_rng(0)
    old, rollout = (1 - 1e-7 * rng.uniform(0, 1, 5000) for _ in range(2))
    assert pearson_of(old, rollout) == pytest.approx(np.corrcoef(old, rollout)[0, 1], abs=1e-3)

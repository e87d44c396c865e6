"""Pooled statistics: against a float64 loop, over any split, with masked and non-finite tokens."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sis.core.metrics import mismatch_metrics, sis_metrics
from verl_sis.core.statistics import HISTOGRAM_EDGES, KAPPA_GROUPS, MISMATCH_TAUS, SUMS, PooledStatistics

from .batches import assert_same, pool, random_acceptance, random_mismatch, rows_of
from .steady import steady

INF, NAN = math.inf, math.nan
COUNTS = (
    "tokens",
    "normalized_tokens",
    "responses",
    "accepted",
    "in_top_k",
    "non_finite",
    "mismatch_tokens",
    "mismatch_non_finite",
)


def looped_acceptance(columns) -> dict[str, float]:
    """Sums of ``acceptance_statistics``, token by token in Python floats."""
    sums = dict.fromkeys(SUMS, 0.0)
    lists = {name: column.tolist() for name, column in columns.items()}
    for row, mask in enumerate(lists["mask"]):
        sums["responses"] += any(mask)
        for t in (t for t, bears_loss in enumerate(mask) if bears_loss):
            log_w, log_m, xi = (lists[name][row][t] for name in ("log_ratio", "log_envelope", "residual_mass"))
            known = lists["normalized"][row][t]
            z, w = lists["accepted"][row][t], math.exp(log_w)
            terms = {
                "tokens": 1,
                "accepted": z,
                "in_top_k": lists["contains_sampled"][row][t],
                "accept_expected": math.exp(lists["log_expected"][row][t]),
                "normalized_tokens": known,
                "residual_mass": xi if known else 0,
                "envelope": math.exp(log_m) if known else 0,
                "log_ratio_abs": abs(log_w),
                "log_ratio_abs_rejected": 0 if z else abs(log_w),
                "stored_gap": lists["stored_gap"][row][t],
                "ratio": w,
                "ratio_squared": w * w,
                "sis_ratio": 1 if z else w,
                "sis_ratio_squared": 1 if z else w * w,
            }
            for name, value in terms.items():
                sums[name] += value
    return sums


def looped_mismatch(columns) -> dict[str, float]:
    """Sums of ``mismatch_statistics``, token by token in Python floats."""
    sums = dict.fromkeys(SUMS, 0.0)
    for mask, old, rollout in zip(*(columns[name].flatten().tolist() for name in columns), strict=True):
        if not mask:
            continue
        d, p, q = old - rollout, math.exp(old), math.exp(rollout)
        terms = {
            "mismatch_tokens": 1,
            "mismatch_k1": -d,
            "mismatch_k3": math.exp(d) - 1 - d,
            "mismatch_abs": abs(d),
            **{f"mismatch_outside_{tau:g}": max(p / q, q / p) > tau for tau in MISMATCH_TAUS},
        }
        for name, value in terms.items():
            sums[name] += value
    return sums


@pytest.mark.parametrize("seed", range(5))
def test_sums_equal_a_float64_loop(seed):
    columns = random_acceptance(6, 11, seed)
    assert pool(columns).sums == pytest.approx(looped_acceptance(columns), rel=1e-12, abs=1e-12)
    columns = random_mismatch(6, 11, seed)
    pooled = pool(random_acceptance(0, 11, seed), columns)
    assert pooled.sums == pytest.approx(looped_mismatch(columns), rel=1e-9, abs=1e-9)


def test_groups_of_kappa_hold_the_surplus_of_their_sequences():
    columns = random_acceptance(5, 7, 0)
    # Keys 1 and 65 share group 1; -1 is group 63 (a remainder, not a negative index).
    columns["sample_key"] = torch.tensor([1, 65, -1, 0, 64 * 10**9])
    surplus = columns["accepted"].double() - columns["log_expected"].double().exp()
    per_row = torch.where(columns["mask"], surplus, 0.0).sum(dim=-1)
    expected = np.zeros(KAPPA_GROUPS)
    expected[1], expected[63], expected[0] = per_row[0] + per_row[1], per_row[2], per_row[3] + per_row[4]
    np.testing.assert_allclose(pool(columns).kappa_groups, expected, atol=1e-12)


@steady
@given(seed=st.integers(0, 10_000), parts=st.lists(st.integers(0, 3), min_size=9, max_size=9))
def test_merging_any_split_equals_the_whole(seed, parts):
    acceptance, mismatch = random_acceptance(9, 5, seed), random_mismatch(9, 5, seed)
    merged = PooledStatistics()
    for part in range(4):
        rows = [row for row, assigned in enumerate(parts) if assigned == part]
        merged.merge(pool(rows_of(acceptance, rows), rows_of(mismatch, rows)))
    whole = pool(acceptance, mismatch)
    assert_same(merged, whole, rounding=1e-14)
    assert {name: merged.sums[name] for name in COUNTS} == {name: whole.sums[name] for name in COUNTS}
    for report in (sis_metrics, mismatch_metrics):
        assert report(merged) == pytest.approx(report(whole), rel=1e-12, nan_ok=True)


def test_statistics_survive_the_exchange_between_processes():
    pooled = pool(random_acceptance(4, 6, 0), random_mismatch(4, 6, 0))
    assert_same(pickle.loads(pickle.dumps(pooled)), pooled, rounding=0.0)


@pytest.mark.parametrize("broken", [NAN, INF, -INF, -3.4e38])
def test_masked_tokens_never_matter(broken):
    acceptance, mismatch = random_acceptance(4, 6, 1), random_mismatch(4, 6, 1)
    clean = pool(acceptance, mismatch)
    for columns in (acceptance, mismatch):
        for name, column in columns.items():
            if column.is_floating_point():
                columns[name] = torch.where(columns["mask"], column, broken)
    acceptance["accepted"] = acceptance["accepted"] | ~acceptance["mask"]
    assert_same(pool(acceptance, mismatch), clean, rounding=0.0)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("column", ["log_ratio", "log_expected", "log_envelope", "residual_mass"])
def test_a_non_finite_token_is_counted_and_left_out(column, broken):
    columns = random_acceptance(3, 4, 2)
    columns["mask"], columns["normalized"] = torch.ones(2, 3, 4, dtype=torch.bool)
    without = {**columns, "mask": columns["mask"].clone()}
    without["mask"][1, 2] = False
    columns[column] = columns[column].clone()
    columns[column][1, 2] = broken
    pooled, expected = pool(columns), pool(without)
    assert pooled.sums["non_finite"] == 1.0
    expected.sums["non_finite"] = 1.0
    assert_same(pooled, expected, rounding=0.0)
    assert all(math.isfinite(value) for value in sis_metrics(pooled).values())


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_a_token_of_unknown_normaliser_counts_but_in_what_needs_it(broken):
    columns = random_acceptance(4, 6, 3)
    clean = pool(columns)
    for name in ("log_envelope", "residual_mass"):
        columns[name] = torch.where(columns["normalized"], columns[name], broken)
    assert_same(pool(columns), clean, rounding=0.0)
    assert 0 < clean.sums["normalized_tokens"] < clean.sums["tokens"]
    metrics, known = sis_metrics(clean), columns["mask"] & columns["normalized"]
    assert metrics["sis/residual_mass/mean"] == pytest.approx(columns["residual_mass"][known].double().mean().item())
    assert metrics["sis/envelope/mean"] == pytest.approx(columns["log_envelope"][known].double().exp().mean().item())
    assert metrics["sis/residual_mass/tokens"] == known.sum()


@pytest.mark.parametrize("broken", [NAN, INF, -INF, -3.4e38])
@pytest.mark.parametrize("column", ["old_log_prob", "rollout_log_prob"])
def test_a_non_finite_mismatch_is_counted_and_left_out(column, broken):
    columns = random_mismatch(3, 4, 2)
    columns["mask"] = torch.ones(3, 4, dtype=torch.bool)
    without = {**columns, "mask": columns["mask"].clone()}
    without["mask"][1, 2] = False
    columns[column] = columns[column].clone()
    columns[column][1, 2] = broken
    empty = random_acceptance(0, 4, 0)
    pooled, expected = pool(empty, columns), pool(empty, without)
    assert pooled.sums["mismatch_non_finite"] == 1.0
    expected.sums["mismatch_non_finite"] = 1.0
    assert_same(pooled, expected, rounding=0.0)


def test_the_ratio_of_a_filtered_token_is_counted_as_non_finite():
    columns = random_acceptance(3, 4, 2)
    columns["mask"] = torch.ones(3, 4, dtype=torch.bool)
    columns["log_ratio"][1, 2] = 1e30
    assert pool(columns).sums["non_finite"] == 1.0


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_a_batch_without_tokens_gives_zero_counts(shape):
    acceptance, mismatch = random_acceptance(*shape, seed=0), random_mismatch(*shape, seed=0)
    for columns in (acceptance, mismatch):
        columns["mask"] = torch.zeros(shape, dtype=torch.bool)
    pooled = pool(acceptance, mismatch)
    assert set(pooled.sums.values()) == {0.0}
    assert set(pooled.maxima.values()) == {-INF}
    assert all(counts.sum() == 0 and len(counts) == len(HISTOGRAM_EDGES) + 1 for counts in pooled.histograms.values())
    assert_same(pooled, PooledStatistics(), rounding=0.0)


def test_a_sequence_without_loss_tokens_is_no_response():
    columns = random_acceptance(3, 4, 0)
    columns["mask"] = torch.tensor([[True] * 4, [False] * 4, [False, False, True, False]])
    assert pool(columns).sums["responses"] == 2.0


def test_log_prob_gradients_are_not_kept():
    columns = random_acceptance(2, 3, 0)
    columns["log_ratio"].requires_grad_()
    assert all(isinstance(value, float) for value in pool(columns).sums.values())

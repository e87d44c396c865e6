"""Intervals of the bootstrap."""

import math

import numpy as np
import pytest

from verl_sis.study.bootstrap import Bootstrap


def test_the_value_is_that_of_the_study_itself():
    """Ten responses of one token, five of them hits: resamples are binomial, with 2 and 8 at 2.5 and 97.5 %."""
    sums = np.array([[1.0, 1.0]] * 5 + [[0.0, 1.0]] * 5 + [[0.0, 0.0]] * 3)
    estimate = Bootstrap(["hits", "tokens"], sums).ratio("hits", "tokens")
    assert estimate.value == 0.5
    assert (estimate.low, estimate.high) == (0.2, 0.8)


@pytest.mark.parametrize("responses", [1, 9])
def test_few_responses_have_no_interval(responses):
    estimate = Bootstrap(["a", "b"], np.array([[1.0, 2.0]] * responses)).ratio("a", "b")
    assert estimate.value == 0.5
    assert math.isnan(estimate.low)
    assert f"{estimate:.2f}" == "0.50"


def test_a_resample_without_a_denominator_gives_no_interval():
    sums = np.array([[1.0, 0.0]] * 9 + [[1.0, 2.0]])
    estimate = Bootstrap(["a", "b"], sums).ratio("a", "b")
    assert estimate.value == 5.0
    assert math.isnan(estimate.high)


def test_equal_responses_have_an_interval_of_no_width():
    estimate = Bootstrap(["a", "b"], np.tile([3.0, 4.0], (50, 1))).ratio("a", "b")
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((0.75, 0.75, 0.75))


def test_intervals_cover_the_truth_as_often_as_they_say():
    """Tokens of a response share a rate, so their number says nothing about the number of independent draws."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        lengths = rng.integers(5, 100, 80)
        hits = rng.binomial(lengths, rng.beta(2.0, 2.0, 80))
        estimate = Bootstrap(["hits", "tokens"], np.stack([hits, lengths], axis=1).astype(float)).ratio(
            "hits", "tokens"
        )
        covered += estimate.low <= 0.5 <= estimate.high
    # Binomial: 0.95 with a standard error of 0.015.
    assert 0.90 <= covered / 200 <= 0.99

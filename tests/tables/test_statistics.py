"""Means, tests and intervals of few seeds, by hand and against scipy."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sis.errors import RunComparisonError
from verl_sis.tables.statistics import (
    Measured,
    crossed_interval,
    measured,
    paired,
    seed_interval,
    sign_flip_p,
    spearman,
    standard_deviation,
)

NUMBERS = st.lists(st.integers(-50, 50).map(lambda value: value / 4), min_size=1, max_size=7)


def test_mean_and_error_by_hand():
    """Of 1, 2, 6: mean 3, squares 4 + 1 + 9 over 2, so sd = root of 7 and se = root of 7/3."""
    assert measured([1.0, 2.0, 6.0]) == Measured(3.0, pytest.approx(math.sqrt(7 / 3)), 3)
    assert standard_deviation([1.0, 2.0, 6.0]) == pytest.approx(math.sqrt(7))
    assert measured([5.0, 5.0]) == Measured(5.0, 0.0, 2)


def test_one_seed_has_no_error_and_none_no_mean():
    assert measured([2.5]) == Measured(2.5, None, 1)
    assert measured([]) is None
    assert paired([]) is None


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        # Of eight patterns only + + + and - - - reach 6.
        ([1.0, 2.0, 3.0], 2 / 8),
        # Sums of 3, 1, 1 with signs: 5, 3, 3, 1 and their negatives; six reach 3.
        ([3.0, -1.0, 1.0], 6 / 8),
        ([2.0], 1.0),
        ([0.0, 0.0], 1.0),
        # 0.1 + 0.2 is not 0.3 in floating point, and all patterns that tie must count.
        ([0.1, 0.2, -0.3], 1.0),
        ([1.0] * 6, 2 / 64),
    ],
)
def test_exact_p_by_hand(differences, p):
    assert sign_flip_p(differences) == p


@given(NUMBERS)
@settings(max_examples=50, deadline=None)
def test_exact_p_is_the_count_over_all_patterns(differences):
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in _patterns(len(differences))]
    expected = sum(abs(total) >= abs(sum(differences)) for total in sums) / len(sums)
    assert sign_flip_p(differences) == expected >= 2 ** (1 - len(differences))


def _patterns(n):
    return list(itertools.product((-1, 1), repeat=n))


def test_more_pairs_than_can_be_counted_are_refused():
    assert sign_flip_p([1.0] * 20) == 2**-19
    with pytest.raises(RunComparisonError, match="up to 20 pairs of seeds, got 21"):
        sign_flip_p([1.0] * 21)


def test_intervals_over_seeds_by_hand():
    """The mean of two draws from 0, 1 is 0 and 1 with probability 1/4 each.

    Of three from 0, 0, 3 it is 3 with probability 1/27 = 3.7 % > 2.5 %; of five with one 5, 5 has probability 1/3125,
    and the 97.5 % quantile is 3: at most two of five draws are the 5 in 94.2 % of cases, at most three in 99.3 %.
    """
    assert seed_interval([0.0, 1.0]) == (0.0, 1.0)
    assert seed_interval([0.0, 3.0, 0.0]) == (0.0, 3.0)
    assert seed_interval([5.0, 0.0, 0.0, 0.0, 0.0]) == (0.0, 3.0)
    assert seed_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert seed_interval([2.0]) is None


def test_a_comparison_says_what_so_few_pairs_can_show():
    result = paired([3.0, 2.0, 4.0])
    assert result is not None
    assert result.gain == Measured(3.0, pytest.approx(1 / math.sqrt(3)), 3)
    assert (result.p, result.smallest_p) == (0.25, 0.25)
    assert (result.low, result.high) == (2.0, 4.0)
    alone = paired([3.0])
    assert alone is not None
    assert (alone.p, alone.smallest_p, alone.low, alone.high) == (1.0, 1.0, None, None)


@given(NUMBERS, st.randoms())
@settings(max_examples=20, deadline=None)
def test_a_comparison_does_not_depend_on_the_order_of_seeds(differences, random):
    shuffled = random.sample(differences, len(differences))
    assert paired(shuffled) == paired(differences)


def test_problems_are_drawn_once_for_all_seeds():
    """Two seeds that agree are as one: were problems drawn anew in each, the mean would be 0 in 1/16 of cases only."""
    one = np.array([[0.0, 1.0]])
    assert crossed_interval(one) == (0.0, 1.0)
    assert crossed_interval(np.vstack([one, one])) == (0.0, 1.0)
    many = np.tile(one, (1, 50))
    low, high = crossed_interval(np.repeat(many, 5, axis=0)) or (0, 0)
    # 100 problems: standard error 0.5 / 10 = 0.05, times 1.96; were they drawn anew in five seeds, 0.022.
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.01)
    assert crossed_interval(np.array([[1.0], [2.0]])) is None


def test_seeds_are_drawn_too():
    """Problems that agree leave the seeds: means 0, 1/2, 1 as above."""
    assert crossed_interval(np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])) == (0.0, 1.0)


def test_rank_correlation_by_hand():
    """Ranks 1 2 3 and 1 3 2: 1 - 6 (0 + 1 + 1) / (3 * 8) = 0.5."""
    assert spearman([1.0, 20.0, 300.0], [0.1, 0.3, 0.2]) == pytest.approx(0.5)
    assert spearman([1.0, 2.0, 3.0], [9.0, 8.0, 7.0]) == pytest.approx(-1.0)
    assert spearman([1.0, 2.0], [1.0, 2.0]) is None
    assert spearman([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=8))
@settings(max_examples=50, deadline=None)
def test_rank_correlation_is_that_of_scipy(points):
    x, y = ([float(point[i]) for point in points] for i in (0, 1))
    found = spearman(x, y)
    if found is None:
        assert len(set(x)) == 1 or len(set(y)) == 1
    else:
        assert found == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)

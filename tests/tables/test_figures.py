"""What the figures show: standard errors of curves as bands, of single places as bars."""

import numpy
import pytest

from verl_sis.tables.curves import HELD_OUT, REWARD, Point
from verl_sis.tables.figures import plot


def point(method, metric, x, mean, se):
    return Point("tiny", "sums", 16, "off", method, metric, x, mean, se, 3, 0)


@pytest.fixture
def panels():
    """Training and held-out reward of two methods, the latter measured once; of the second with one seed."""
    points = [point(name, REWARD, x, 0.1 * x, 0.01) for name in ("GRPO", "GRPO + SIS (K=10)") for x in (1, 2)]
    points += [point("GRPO", HELD_OUT, 96, 0.34, 0.02), point("GRPO + SIS (K=10)", HELD_OUT, 96, 0.31, None)]
    return plot("figure2", points).axes


def test_curves_have_bands(panels):
    training, _ = panels
    assert [list(line.get_xdata()) for line in training.lines] == [[1, 2], [1, 2]]
    low, high = training.collections[0].get_datalim(training.transData).intervaly
    assert (low, high) == pytest.approx((0.09, 0.21))


def test_single_places_have_bars_beside_each_other(panels):
    _, held_out = panels
    assert [label.get_text() for label in held_out.get_xticklabels()] == ["96"]
    markers = [container.lines[0] for container in held_out.containers]
    assert [line.get_xydata().tolist() for line in markers] == [[[0.0, 0.34]], [[1.0, 0.31]]]
    assert [container.has_yerr for container in held_out.containers] == [True, False]
    (bar,) = held_out.containers[0].lines[2]
    numpy.testing.assert_allclose(bar.get_segments()[0], [[0.0, 0.32], [0.0, 0.36]])

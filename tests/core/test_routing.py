"""Counts of differing expert choices: by hand, against loops in float64, and merged over any split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sis.core.routing import (
    PROMPT,
    REGIONS,
    RESPONSE,
    RoutingObserver,
    RoutingStatistics,
    routing_metrics,
)


def observe(native, target, region, valid, experts, layers=None, count=True):
    """Statistics of ``[C, n, K]`` choices."""
    native, target = torch.as_tensor(native), torch.as_tensor(target)
    layers = tuple(range(len(native))) if layers is None else layers
    observer = RoutingObserver(
        layers, (experts, native.shape[-1]), torch.as_tensor(region), torch.as_tensor(valid), count=count
    )
    for column in range(len(native)):
        observer.observe(column, native[column], target[column])
    return observer.statistics(observer.packed())


def test_by_hand():
    """Two layers, four rows, K = 2 of E = 4. Row 0 is a prompt row, row 3 has no target.

    Layer 0: row 1 equal as a set, row 2 differs by one expert. Layer 1: row 1 differs by both, row 2 by one.
    """
    native = [[[0, 1], [0, 1], [0, 1], [0, 1]], [[2, 3], [0, 1], [0, 1], [0, 1]]]
    target = [[[0, 2], [1, 0], [0, 2], [2, 3]], [[2, 3], [2, 3], [1, 2], [2, 3]]]
    pooled = observe(
        native, target, [PROMPT, RESPONSE, RESPONSE, RESPONSE], [True, True, True, False], 4, layers=(5, 7)
    )
    pooled.sums.update(rows=4.0, native_rows=1.0, missing_rows=0.0, route_bytes=32.0)
    assert pooled.rows_by_region.tolist() == [1, 2]
    assert pooled.differs.tolist() == [[1, 0], [1, 2]]
    assert pooled.overlap.tolist() == [[1, 2], [3, 1]]
    assert pooled.native_counts[RESPONSE].tolist() == [[2, 2, 0, 0], [2, 2, 0, 0]]
    assert pooled.target_counts[RESPONSE].tolist() == [[2, 1, 1, 0], [0, 1, 2, 1]]
    values = routing_metrics(pooled)
    assert math.isnan(values.pop("routing/agreement"))  # two rows are too few to judge by
    assert values == {
        "routing/tokens": 2.0,
        "routing/disagreement": 3 / 4,
        "routing/tokens_any_difference": 1.0,
        "routing/layers_per_token": 1.5,
        "routing/fallback_fraction": 0.25,
        "routing/missing_tokens": 0.0,
        "routing/bytes_per_token": 8.0,
        "routing/disagreement_layer/5": 0.5,
        "routing/disagreement_layer/7": 1.0,
    }


def test_agreement_by_hand():
    """256 rows, K = 1 of E = 2, half of each expert on both sides; 3/4 of the rows agree.

    Chance is 1/2, so the agreement is (3/4 - 1/2) / (1 - 1/2) = 1/2.
    """
    native = torch.arange(256) % 2
    target = torch.where(torch.arange(256) // 2 % 4 == 0, 1 - native, native)
    pooled = observe(native[None, :, None], target[None, :, None], [RESPONSE] * 256, [True] * 256, 2)
    assert pooled.agreement()[RESPONSE].tolist() == [pytest.approx(0.5)]
    assert np.isnan(pooled.agreement()[PROMPT]).all()
    assert routing_metrics(pooled)["routing/agreement"] == pytest.approx(0.5)


def test_agreement_is_one_for_equal_and_about_zero_for_shifted_choices():
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(1, 2000, 8, generator=generator).topk(2).indices
    region, valid = [RESPONSE] * 2000, [True] * 2000
    assert observe(ids, ids, region, valid, 8).agreement()[RESPONSE] == pytest.approx(1.0)
    assert abs(observe(ids, ids.roll(1, 1), region, valid, 8).agreement()[RESPONSE].item()) < 0.05


def test_a_collapsed_router_is_not_judged():
    ids = torch.tensor([0, 1]).expand(1, 1000, 2)
    assert np.isnan(observe(ids, ids, [RESPONSE] * 1000, [True] * 1000, 8).agreement()).all()


choices = st.integers(0, 2**31 - 1).map(lambda seed: torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(choices, st.integers(1, 3), st.integers(1, 20), st.integers(1, 4))
def test_against_a_loop_and_any_split(generator, layers, rows, k):
    experts = 6
    native, target = (torch.rand(layers, rows, experts, generator=generator).topk(k).indices for _ in range(2))
    region = torch.randint(0, 2, (rows,), generator=generator)
    valid = torch.rand(rows, generator=generator) < 0.8
    whole = observe(native, target, region, valid, experts)
    cut = rows // 2
    split = RoutingStatistics()
    for part in (slice(0, cut), slice(cut, None)):
        if len(region[part]):
            split.merge(observe(native[:, part], target[:, part], region[part], valid[part], experts))
    assert_equal(whole, split)

    any_difference = 0
    for row in range(rows):
        differing = 0
        for layer in range(layers):
            differing += set(native[layer, row].tolist()) != set(target[layer, row].tolist())
        any_difference += bool(valid[row]) and region[row] == RESPONSE and differing > 0
    assert whole.sums["tokens_any_difference"] == any_difference
    for r in range(len(REGIONS)):
        used = [row for row in range(rows) if valid[row] and region[row] == r]
        assert whole.rows_by_region[r] == len(used)
        for layer in range(layers):
            common = [len(set(native[layer, row].tolist()) & set(target[layer, row].tolist())) for row in used]
            assert whole.overlap[r, layer] == sum(common)
            assert whole.differs[r, layer] == sum(count < k for count in common)
            for expert in range(experts):
                assert whole.native_counts[r, layer, expert] == sum(expert in native[layer, row] for row in used)
                assert whole.target_counts[r, layer, expert] == sum(expert in target[layer, row] for row in used)


def assert_equal(first, second):
    assert first.layers == second.layers
    assert first.sums == second.sums
    for name in ("rows_by_region", "differs", "overlap", "native_counts", "target_counts"):
        assert np.array_equal(getattr(first, name), getattr(second, name)), name


def test_ranks_add_up():
    """The packed vectors of two ranks, summed, are the statistics of both together."""
    generator = torch.Generator().manual_seed(1)
    native, target = (torch.rand(2, 20, 6, generator=generator).topk(2).indices for _ in range(2))
    region, valid = torch.arange(20) % 2, torch.arange(20) % 3 > 0
    observers = []
    for part in (slice(0, 7), slice(7, 20)):
        observer = RoutingObserver((0, 1), (6, 2), region[part], valid[part], count=True)
        for column in range(2):
            observer.observe(column, native[column, part], target[column, part])
        observers.append(observer)
    total = observers[0].packed() + observers[1].packed()
    assert_equal(observers[0].statistics(total), observe(native, target, region, valid, 6))


def test_statistics_of_other_layers_do_not_merge():
    ids = torch.zeros(1, 1, 1, dtype=torch.int64)
    first = observe(ids, ids, [RESPONSE], [True], 2, layers=(0,))
    with pytest.raises(ValueError, match="cannot be merged"):
        first.merge(observe(ids, ids, [RESPONSE], [True], 2, layers=(1,)))


def test_nothing_counted_gives_nan_and_no_error():
    values = routing_metrics(RoutingStatistics())
    assert values.pop("routing/tokens") == values.pop("routing/missing_tokens") == 0.0
    assert all(math.isnan(value) for value in values.values())


def test_without_counting_there_is_no_agreement():
    ids = torch.rand(1, 500, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    pooled = observe(ids, ids, [RESPONSE] * 500, [True] * 500, 8, count=False)
    assert np.isnan(pooled.agreement()).all()
    assert pooled.overlap[RESPONSE].tolist() == [1000]

"""Counter uniforms: golden values, range, uniformity, independence along every counter, purity."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from verl_sis.core.acceptance import counter_uniforms, mix64

from ..reference import uniforms_by_hand

SIGNIFICANCE = 1e-3
COUNTERS = ("seed", "update", "sample_key", "position")


def draw(seed=0, update=0, sample_key=0, position=0) -> torch.Tensor:
    keys = torch.as_tensor(sample_key, dtype=torch.int64)
    return counter_uniforms(keys, torch.as_tensor(position, dtype=torch.int64), seed=seed, update=update)


def walk(counter: str, count: int, start: int = 0, **fixed: int) -> np.ndarray:
    """Uniforms along one counter, the others fixed."""
    steps = range(start, start + count)
    if counter in ("sample_key", "position"):
        return draw(**{**fixed, counter: torch.tensor(list(steps))}).double().numpy()
    return np.array([float(draw(**{**fixed, counter: step})) for step in steps])


@pytest.mark.parametrize(
    ("seed", "update", "sample_key", "position"),
    [
        (0, 0, 0, 0),
        (1, 0, 0, 0),
        (0, 1, 0, 0),
        (0, 0, 1, 0),
        (0, 0, 0, 1),
        (-1, 0, 0, 0),
        (42, 17, -1, 3071),
        (2**63 - 1, 10**6, 2**63 - 1, 10**5),
        (7, 3, -(2**63), 0),
        (123456789, 400, -6148914691236517206, 4095),
    ],
)
def test_equals_the_documented_construction_in_unbounded_integers(seed, update, sample_key, position):
    expected = uniforms_by_hand.uniform(seed, update, sample_key, position)
    assert float(draw(seed, update, sample_key, position)) == expected


def test_mix64_equals_unbounded_integers_and_its_published_value():
    inputs = [0, 1, -1, 2**63 - 1, -(2**63), *np.random.default_rng(0).integers(-(2**63), 2**63, 200).tolist()]
    outputs = mix64(torch.tensor(inputs)).tolist()
    assert [value % 2**64 for value in outputs] == [uniforms_by_hand.mix64(value % 2**64) for value in inputs]
    assert len(set(outputs)) == len(set(inputs))


def test_lies_in_the_half_open_unit_interval_on_a_grid_of_24_bits():
    u = draw(position=torch.arange(500_000))
    assert u.dtype == torch.float32
    assert float(u.min()) >= 0.0 and float(u.max()) < 1.0
    assert torch.equal((u.double() * 2**24).round() / 2**24, u.double())


@pytest.mark.parametrize("counter", COUNTERS)
def test_is_uniform_along_each_counter(counter):
    count = 1000 if counter in ("seed", "update") else 200_000
    u = walk(counter, count, seed=5, update=2, sample_key=99, position=1)
    assert stats.kstest(u, "uniform").pvalue > SIGNIFICANCE
    bins = np.bincount((u * 50).astype(int), minlength=50)
    assert stats.chisquare(bins).pvalue > SIGNIFICANCE


@pytest.mark.parametrize("counter", COUNTERS)
def test_neighbours_along_each_counter_are_independent(counter):
    count = 1000 if counter in ("seed", "update") else 100_000
    u = walk(counter, count, seed=11, update=1, sample_key=-5, position=7)
    pairs = np.histogram2d(u[:-1:2], u[1::2], bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > SIGNIFICANCE
    for lag in (1, 2, 16):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) < 4 / np.sqrt(count)


@pytest.mark.parametrize("counter", ["seed", "update", "sample_key"])
def test_whole_sequences_of_neighbouring_counters_are_independent(counter):
    # The streams over positions of neighbours: same seed family, one apart.
    position = torch.arange(50_000)
    first, second = (draw(**{counter: value}, position=position).double().numpy() for value in (3, 4))
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(len(first))
    pairs = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(pairs.ravel()).pvalue > SIGNIFICANCE
    for shift in (1, 2):
        assert abs(np.corrcoef(first[shift:], second[:-shift])[0, 1]) < 4 / np.sqrt(len(first))


def test_counters_do_not_trade_places():
    # (seed 1, update 2) is not (seed 2, update 1), and likewise for every other pair of counters.
    for left, right in itertools.combinations(COUNTERS, 2):
        assert float(draw(**{left: 1, right: 2})) != float(draw(**{left: 2, right: 1})), (left, right)


def test_negative_and_positive_keys_draw_different_numbers():
    keys = torch.cat([torch.arange(-5000, 0), torch.arange(1, 5001)])
    u = draw(sample_key=keys)
    # 10,000 draws of 24 bits: 3 coincidences are expected, 20 would be a pattern.
    assert len(u.unique()) > len(keys) - 20
    assert stats.kstest(u[:5000].double().numpy(), "uniform").pvalue > SIGNIFICANCE


def test_broadcasts_keys_over_positions():
    keys, position = torch.tensor([3, -8, 12]), torch.arange(5)
    table = draw(seed=1, update=4, sample_key=keys[:, None], position=position[None, :])
    assert table.shape == (3, 5)
    for (row, key), column in itertools.product(enumerate(keys.tolist()), range(5)):
        assert float(table[row, column]) == uniforms_by_hand.uniform(1, 4, key, column)


def test_is_the_same_for_any_batch_order_width_and_split():
    keys = torch.randint(-(2**62), 2**62, (16,), generator=torch.Generator().manual_seed(0))
    whole = draw(seed=2, update=9, sample_key=keys[:, None], position=torch.arange(40))
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(2, 9, keys[order][:, None], torch.arange(40)), whole[order])
    assert torch.equal(draw(2, 9, keys[5:9][:, None], torch.arange(25)), whole[5:9, :25])
    torch.manual_seed(0)
    torch.rand(3)
    assert torch.equal(draw(2, 9, keys[:, None], torch.arange(40)), whole)


def test_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    draw(position=torch.arange(10))
    assert torch.equal(torch.random.get_rng_state(), before)

"""``acceptance_by_k``: a case by hand, the reference at each K, and what must hold at all of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_sis.core.by_k import OUTSIDE, AcceptanceByK, acceptance_by_k, sampled_rank
from verl_sis.core.envelope import TopK
from verl_sis.errors import SisShapeError

from ..reference import sis_by_hand as reference
from ..reference.policies import logit_pair, probabilities, run_core
from .steady import steady

INF, NAN = math.inf, math.nan


def by_k(ks: tuple[int, ...], tested, new: torch.Tensor, sampled: torch.Tensor) -> AcceptanceByK:
    """The test at each K, from the old policy's top-K and the current logits."""
    log_prob = torch.log_softmax(new.float(), dim=-1)
    at_top_k = log_prob.gather(1, tested.top_k.ids.long())
    of_sampled = log_prob.gather(1, sampled[:, None]).squeeze(1)
    return acceptance_by_k(ks, tested.top_k, sampled_rank(tested.top_k, sampled), at_top_k, of_sampled)


def hand_made(log_prob: list[float], sampled: int) -> TopK:
    """Top-K over the ids 0, 1, 2, ... of one token."""
    rows = torch.tensor([log_prob])
    ids = torch.arange(len(log_prob), dtype=torch.int32)[None]
    inside = sampled < len(log_prob)
    return TopK(ids, rows, rows[:, sampled] if inside else torch.tensor([-3.0]), torch.tensor([inside]))


def test_a_case_by_hand():
    # pi_old = (1/2, 1/4, 1/8, ...), pi = (1/4, 1/4, 1/2, ...), so w = (1/2, 1, 4). With y = 1:
    #   K = 1: V = {0}, M^ = 1/2, xi = 3/4; y is outside, a = 0
    #   K = 2: V = {0, 1}, M^ = 1, xi = 1/2; a = 1 / 1
    #   K = 3: V = {0, 1, 2}, M^ = 4, xi = 0; a = 1 / 4
    log = math.log
    top_k = hand_made([log(1 / 2), log(1 / 4), log(1 / 8)], sampled=1)
    rank = sampled_rank(top_k, torch.tensor([1]))
    current = torch.tensor([[log(1 / 4), log(1 / 4), log(1 / 2)]])
    tested = acceptance_by_k((1, 2, 3), top_k, rank, current, current[:, 1])
    assert rank.tolist() == [1]
    assert tested.log_envelope.exp().tolist()[0] == pytest.approx([1 / 2, 1, 4], rel=1e-6)
    assert tested.residual_mass.tolist()[0] == pytest.approx([3 / 4, 1 / 2, 0], abs=1e-6)
    assert tested.acceptance.tolist()[0] == pytest.approx([0, 1, 1 / 4], rel=1e-6)


def test_every_k_equals_the_reference():
    old, new = logit_pair(40, 30, drift=0.7, seed=0)
    sampled, ks = torch.arange(40) % 30, (1, 2, 7, 29, 30)
    tested = by_k(ks, run_core(old, new, sampled, 30), new, sampled)
    pi_old, pi = probabilities(old).tolist(), probabilities(new).tolist()
    for row, y in enumerate(sampled.tolist()):
        for column, k in enumerate(ks):
            ids = reference.top_k_ids(pi_old[row], k)
            envelope = reference.top_k_envelope(pi[row], pi_old[row], ids)
            assert float(tested.log_envelope[row, column]) == pytest.approx(math.log(envelope), abs=3e-6)
            residual = reference.residual_mass(pi[row], ids)
            assert float(tested.residual_mass[row, column]) == pytest.approx(residual, abs=1e-6)
            expected = reference.acceptance_probability(y, pi[row], pi_old[row], ids)
            assert float(tested.acceptance[row, column]) == pytest.approx(expected, abs=3e-6)


@settings(steady, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    ks=st.sets(st.integers(1, 24), min_size=1).map(sorted).map(tuple),
    drift=st.sampled_from([0.0, 1e-4, 0.01, 1.0, 20.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_holds_between_the_ks(seed, ks, drift, dtype):
    old, new = (x.to(dtype) for x in logit_pair(16, 40, drift=drift, seed=seed))
    sampled = torch.arange(16) * 2
    core = run_core(old, new, sampled, ks[-1])
    tested = by_k(ks, core, new, sampled)
    assert bool((tested.log_envelope.diff(dim=1) >= 0).all()), "a larger set has a larger maximum"
    assert bool((tested.residual_mass.diff(dim=1) <= 0).all()), "and leaves less outside"
    assert bool(((tested.residual_mass >= 0) & (tested.residual_mass <= 1)).all())
    assert bool(((tested.acceptance >= 0) & (tested.acceptance <= 1)).all())
    rank = sampled_rank(core.top_k, sampled)
    inside = (rank[:, None] >= 0) & (rank[:, None] < torch.tensor(ks))
    assert bool((tested.acceptance[~inside] == 0).all())
    # Once inside, more entries can only raise the envelope.
    falls = tested.acceptance.diff(dim=1) <= 0
    assert bool(falls[inside[:, :-1]].all())
    # The last of them is what training tests with, out of unnormalised logits: of size 80, with an ulp of 8e-6.
    close = {"rtol": 0, "atol": 5e-5 if drift == 20.0 else 1e-5}
    torch.testing.assert_close(tested.log_envelope[:, -1], core.envelope.log_envelope, **close)
    torch.testing.assert_close(tested.residual_mass[:, -1], core.envelope.residual_mass, **close)
    torch.testing.assert_close(tested.acceptance[:, -1].double(), core.acceptance, **close)


@pytest.mark.parametrize("filtered", [-INF, -1e30, -3.4e38])
def test_filtered_entries_are_in_no_set(filtered):
    # pi_old = (1/2, filtered, 1/4), pi = (1/4, 1/2, 1/4): the second entry adds neither to M^ nor to the mass.
    log = math.log
    top_k = hand_made([log(1 / 2), filtered, log(1 / 4)], sampled=0)
    current = torch.tensor([[log(1 / 4), log(1 / 2), log(1 / 4)]])
    tested = acceptance_by_k((1, 2, 3), top_k, torch.tensor([0]), current, current[:, 0])
    assert tested.log_envelope.exp().tolist()[0] == pytest.approx([1 / 2, 1 / 2, 1], rel=1e-6)
    assert tested.residual_mass.tolist()[0] == pytest.approx([3 / 4, 3 / 4, 1 / 2], abs=1e-6)
    assert tested.acceptance.tolist()[0] == pytest.approx([1, 1, 1 / 2], rel=1e-6)
    # Filtered in the first place: no entry at all.
    alone = acceptance_by_k((1,), hand_made([filtered], 0), torch.tensor([OUTSIDE]), current[:, :1], current[:, 0])
    assert alone.log_envelope.tolist() == [[-INF]]
    assert alone.residual_mass.tolist() == [[1.0]]
    assert alone.acceptance.tolist() == [[0.0]]


def test_ranks_inside_outside_and_filtered():
    ids = torch.tensor([[5, 9, 2]], dtype=torch.int32).expand(4, -1)
    log_prob = torch.tensor([[-0.5, -1.0, -2.0]] * 3 + [[-0.5, -INF, -INF]])
    top_k = TopK(ids, log_prob, torch.zeros(4), torch.zeros(4, dtype=torch.bool))
    assert sampled_rank(top_k, torch.tensor([5, 2, 7, 9])).tolist() == [0, 2, OUTSIDE, OUTSIDE]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_broken_log_prob_never_accepts(value):
    top_k = hand_made([-0.5, -1.0], sampled=0)
    current = torch.tensor([[value, -1.0]])
    assert acceptance_by_k((1, 2), top_k, torch.tensor([0]), current, current[:, 0]).acceptance.tolist() == [[0, 0]]


def test_no_tokens_at_all():
    old, new = logit_pair(3, 12, drift=0.1, seed=0)
    tested = run_core(old[:0], new[:0], torch.arange(0), 5)
    assert by_k((1, 5), tested, new[:0], torch.arange(0)).acceptance.shape == (0, 2)


@pytest.mark.parametrize("ks", [(), (0, 1), (2, 1), (1, 1), (1, 4)])
def test_a_grid_that_does_not_fit_is_refused(ks):
    top_k = hand_made([-0.5, -1.0, -2.0], sampled=0)
    with pytest.raises(SisShapeError, match=r"expected increasing ks in \[1, 3\]"):
        acceptance_by_k(ks, top_k, torch.tensor([0]), top_k.log_prob, top_k.sampled_log_prob)

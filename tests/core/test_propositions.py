"""Propositions 1-3, E[z] and the bias identity: exactly, by enumerating the vocabulary with the core's numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ..reference import sis_by_hand as reference
from ..reference.policies import logit_pair, probabilities, run_core_on_vocabulary
from .steady import steady

VOCAB = 40
CASES = [(k, drift, seed) for k in (1, 3, 10, 39, VOCAB) for drift in (0.0, 0.1, 1.0) for seed in (0, 1)]
TOLERANCE = 2e-6
"""Float32 logits of size 10 carry errors of 1e-6 into a ratio."""


def setting(k: int, drift: float, seed: int):
    old, new = logit_pair(1, VOCAB, drift=drift, seed=seed)
    pi_old, pi = probabilities(old)[0], probabilities(new)[0]
    return pi, pi_old, reference.top_k_ids(pi_old.tolist(), k), run_core_on_vocabulary(old[0], new[0], k)


@pytest.mark.parametrize(("k", "drift", "seed"), CASES)
def test_every_term_equals_the_reference(k, drift, seed):
    pi, pi_old, ids, tested = setting(k, drift, seed)
    expected = [reference.acceptance_probability(y, pi.tolist(), pi_old.tolist(), ids) for y in range(VOCAB)]
    assert tested.acceptance.tolist() == pytest.approx(expected, abs=TOLERANCE)
    envelope = reference.top_k_envelope(pi.tolist(), pi_old.tolist(), ids)
    assert tested.envelope.log_envelope.double().exp().tolist() == pytest.approx([envelope] * VOCAB, rel=TOLERANCE)
    residual = reference.residual_mass(pi.tolist(), ids)
    assert tested.envelope.residual_mass.tolist() == pytest.approx([residual] * VOCAB, abs=TOLERANCE)
    assert [y for y in range(VOCAB) if tested.top_k.contains_sampled[y]] == sorted(ids)


@pytest.mark.parametrize(("k", "drift", "seed"), CASES)
def test_proposition_2_accepted_token_follows_pi_restricted_to_top_k(k, drift, seed):
    pi, pi_old, ids, tested = setting(k, drift, seed)
    joint = pi_old * tested.acceptance
    law = joint / joint.sum()
    restricted = torch.zeros(VOCAB, dtype=torch.float64)
    restricted[ids] = pi[ids] / pi[ids].sum()
    assert torch.allclose(law, restricted, rtol=0, atol=TOLERANCE)
    residual = float(tested.envelope.residual_mass[0])
    assert reference.total_variation(law.tolist(), pi.tolist()) == pytest.approx(residual, abs=TOLERANCE)


@pytest.mark.parametrize(("drift", "seed"), [(0.1, 0), (1.0, 1), (3.0, 2)])
def test_proposition_1_with_the_whole_vocabulary_accepted_token_follows_pi(drift, seed):
    pi, pi_old, _, tested = setting(VOCAB, drift, seed)
    joint = pi_old * tested.acceptance
    assert torch.allclose(joint / joint.sum(), pi, rtol=0, atol=TOLERANCE)
    exact = reference.exact_envelope(pi.tolist(), pi_old.tolist())
    assert float(tested.envelope.log_envelope[0].exp()) == pytest.approx(exact, rel=TOLERANCE)
    assert float(tested.envelope.residual_mass[0]) <= TOLERANCE


@pytest.mark.parametrize(("k", "drift", "seed"), CASES)
def test_mean_acceptance_is_one_minus_residual_over_envelope(k, drift, seed):
    _, pi_old, _, tested = setting(k, drift, seed)
    mean_z = float((pi_old * tested.acceptance).sum())
    predicted = (1.0 - tested.envelope.residual_mass[0].double()) / tested.envelope.log_envelope[0].double().exp()
    assert mean_z == pytest.approx(float(predicted), abs=TOLERANCE)
    assert mean_z == pytest.approx(float(tested.terms.log_expected_acceptance[0].exp()), abs=TOLERANCE)


@pytest.mark.parametrize(("drift", "seed"), [(0.1, 0), (1.0, 1)])
def test_bias_identity_of_the_sis_ratio(drift, seed):
    # E[w~ g] = E_pi[g] + (E_pi[g] - E_pi[w g]) / M, with w~'s expectation over z given y: a + (1 - a) w.
    pi, pi_old, _, tested = setting(VOCAB, drift, seed)
    g = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)
    w, a = pi / pi_old, tested.acceptance
    estimator = (pi_old * (a + (1 - a) * w) * g).sum()
    envelope = tested.envelope.log_envelope[0].double().exp()
    identity = (pi * g).sum() + ((pi * g).sum() - (pi * w * g).sum()) / envelope
    assert float(estimator) == pytest.approx(float(identity), abs=2e-5)
    # The bias is real: without it the estimator would be E_pi[g], and it is not.
    assert abs(float(estimator - (pi * g).sum())) > 1e-3


@steady
@given(seed=st.integers(0, 10_000), k=st.integers(1, VOCAB), drift=st.floats(0.0, 3.0), length=st.integers(1, 12))
def test_proposition_3_sis_never_increases_the_distance(seed, k, drift, length):
    pi, pi_old, _, tested = setting(k, drift, seed)
    generator = torch.Generator().manual_seed(seed)
    y = torch.multinomial(pi_old, length, replacement=True, generator=generator)
    z = torch.rand(length, generator=generator) < tested.acceptance[y]
    log_w = (pi / pi_old).log()[y]
    before = reference.theorem_1_distance(log_w.tolist())
    after = reference.sis_distance(log_w.tolist(), z.tolist())
    accepted_share = float(log_w.abs()[z].sum())
    assert after <= before
    assert before - after == pytest.approx(accepted_share, abs=1e-9)

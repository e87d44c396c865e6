"""Propositions 1 and 2 and E[z] by sampling: y ~ pi_old, z from the counter uniforms, chi-square against pi."""

import math

import pytest
import torch
from scipy import stats

from verl_sis.core.acceptance import accept, counter_uniforms

from ..reference import sis_by_hand as reference
from ..reference.policies import logit_pair, probabilities, run_core_on_vocabulary

VOCAB, DRAWS, SIGNIFICANCE = 24, 60_000, 1e-3
CASES = [(VOCAB, 0.5, 0), (VOCAB, 1.5, 1), (6, 0.5, 2), (3, 1.5, 3), (1, 0.5, 4)]


def sample(k: int, drift: float, seed: int):
    """Policies, V_K, the core's numbers, DRAWS tokens of pi_old and their z, as positions 0.. of 60 sequences."""
    old, new = logit_pair(1, VOCAB, drift=drift, seed=seed, spread=1.0)
    pi_old, pi = probabilities(old)[0], probabilities(new)[0]
    tested = run_core_on_vocabulary(old[0], new[0], k)
    y = torch.multinomial(pi_old, DRAWS, replacement=True, generator=torch.Generator().manual_seed(seed))
    position = torch.arange(DRAWS // 60)
    uniforms = counter_uniforms(torch.arange(60)[:, None], position[None, :], seed=seed, update=3).flatten()
    z = accept(tested.log_acceptance[y], uniforms)
    return pi, pi_old, reference.top_k_ids(pi_old.tolist(), k), tested, y, z


@pytest.mark.parametrize(("k", "drift", "seed"), CASES)
def test_accepted_tokens_follow_pi_restricted_to_top_k(k, drift, seed):
    pi, _, ids, _, y, z = sample(k, drift, seed)
    counts = torch.bincount(y[z], minlength=VOCAB)
    assert int(counts.sum()) == int(counts[ids].sum()), "a token outside V_K was accepted"
    if k > 1:
        expected = pi[ids] / pi[ids].sum() * int(z.sum())
        assert stats.chisquare(counts[ids].numpy(), expected.numpy()).pvalue > SIGNIFICANCE


@pytest.mark.parametrize(("k", "drift", "seed"), CASES)
def test_acceptance_rate_is_one_minus_residual_over_envelope(k, drift, seed):
    pi, pi_old, ids, _, _, z = sample(k, drift, seed)
    envelope = reference.top_k_envelope(pi.tolist(), pi_old.tolist(), ids)
    expected = (1.0 - reference.residual_mass(pi.tolist(), ids)) / envelope
    standard_error = math.sqrt(expected * (1 - expected) / DRAWS)
    assert abs(float(z.double().mean()) - expected) < 4 * standard_error + 1e-6


def test_rejected_and_all_tokens_do_not_follow_pi():
    # The chi-square above can fail: at this drift, all sampled tokens (pi_old) are far from pi.
    pi, _, _, _, y, _ = sample(VOCAB, 0.5, 0)
    counts = torch.bincount(y, minlength=VOCAB)
    assert stats.chisquare(counts.numpy(), (pi * DRAWS).numpy()).pvalue < 1e-12

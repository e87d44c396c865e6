"""``envelope_terms`` and ``normalize_envelope``: against the reference, with filtered and broken logits, no graph."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sis.core.acceptance import acceptance_log_prob
from verl_sis.core.envelope import TopK, envelope_terms, gather_logits, log_normalizer, normalize_envelope

from ..reference import sis_by_hand as reference
from ..reference.policies import logit_pair, probabilities, run_core
from .steady import steady

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "k"), [(30, 1), (30, 7), (30, 30), (700, 5)])
def test_terms_equal_the_reference(vocab_size, k, dtype):
    rows = 25
    old, new = (x.to(dtype) for x in logit_pair(rows, vocab_size, drift=0.7, seed=0))
    pi_old, pi = probabilities(old).tolist(), probabilities(new).tolist()
    tested = run_core(old, new, torch.arange(rows), k)
    for row in range(rows):
        # Ties of bfloat16 leave the choice of V_K open: take the core's.
        ids = tested.top_k.ids[row].tolist()
        envelope = reference.top_k_envelope(pi[row], pi_old[row], ids)
        assert float(tested.envelope.log_envelope[row]) == pytest.approx(math.log(envelope), abs=3e-6)
        residual = reference.residual_mass(pi[row], ids)
        assert float(tested.envelope.residual_mass[row]) == pytest.approx(residual, abs=1e-6)
        expected = reference.acceptance_probability(row, pi[row], pi_old[row], ids)
        assert float(tested.acceptance[row]) == pytest.approx(expected, abs=3e-6)


@steady
@given(
    seed=st.integers(0, 10_000),
    k=st.integers(1, 24),
    drift=st.sampled_from([0.0, 1e-4, 0.01, 1.0, 20.0]),
    spread=st.sampled_from([0.1, 2.0, 30.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_ratio_of_a_contained_token_never_exceeds_the_envelope(seed, k, drift, spread, dtype):
    old, new = (x.to(dtype) for x in logit_pair(24, 24, drift=drift, seed=seed, spread=spread))
    tested = run_core(old, new, torch.arange(24), k)
    log_ratio = tested.terms.sampled_logit - tested.top_k.sampled_log_prob
    inside = tested.top_k.contains_sampled
    assert bool((log_ratio[inside] <= tested.terms.log_envelope[inside]).all())
    if drift == 0.0:
        # On policy every ratio is 1 up to the rounding of x - log pi_old, at most an ulp of 30 * 5.
        assert bool((tested.log_acceptance[inside] > -1e-4).all())
    assert bool((tested.log_acceptance[~inside] == -INF).all())


def test_rows_pick_the_logits_that_predict_each_token():
    old, new = logit_pair(6, 20, drift=0.5, seed=1)
    rows, sampled = torch.tensor([4, 1, 1]), torch.tensor([3, 0, 19])
    tested = run_core(old[rows], new[rows], sampled, 5)
    picked = envelope_terms(new, tested.top_k, sampled, rows)
    for name in ("log_envelope", "log_mass", "sampled_logit"):
        assert torch.equal(getattr(picked, name), getattr(tested.terms, name)), name


@pytest.mark.parametrize("filtered", [-INF, -1e30, -3.4e38])
def test_filtered_entries_never_enter_the_envelope(filtered):
    # pi_old = (1/2, 1/4, filtered), x = log(1/4, 1/4, 1/2), Z = 0. With the third entry M^ would be infinite.
    # Without it M^ = max(1/2, 1) = 1, mass 1/2, and y = 0 has w = 1/2, a = 1/2.
    log = math.log
    top_k = TopK(
        ids=torch.tensor([[0, 1, 2]], dtype=torch.int32),
        log_prob=torch.tensor([[log(0.5), log(0.25), filtered]]),
        sampled_log_prob=torch.tensor([log(0.5)]),
        contains_sampled=torch.tensor([True]),
    )
    logits = torch.tensor([[log(0.25), log(0.25), log(0.5)]])
    terms = envelope_terms(logits, top_k, torch.tensor([0]))
    current = normalize_envelope(terms, log_normalizer(logits, chunk_tokens=1))
    assert float(current.log_envelope.exp()) == pytest.approx(1.0, rel=1e-6)
    assert float(current.residual_mass) == pytest.approx(0.5, abs=1e-6)
    a = acceptance_log_prob(terms.sampled_logit - top_k.sampled_log_prob, terms.log_envelope, top_k.contains_sampled)
    assert float(a.exp()) == pytest.approx(0.5, rel=1e-6)
    # E[z] = pi_old(0) a(0) + pi_old(1) a(1) = 1/2 * 1/2 + 1/4 * 1 = (1 - xi) / M^.
    assert float(terms.log_expected_acceptance.exp()) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("filtered", [-INF, -1e30, -3.4e38])
def test_logits_filtered_by_the_old_policy_leave_the_others_alone(filtered):
    # K = 3 of a row with two usable tokens: the third entry of V_K is a filtered one.
    old = torch.tensor([[1.0, 0.0, filtered, filtered]])
    new = torch.tensor([[0.5, 0.2, 3.0, 3.0]])
    three, two = (run_core(old, new, torch.tensor([0]), k) for k in (3, 2))
    assert torch.equal(three.terms.log_envelope, two.terms.log_envelope)
    assert torch.equal(three.log_acceptance, two.log_acceptance)
    assert torch.equal(three.envelope.residual_mass, two.envelope.residual_mass)


@pytest.mark.parametrize("filtered", [-INF, -1e30, -3.4e38])
def test_a_row_of_filtered_entries_only_accepts_nothing(filtered):
    top_k = TopK(
        ids=torch.tensor([[1, 2]], dtype=torch.int32),
        log_prob=torch.full((1, 2), filtered),
        sampled_log_prob=torch.tensor([-1.0]),
        contains_sampled=torch.tensor([True]),
    )
    terms = envelope_terms(torch.tensor([[0.0, 1.0, 2.0]]), top_k, torch.tensor([1]))
    assert float(terms.log_envelope) == -INF
    assert float(terms.log_mass) == -INF
    for rule in ("reject", "envelope"):
        a = acceptance_log_prob(torch.tensor([0.3]), terms.log_envelope, top_k.contains_sampled, outside_top_k=rule)
        assert float(a) == -INF


@pytest.mark.parametrize(
    "filtered",
    [-INF, -1e30, -3.4e38],
)
def test_a_sampled_token_that_the_old_policy_filtered_is_not_accepted(filtered):
    old = torch.tensor([[0.0, 1.0, filtered, 2.0]])
    tested = run_core(old, torch.tensor([[0.0, 1.0, 0.5, 2.0]]), torch.tensor([2]), 4)
    assert float(tested.log_acceptance) == -INF


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_broken_logit_of_the_sampled_token_never_accepts(value):
    old, new = logit_pair(2, 12, drift=0.1, seed=0)
    sampled = old.argmax(dim=-1)
    for broken in (old, new):
        pair = [x.clone() for x in (old, new)]
        pair[0 if broken is old else 1][0, sampled[0]] = value
        tested = run_core(*pair, sampled, 5)
        assert float(tested.log_acceptance[0]) == -INF
        assert float(tested.log_acceptance[1]) > -INF, "the other row is untouched"


@pytest.mark.parametrize("value", [NAN, INF])
def test_broken_logit_elsewhere_in_top_k_never_accepts(value):
    old, new = logit_pair(2, 12, drift=0.1, seed=0)
    first, second = old[0].topk(2).indices.tolist()
    new[0, second] = value
    tested = run_core(old, new, torch.tensor([first, int(old[1].argmax())]), 5)
    assert float(tested.log_acceptance[0]) == -INF
    assert not math.isfinite(float(tested.envelope.log_envelope[0]))


@pytest.mark.parametrize("value", [NAN, INF])
def test_broken_old_logit_anywhere_never_accepts(value):
    old, new = logit_pair(2, 12, drift=0.1, seed=0)
    sampled = old.argmax(dim=-1)
    old[0, int(old[0].argmin())] = value
    assert float(run_core(old, new, sampled, 5).log_acceptance[0]) == -INF


def test_broken_current_logit_outside_top_k_leaves_normalised_terms_not_a_number():
    # The test itself does not read that logit; the statistics see NaN and count the token as non-finite.
    old, new = logit_pair(1, 12, drift=0.1, seed=0)
    new[0, int(old[0].argmin())] = NAN
    tested = run_core(old, new, old.argmax(dim=-1), 5)
    assert math.isnan(float(tested.envelope.log_envelope)) and math.isnan(float(tested.envelope.residual_mass))


def test_nothing_keeps_an_autograd_graph():
    old, new = (x.requires_grad_() for x in logit_pair(4, 20, drift=0.5, seed=0))
    tested = run_core(old, new, torch.arange(4), 5)
    tensors = [*vars(tested.top_k).values(), *vars(tested.terms).values(), *vars(tested.envelope).values()]
    tensors += [tested.log_acceptance, gather_logits(new, torch.arange(4)), log_normalizer(new, chunk_tokens=2)]
    assert all(not tensor.requires_grad and tensor.grad_fn is None for tensor in tensors)


def test_envelope_entries_that_are_views_of_logits_would_keep_them_alive():
    _, new = logit_pair(4, 20, drift=0.5, seed=0)
    gathered = gather_logits(new, torch.arange(4))
    assert gathered.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_log_normalizer_equals_float64(chunk):
    logits, _ = logit_pair(10, 300, drift=0.0, seed=2)
    exact = torch.logsumexp(logits.double(), dim=-1)
    assert torch.allclose(log_normalizer(logits, chunk_tokens=chunk).double(), exact, rtol=0, atol=2e-6)
    assert log_normalizer(logits[:0], chunk_tokens=chunk).shape == (0,)


def test_residual_mass_is_floored_at_zero():
    # log_mass a rounding above Z: exp > 1, and a negative mass would be nonsense.
    terms = run_core(*logit_pair(1, 4, drift=0.0, seed=0), torch.tensor([0]), 4).terms
    assert float(normalize_envelope(terms, terms.log_mass - 1e-6).residual_mass) == 0.0

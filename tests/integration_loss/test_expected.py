"""``estimator: expected`` is the exact expectation over z: all 2^T masks enumerated, value and gradient."""

import itertools
import math

import pytest
import torch

from .calls import TOKEN_LOSSES, Batch, Outcome, call, call_under_sis, decided, micro_batch, random_batch


def acceptance_of(batch: Batch, seed: int) -> torch.Tensor:
    """Log-acceptance with one certain and one impossible token among random ones."""
    log_a = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed)).log()
    log_a[0, 0], log_a[0, 1] = 0.0, -torch.inf
    return log_a


def enumerate_masks(base: str, batch: Batch, log_a: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Expectation of value and gradient over z, in float64."""
    a = log_a.double().exp().flatten()
    value, gradient = 0.0, torch.zeros(batch.mask.shape, dtype=torch.float64)
    for bits in itertools.product((False, True), repeat=a.numel()):
        z = torch.tensor(bits)
        probability = float(torch.where(z, a, 1 - a).prod())
        if probability:
            found = call_under_sis(batch, micro_batch(base, decided(z.view(batch.mask.shape))))
            value += probability * float(found.value)
            gradient += probability * found.gradient.double()
    return value, gradient


def expected(base: str, batch: Batch, log_a: torch.Tensor) -> Outcome:
    return call_under_sis(batch, micro_batch(base, log_a, estimator="expected"))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("base", TOKEN_LOSSES)
def test_equals_the_enumeration_over_all_masks(base, mode, weighted):
    batch = random_batch(seed=1, loss_agg_mode=mode)
    if weighted:
        batch.weights = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(5)) * 2
    log_a = acceptance_of(batch, seed=2)
    value, gradient = enumerate_masks(base, batch, log_a)
    found = expected(base, batch, log_a)
    assert float(found.value) == pytest.approx(value, rel=2e-5, abs=1e-6)
    assert torch.allclose(found.gradient.double(), gradient, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("base", TOKEN_LOSSES)
def test_reduces_to_the_base_loss_if_nothing_can_be_accepted_and_to_ratio_1_if_all_is(base):
    batch = random_batch(seed=3)
    alone = call(base, batch)
    none = expected(base, batch, decided(torch.zeros(2, 3, dtype=torch.bool)))
    assert torch.allclose(none.value, alone.value) and torch.allclose(none.gradient, alone.gradient)
    every = torch.ones(2, 3, dtype=torch.bool)
    sampled = call_under_sis(batch, micro_batch(base, decided(every)))
    found = expected(base, batch, decided(every))
    assert torch.allclose(found.value, sampled.value) and torch.allclose(found.gradient, sampled.gradient)


def test_has_no_acceptance_noise():
    batch, log_a = random_batch(seed=4), torch.full((2, 3), math.log(0.5))
    outcomes = [
        call_under_sis(batch, micro_batch("vanilla", log_a, estimator=estimator, uniforms=torch.full((2, 3), u)))
        for estimator in ("expected", "sampled")
        for u in (0.4, 0.6)
    ]
    assert torch.equal(outcomes[0].gradient, outcomes[1].gradient)
    assert not torch.equal(outcomes[2].gradient, outcomes[3].gradient)


def test_one_token_by_hand():
    # w = 1.5, A = 1, clip at 1.2, a = 1/4: value -(1/4 * 1 + 3/4 * 1.2) = -1.15, gradient -1/4 (ratio w is clipped).
    batch = Batch(
        torch.tensor([[-1.0]]),
        torch.tensor([[-1.0 - math.log(1.5)]]),
        torch.ones(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
    )
    found = expected("vanilla", batch, torch.tensor([[math.log(0.25)]]))
    assert float(found.value) == pytest.approx(-1.15, rel=1e-5)
    assert float(found.gradient) == pytest.approx(-0.25, rel=1e-5)


def test_statistics_still_count_the_drawn_z():
    batch = random_batch(seed=4)
    batch.mask[:] = True
    uniforms = torch.tensor([[0.4, 0.6, 0.4], [0.6, 0.6, 0.6]])
    current = micro_batch("vanilla", torch.full((2, 3), math.log(0.5)), estimator="expected", uniforms=uniforms)
    call_under_sis(batch, current)
    assert current.statistics.sums["accepted"] == 2.0


@pytest.mark.parametrize(
    "base",
    [
        "vanilla",
        "cispo",
        "dro",
        "kl_cov",
    ],
)
def test_a_certain_acceptance_hides_a_ratio_beyond_float32(base):
    # w = e^100 = M^: a = 1, so the expectation is the loss at ratio 1, as it is with z drawn.
    batch = Batch(
        torch.tensor([[-1.0]]), torch.tensor([[-101.0]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    )
    certain = decided(torch.tensor([[True]]))
    sampled = call_under_sis(batch, micro_batch(base, certain))
    found = expected(base, batch, certain)
    assert torch.allclose(found.value, sampled.value) and torch.allclose(found.gradient, sampled.gradient)

"""Masked and non-finite slots: what verl's losses do alone, SIS must not make worse.

verl masks values with ``where`` after the arithmetic, so a masked NaN or infinity leaves the value but may reach the
gradient; its sequence aggregations and gspo multiply by the mask. SIS adds no arithmetic to a masked slot. The cases
are those of public bugs: prime-rl 2084, OpenRLHF 1240, NeMo-RL 4120, SkyRL 1633, verl 2377, 5860 and 6485.
"""

import math

import pytest
import torch

from verl_sis.core.metrics import mismatch_metrics, sis_metrics

from .calls import BASE_LOSSES, TOKEN_LOSSES, call, call_under_sis, decided, micro_batch, random_batch

INF, NAN = math.inf, math.nan
PER_TOKEN_COLUMNS = ("log_envelope", "residual_mass", "stored_log_prob")


def dirty_batch(broken: float, seed: int = 0, **settings):
    """A batch whose only masked slot has a broken old log-prob."""
    batch = random_batch(3, 4, seed, **settings)
    batch.old_log_prob[-1, -1] = broken
    return batch


def dirty_micro_batch(base: str, accepted: torch.Tensor, mask: torch.Tensor, broken: float, **columns):
    """Columns with garbage in the masked slots, as stale padding might leave there."""
    current = micro_batch(base, decided(accepted), **columns)
    for name in PER_TOKEN_COLUMNS:
        setattr(current, name, torch.where(mask, getattr(current, name), broken))
    current.uniforms = torch.where(mask, current.uniforms, NAN)
    return current


@pytest.mark.parametrize("broken", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize(
    ("estimator", "base"),
    [*(("sampled", base) for base in BASE_LOSSES), *(("expected", base) for base in TOKEN_LOSSES)],
)
def test_garbage_of_sis_in_masked_slots_changes_nothing(base, broken, estimator):
    batch = random_batch(3, 4)
    z = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    outcomes = []
    for value in (0.0, broken):
        torch.manual_seed(7)
        current = dirty_micro_batch(base, z, batch.mask, value, estimator=estimator)
        found = call_under_sis(batch, current)
        outcomes.append((found, sis_metrics(current.statistics)))
    (clean, clean_metrics), (dirty, dirty_metrics) = outcomes
    assert torch.equal(dirty.value, clean.value) and torch.equal(dirty.gradient, clean.gradient)
    assert bool(torch.isfinite(dirty.gradient).all())
    assert dirty_metrics == clean_metrics


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("broken", [NAN, INF, -INF, -100.0, 200.0])
@pytest.mark.parametrize("base", BASE_LOSSES)
def test_broken_old_log_prob_in_a_masked_slot_does_what_it_does_without_sis(base, broken, mode):
    # With all rejected, value and gradient agree with the base loss alone, NaN for NaN.
    batch = dirty_batch(broken, loss_agg_mode=mode)
    torch.manual_seed(7)
    alone = call(base, batch)
    torch.manual_seed(7)
    found = call_under_sis(batch, micro_batch(base, decided(torch.zeros(3, 4, dtype=torch.bool))))
    assert torch.allclose(found.value, alone.value, rtol=0, atol=0, equal_nan=True)
    assert torch.allclose(found.gradient, alone.gradient, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("base", BASE_LOSSES)
def test_broken_old_log_prob_of_an_accepted_masked_slot_is_gone(base, broken):
    # gspo with a masked -inf is NaN on its own; an accepted slot has log-ratio 0.
    z = torch.ones(3, 4, dtype=torch.bool)
    found = call_under_sis(dirty_batch(broken), micro_batch(base, decided(z)))
    assert bool(torch.isfinite(found.value)) and bool(torch.isfinite(found.gradient).all())


@pytest.mark.parametrize("base", TOKEN_LOSSES)
@pytest.mark.parametrize("broken", [NAN, INF, -INF, -100.0])
def test_expected_adds_no_broken_slot_to_those_of_the_base_loss(base, broken):
    batch = dirty_batch(broken)
    alone = call(base, batch)
    log_a = decided(torch.zeros(3, 4, dtype=torch.bool)) + 0.0
    log_a[0] = math.log(0.5)
    found = call_under_sis(batch, micro_batch(base, log_a, estimator="expected"))
    assert bool(torch.isfinite(found.value)) == bool(torch.isfinite(alone.value))
    assert torch.equal(torch.isfinite(found.gradient), torch.isfinite(alone.gradient))


def test_extreme_ratio_of_a_masked_token_has_no_gradient():
    # prime-rl 2084 and NeMo-RL 4120: log pi = -1 against -100, a ratio of e^99, masked.
    batch = random_batch(1, 2)
    batch.log_prob, batch.old_log_prob = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -100.0]])
    batch.mask = torch.tensor([[True, False]])
    for estimator in ("sampled", "expected"):
        current = micro_batch("vanilla", decided(torch.zeros(1, 2, dtype=torch.bool)), estimator=estimator)
        found = call_under_sis(batch, current)
        assert bool(torch.isfinite(found.value))
        assert float(found.gradient[0, 1]) == 0.0
        assert sis_metrics(current.statistics)["sis/log_ratio_abs"] == 0.0


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_broken_rollout_log_probs_are_counted_and_do_not_touch_the_loss(broken):
    batch = random_batch(3, 4)
    rollout = batch.old_log_prob + 0.01
    rollout[0, 0], rollout[-1, -1] = broken, broken
    z = torch.ones(3, 4, dtype=torch.bool)
    current = micro_batch("vanilla", decided(z), rollout_log_prob=rollout)
    found = call_under_sis(batch, current)
    without = call_under_sis(batch, micro_batch("vanilla", decided(z)))
    assert torch.equal(found.gradient, without.gradient)
    metrics = mismatch_metrics(current.statistics)
    # 11 tokens bear loss, one of them is broken; the masked one is not counted at all.
    assert (metrics["mismatch/tokens"], metrics["mismatch/non_finite"]) == (10.0, 1.0)
    assert metrics["mismatch/abs_log_ratio/mean"] == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("estimator", ["sampled", "expected"])
def test_a_micro_batch_without_loss_tokens_has_zero_gradient_and_the_same_metrics(estimator):
    # verl divides by the global token count, so the empty micro-batch must add exactly 0.
    batch = random_batch(2, 3)
    batch.config.global_batch_info.update(batch_num_tokens=11, dp_size=1)
    full = micro_batch("vanilla", decided(batch.mask), estimator=estimator)
    names = set(call_under_sis(batch, full).metrics)
    batch.mask = torch.zeros(2, 3, dtype=torch.bool)
    current = micro_batch("vanilla", decided(torch.ones(2, 3, dtype=torch.bool)), estimator=estimator)
    found = call_under_sis(batch, current)
    assert float(found.value) == 0.0 and not bool(found.gradient.any())
    assert set(found.metrics) == names
    assert current.statistics.sums["tokens"] == 0.0


def test_response_mask_may_be_integer_as_in_verls_batches():
    batch = random_batch(2, 3)
    z = torch.ones(2, 3, dtype=torch.bool)
    boolean = call_under_sis(batch, micro_batch("vanilla", decided(z)))
    batch.mask = batch.mask.long()
    integer = call_under_sis(batch, micro_batch("vanilla", decided(z)))
    assert torch.equal(boolean.value, integer.value) and torch.equal(boolean.gradient, integer.gradient)

"""All of verl's ratio losses under SIS: finite, unchanged where nothing is accepted, unit ratio where it is."""

import pytest
import torch
from verl.trainer.ppo import core_algos

from verl_sis.integration.base_loss import check_uses_ratio, resolve_base_loss
from verl_sis.integration.policy_loss import claim_policy_loss, sis_policy_loss

from .calls import (
    BASE_LOSSES,
    TOKEN_LOSSES,
    actor_config,
    call,
    call_under_sis,
    decided,
    micro_batch,
    random_batch,
    sis_config,
)

MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
NO_TOKEN, EVERY_TOKEN = torch.zeros(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.bool)


def batch_of(seed: int = 0, *, weighted: bool = False, **settings):
    batch = random_batch(4, 6, seed, **settings)
    if weighted:
        batch.weights = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed + 1)) * 2
    return batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("base", BASE_LOSSES)
def test_all_rejected_equals_the_base_loss_bit_for_bit(base, mode):
    # clip_cov draws from the global generator.
    batch = batch_of(loss_agg_mode=mode, weighted=True)
    torch.manual_seed(7)
    alone = call(base, batch)
    torch.manual_seed(7)
    found = call_under_sis(batch, micro_batch(base, decided(NO_TOKEN)))
    assert torch.equal(found.value, alone.value)
    assert torch.equal(found.gradient, alone.gradient)
    assert found.metrics == alone.metrics


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("base", BASE_LOSSES)
def test_some_accepted_gives_finite_value_and_gradient_and_another_loss(base, seed):
    batch = batch_of(seed)
    z = torch.rand(4, 6, generator=torch.Generator().manual_seed(seed)) < 0.6
    torch.manual_seed(7)
    alone = call(base, batch)
    torch.manual_seed(7)
    found = call_under_sis(batch, micro_batch(base, decided(z)))
    assert bool(torch.isfinite(found.value)) and bool(torch.isfinite(found.gradient).all())
    assert not torch.equal(found.gradient, alone.gradient), "SIS changed nothing"


@pytest.mark.parametrize("base", BASE_LOSSES)
def test_is_the_base_loss_of_the_transformed_old_log_probs_with_rollout_weights_passed_through(base):
    batch = batch_of(2, weighted=True)
    z = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    torch.manual_seed(7)
    found = call_under_sis(batch, micro_batch(base, decided(z)))
    batch.old_log_prob = torch.where(z, batch.log_prob, batch.old_log_prob)
    torch.manual_seed(7)
    by_hand = call(base, batch)
    assert torch.equal(found.value, by_hand.value) and torch.equal(found.gradient, by_hand.gradient)
    batch.weights = None
    torch.manual_seed(7)
    assert not torch.equal(call(base, batch).gradient, found.gradient), "the weights made no difference"


@pytest.mark.parametrize("base", [base for base in TOKEN_LOSSES if base not in ("sapo", "kl_cov")])
def test_accepted_token_has_the_on_policy_gradient(base):
    # -A / tokens for the 23 tokens of the mask, at ratio 1 in value.
    batch = batch_of(4)
    found = call_under_sis(batch, micro_batch(base, decided(EVERY_TOKEN)))
    exact = torch.where(batch.mask, -batch.advantages / 23, 0.0)
    assert torch.allclose(found.gradient, exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("base", ["sapo", "kl_cov", "gspo", "geo_mean"])
def test_accepted_token_has_the_on_policy_gradient_in_the_losses_own_normalisation(base):
    # sapo: gate f'(1) = sigmoid'(0) * 4 = 1, always a mean over responses of token means. gspo: ratio 1.
    # geo_mean: mean over responses of -A r, with A the response's mean. kl_cov: d |log w| = 0 at log w = 0.
    batch = batch_of(4, loss_agg_mode="seq-mean-token-mean")
    batch.advantages = batch.advantages[:, :1].expand(4, 6).clone()
    found = call_under_sis(batch, micro_batch(base, decided(EVERY_TOKEN)))
    lengths = batch.mask.sum(dim=-1, keepdim=True)
    exact = torch.where(batch.mask, -batch.advantages / (4 * lengths), 0.0)
    assert torch.allclose(found.gradient, exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_mode_reaches_the_base_loss(mode):
    # As in verl issue 1083: lengths 1 and 3 of width 3, A = 1 all accepted, so each token's loss is -1.
    expected = {
        "token-mean": -1.0,
        "token-sum": -4.0,
        "seq-mean-token-sum": -2.0,
        "seq-mean-token-mean": -1.0,
        "seq-mean-token-sum-norm": -2.0 / 3,
    }
    batch = random_batch(2, 3, loss_agg_mode=mode)
    batch.mask = torch.tensor([[True, False, False], [True, True, True]])
    batch.advantages = torch.ones(2, 3)
    found = call_under_sis(batch, micro_batch("vanilla", decided(torch.ones(2, 3, dtype=torch.bool))))
    assert float(found.value) == pytest.approx(expected[mode], rel=1e-6)


def test_dual_clip_metric_is_that_of_the_base_loss():
    # As in verl pull request 972: A = -1, ratio 4, c = 3.
    batch = random_batch(1, 1)
    batch.mask, batch.advantages = torch.ones(1, 1, dtype=torch.bool), -torch.ones(1, 1)
    batch.old_log_prob = batch.log_prob - torch.log(torch.tensor(4.0))
    rejected = call_under_sis(batch, micro_batch("vanilla", decided(torch.tensor([[False]]))))
    accepted = call_under_sis(batch, micro_batch("vanilla", decided(torch.tensor([[True]]))))
    assert rejected.metrics["actor/pg_clipfrac_lower"] == pytest.approx(1.0)
    assert accepted.metrics["actor/pg_clipfrac_lower"] == 0.0


def test_registry_keeps_the_same_functions_through_every_call():
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    for base in BASE_LOSSES:
        loss = resolve_base_loss(sis_config(base_loss=base))
        assert loss is before[base]
        check_uses_ratio(base, loss, actor_config())
        call_under_sis(batch_of(), micro_batch(base, decided(EVERY_TOKEN)))
    claim_policy_loss(core_algos)
    claim_policy_loss(core_algos)
    assert before == core_algos.POLICY_LOSS_REGISTRY
    assert core_algos.POLICY_LOSS_REGISTRY["sis"] is sis_policy_loss


def test_arguments_are_left_as_they_were():
    batch = batch_of(6, weighted=True)
    names = ("log_prob", "old_log_prob", "advantages", "mask", "weights")
    before = {name: getattr(batch, name).clone() for name in names}
    for base in BASE_LOSSES:
        call_under_sis(batch, micro_batch(base, decided(EVERY_TOKEN)))
    assert all(torch.equal(getattr(batch, name), before[name]) for name in names)

"""What only a worker can see is refused there, before the first rollout."""

from functools import partial

import pytest

from tests.worker import harness
from verl_sis.errors import SisConfigError, SisStateError, VerlContractError


@pytest.mark.parametrize(
    ("sis", "message"),
    [
        ({"top_k": 103}, "top_k=103 is larger than the vocabulary of 102 tokens"),
        ({"base_loss": "no_such_loss"}, "'no_such_loss' is not a registered policy loss. Choose one of .*vanilla"),
        ({"base_loss": "gpg"}, "'gpg' cannot run under SIS: its gradient does not depend on old_log_prob"),
        ({"base_loss": "bypass_mode"}, "cannot run under SIS: it takes the rollout engine's log-probs"),
        ({"base_loss": "sis"}, "cannot run under SIS: it is SIS itself"),
        ({"base_loss": "gspo", "estimator": "expected"}, "does not exist for base_loss='gspo': its ratio is one"),
    ],
)
def test_refused_when_the_actor_is_built(build, sis, message):
    with pytest.raises(SisConfigError, match=message):
        build(sis=sis)


def test_a_loss_name_overwritten_by_a_later_plugin_is_refused(build, monkeypatch):
    from verl.trainer.ppo import core_algos

    import verl_sis.register  # noqa: F401

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "sis", core_algos.compute_policy_loss_gspo)
    with pytest.raises(SisConfigError, match="another plugin has registered the policy loss 'sis'"):
        build()


def test_an_engine_without_the_hook_is_refused(build):
    worker = build()
    engine, worker.engine = worker.engine, object()
    try:
        with pytest.raises(
            SisConfigError, match=r"SIS supports verl's FSDP, Megatron and VeOmni engines, found builtins\.object"
        ):
            worker.set_loss_fn(worker._update_pass._verl_loss)
    finally:
        worker.engine = engine


def test_activation_without_the_configuration_is_refused(build):
    from verl.workers.config.actor import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    plain = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    with pytest.raises(SisConfigError, match="neither SIS nor routing replay is chosen"):
        build().set_loss_fn(partial(ppo_loss, config=plain))


def test_another_loss_function_than_verls_is_refused(build):
    with pytest.raises(VerlContractError, match="SIS wraps verl's ppo_loss"):
        build().set_loss_fn(lambda model_output, data, dp_group=None: None)


def test_the_loss_name_alone_does_not_run_silently(build):
    worker = build(sis=None, actor={"policy_loss": policy_loss_named_sis()})
    rollout = harness.made_up_rollout([3, 4, 2, 5])
    with pytest.raises(SisStateError, match=r"Choose SIS by a preset, \+sis@_global_=grpo"):
        harness.step(worker, rollout)


def policy_loss_named_sis():
    from verl.workers.config.actor import PolicyLossConfig

    return PolicyLossConfig(loss_mode="sis")

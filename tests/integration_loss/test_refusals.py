"""Base losses and calls that SIS refuses, each with the reason."""

import re

import pytest
import torch
from verl.trainer.ppo import core_algos

from verl_sis.core.acceptance import OUTSIDE_TOP_K
from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.integration.base_loss import check_uses_ratio, resolve_base_loss
from verl_sis.integration.policy_loss import CURRENT, claim_policy_loss, sis_policy_loss

from .calls import BASE_LOSSES, TOKEN_LOSSES, actor_config, call, random_batch, sis_config


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("sis", "it is SIS itself"),
        ("bypass_mode", "rollout engine's log-probs"),
        ("vanila", "not a registered policy loss. Choose one of .*'vanilla'"),
        ("", "not a registered policy loss"),
    ],
)
def test_a_loss_that_cannot_be_the_base_is_refused(base, reason):
    with pytest.raises(SisConfigError, match=reason) as raised:
        resolve_base_loss(sis_config(base_loss=base))
    assert repr(base) in str(raised.value)
    assert not {"sis", "bypass_mode"} & set(re.findall(r"'(\w+)'", str(raised.value).split("Choose one of")[1]))


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("gspo", "one exponential of a mean over the response"),
        ("geo_mean", "one exponential of a mean over the response"),
        ("clip_cov", "at random"),
        ("gpg", "does not know it to be a sum over tokens"),
    ],
)
def test_expected_is_refused_where_it_has_no_closed_form(base, reason):
    with pytest.raises(SisConfigError, match=reason) as raised:
        resolve_base_loss(sis_config(base_loss=base, estimator="expected"))
    assert repr(base) in str(raised.value) and "sis.estimator=sampled" in str(raised.value)


@pytest.mark.parametrize("base", BASE_LOSSES)
def test_every_ratio_loss_is_found_unchanged(base):
    assert resolve_base_loss(sis_config(base_loss=base)) is core_algos.POLICY_LOSS_REGISTRY[base]


@pytest.mark.parametrize("base", TOKEN_LOSSES)
def test_expected_is_allowed_for_sums_over_tokens(base):
    assert resolve_base_loss(sis_config(base_loss=base, estimator="expected")) is core_algos.POLICY_LOSS_REGISTRY[base]


def test_gpg_is_refused_because_it_has_no_ratio():
    with pytest.raises(SisConfigError, match="does not depend on old_log_prob") as raised:
        check_uses_ratio("gpg", core_algos.POLICY_LOSS_REGISTRY["gpg"], actor_config())
    assert "'gpg'" in str(raised.value)


@pytest.mark.parametrize(
    "clip",
    [(0.2, 0.2), (0.0003, 0.0004), (10.0, 0.2), (0.2, 0.28), (1e-6, 1e-6)],
    ids=["grpo", "gspo", "cispo", "dapo", "tight"],
)
@pytest.mark.parametrize("base", BASE_LOSSES)
def test_every_ratio_loss_passes_the_check_at_the_presets_clip_ranges(base, clip):
    config = actor_config(clip_ratio_low=clip[0], clip_ratio_high=clip[1])
    check_uses_ratio(base, core_algos.POLICY_LOSS_REGISTRY[base], config)


def test_the_check_leaves_the_runs_random_numbers_alone():
    def drawing_loss(**arguments):
        torch.rand(3)
        return core_algos.POLICY_LOSS_REGISTRY["vanilla"](**arguments)

    before = torch.random.get_rng_state()
    check_uses_ratio("drawing", drawing_loss, actor_config())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_check_works_where_gradients_are_off():
    with torch.no_grad():
        check_uses_ratio("vanilla", core_algos.POLICY_LOSS_REGISTRY["vanilla"], actor_config())


def test_called_outside_of_a_worker_it_says_what_to_type():
    assert CURRENT.get(None) is None
    with pytest.raises(SisStateError, match=re.escape("+sis@_global_=grpo")):
        call(sis_policy_loss, random_batch())


def test_a_name_taken_by_another_plugin_is_not_overwritten(monkeypatch):
    def foreign(**_):
        raise AssertionError("never called")

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "sis", foreign)
    with pytest.raises(SisConfigError, match="another plugin"):
        claim_policy_loss(core_algos)
    assert core_algos.POLICY_LOSS_REGISTRY["sis"] is foreign


@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "average"},
        {"outside_top_k": "keep"},
        {"behavior": "rollout"},
        {"top_k": 0},
        {"top_k": 2.5},
        {"chunk_tokens": 0},
        {"seed": "1"},
        {"seed": True},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused_by_name(settings):
    with pytest.raises(SisConfigError, match=rf"policy_loss\.sis\.{next(iter(settings))}"):
        sis_config(**settings)


@pytest.mark.parametrize("seed", [2**63, -1])
def test_a_seed_that_is_no_unsigned_63_bits_is_refused_with_the_configuration(seed):
    with pytest.raises(SisConfigError, match="seed"):
        sis_config(seed=seed)


def test_rules_of_the_configuration_are_those_of_the_core():
    for rule in OUTSIDE_TOP_K:
        assert sis_config(outside_top_k=rule).outside_top_k == rule

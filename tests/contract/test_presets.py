"""``+sis@_global_=NAME`` on verl's own configuration."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from tests.contract.compose import ENOUGH, actor_config, compose_in_one_go, compose_run
from verl_sis.config import SisConfig, SisDumpConfig, SisPolicyLossConfig
from verl_sis.register import presets
from verl_sis.run_facts import ACTIVATION_MODULE, SisRunFacts

PRESETS = {
    "grpo": {"base_loss": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "loss_agg_mode": "token-mean"},
    "dapo": {"base_loss": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "loss_agg_mode": "token-mean"},
    "gspo": {
        "base_loss": "gspo",
        "clip_ratio_low": 3e-4,
        "clip_ratio_high": 4e-4,
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "cispo": {"base_loss": "cispo", "clip_ratio_low": 10.0, "clip_ratio_high": 0.2, "loss_agg_mode": "token-mean"},
}


def test_the_presets_are_these():
    assert [name for name, _ in presets("sis")] == sorted(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_makes_a_valid_actor(name):
    config = compose_in_one_go(f"+sis@_global_={name}", *ENOUGH)
    actor = actor_config(config)
    assert isinstance(actor.policy_loss, SisPolicyLossConfig)
    assert actor.policy_loss.loss_mode == "sis"
    expected = dict(PRESETS[name])
    assert actor.policy_loss.sis.base_loss == expected.pop("base_loss")
    assert {key: getattr(actor, key) for key in expected} == expected
    assert config.actor_rollout_ref.model.external_lib == ACTIVATION_MODULE
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert config.algorithm.adv_estimator == "grpo"
    assert config.algorithm.filter_groups.enable == (name == "dapo")


def test_presets_write_out_the_defaults_of_the_dataclasses():
    composed = compose_run("+sis@_global_=grpo").actor_rollout_ref.actor.policy_loss.sis
    written = OmegaConf.to_container(composed)
    run, dump = written.pop("run"), written.pop("dump")
    for section, dataclass_type in ((written, SisConfig), (run, SisRunFacts), (dump, SisDumpConfig)):
        target = section.pop("_target_")
        assert target == f"{dataclass_type.__module__}.{dataclass_type.__qualname__}"
        fields = {field.name: field.default for field in dataclasses.fields(dataclass_type)}
        assert set(section) == set(fields) - {"_target_", "run", "dump"}
    assert dump.pop("directory") == "${trainer.default_local_dir}/sis_dump"
    assert dump == {name: getattr(SisDumpConfig, name) for name in dump}
    assert written == {name: getattr(SisConfig, name) for name in written}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_k", 50),
        ("seed", 7),
        ("estimator", "expected"),
        ("outside_top_k", "envelope"),
        ("chunk_tokens", 32),
        ("normalizer_share", 0.5),
    ],
)
def test_every_value_can_be_overridden(key, value):
    prefix = "actor_rollout_ref.actor.policy_loss.sis"
    actor = actor_config(compose_run("+sis@_global_=grpo", f"{prefix}.{key}={value}", *ENOUGH))
    assert getattr(actor.policy_loss.sis, key) == value


def test_verls_own_values_still_win_over_the_preset():
    overrides = ("+sis@_global_=dapo", "actor_rollout_ref.actor.clip_ratio_high=0.3", *ENOUGH)
    actor = actor_config(compose_in_one_go(*overrides))
    assert actor.clip_ratio_high == 0.3


def test_without_a_preset_nothing_of_the_configuration_changes():
    text = OmegaConf.to_yaml(compose_run())
    assert "verl_sis" not in text
    assert "\n  sis:" not in text

"""``+routing_replay@_global_=NAME`` on verl's own configuration: both sides set, half-set combinations refused."""

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from tests.contract.compose import ENOUGH, actor_config, compose_in_one_go, compose_run
from verl_sis.config import SisPolicyLossConfig
from verl_sis.errors import SisConfigError
from verl_sis.register import presets
from verl_sis.routing_replay.config import SECTIONS, RoutingReplayConfig
from verl_sis.run_facts import ACTIVATION_MODULE

SECTION_OF = {"": "fsdp_config", "_megatron": "megatron", "_veomni": "veomni"}
RETURN_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
REPLAY = "actor_rollout_ref.actor.fsdp_config.router_replay"
BYPASS = "algorithm.rollout_correction.bypass_mode"


def test_the_presets_are_these():
    assert [name for name, _ in presets("routing_replay")] == sorted(
        f"{mode}{suffix}" for mode in ("r2", "r3") for suffix in SECTION_OF
    )
    assert set(SECTION_OF.values()) == set(SECTIONS.values())


def engine_overrides(suffix):
    return [f"model_engine={suffix.removeprefix('_')}"] if suffix else []


@pytest.mark.parametrize("suffix", SECTION_OF)
@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_preset_sets_both_sides(mode, suffix):
    config = compose_run(f"+routing_replay@_global_={mode}{suffix}", *engine_overrides(suffix))
    section = config.actor_rollout_ref.actor[SECTION_OF[suffix]].router_replay
    assert section.mode == mode.upper()
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay == (mode == "r3")
    assert config.actor_rollout_ref.rollout.calculate_log_probs
    assert config.actor_rollout_ref.model.external_lib == ACTIVATION_MODULE
    assert OmegaConf.to_container(section.run, resolve=True)["strategy"] in SECTIONS


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_an_fsdp_actor_holds_the_validated_section(mode):
    actor = actor_config(compose_in_one_go(f"+routing_replay@_global_={mode}", *ENOUGH))
    replay = actor.engine.router_replay
    assert isinstance(replay, RoutingReplayConfig)
    assert (replay.mode, replay.on_fsdp, replay.min_agreement, replay.native_pass_every) == (mode.upper(), True, 0.5, 0)


@pytest.mark.parametrize("groups", [("sis=dapo", "routing_replay=r3"), ("routing_replay=r3", "sis=dapo")])
def test_both_groups_compose_in_either_order(groups):
    overrides = [f"+{group.replace('=', '@_global_=')}" for group in groups]
    config = compose_run(*overrides, *ENOUGH)
    actor = actor_config(config)
    assert isinstance(actor.policy_loss, SisPolicyLossConfig)
    assert actor.engine.router_replay.mode == "R3"
    assert config.actor_rollout_ref.model.external_lib == ACTIVATION_MODULE


def test_values_can_be_overridden():
    actor = actor_config(
        compose_in_one_go(
            "+routing_replay@_global_=r3", f"{REPLAY}.native_pass_every=5", f"{REPLAY}.min_agreement=0", *ENOUGH
        )
    )
    assert (actor.engine.router_replay.native_pass_every, actor.engine.router_replay.min_agreement) == (5, 0)


REFUSED = {
    "rollout side off": (["r3", f"{RETURN_ROUTES}=false"], f"Type {RETURN_ROUTES}=True"),
    "rollout side on under R2": (["r2", f"{RETURN_ROUTES}=true"], f"Type {RETURN_ROUTES}=False"),
    "R2 in bypass mode": (["r2", f"{BYPASS}=true"], f"Type {BYPASS}=False"),
    "comparison in bypass mode": (["r3", f"{BYPASS}=true", f"{REPLAY}.native_pass_every=1"], "native_pass_every=0"),
    "another library instead": (["r3", "actor_rollout_ref.model.external_lib=mine"], f"[{ACTIVATION_MODULE},your"),
    "an engine without replay": (["r3", "actor_rollout_ref.actor.strategy=torchtitan"], "got actor_rollout_ref.actor"),
    "a rollout engine without routes": (["r3", "actor_rollout_ref.rollout.name=hf"], "vllm or sglang"),
    "log-probs before temperature": (
        [
            "r3",
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs",
        ],
        "processed_logprobs",
    ),
    "a mode that does not exist": (["r3", f"{REPLAY}.mode=R4"], "Invalid router_replay mode: R4"),
    "agreement out of range": (["r3", f"{REPLAY}.min_agreement=1.0"], "a number in [0, 1)"),
    "interval out of range": (["r3", f"{REPLAY}.native_pass_every=-1"], "an integer of at least 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_the_driver(case):
    (name, *overrides), message = REFUSED[case]
    config = compose_run(f"+routing_replay@_global_={name}", *overrides, *ENOUGH)
    with pytest.raises(InstantiationException) as caught:
        actor_config(config)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "strategy", "typed"),
    [("r3", "megatron", "r3_megatron"), ("r2", "veomni", "r2_veomni"), ("r3_megatron", "fsdp2", "r3 instead of")],
)
def test_the_preset_of_another_engine_is_refused_with_what_to_type(name, strategy, typed):
    suffix = name.removeprefix("r3").removeprefix("r2")
    config = compose_run(f"+routing_replay@_global_={name}", *engine_overrides(suffix))
    section = config.actor_rollout_ref.actor[SECTION_OF[suffix]].router_replay
    config.actor_rollout_ref.actor.strategy = strategy
    from hydra.utils import instantiate

    with pytest.raises(InstantiationException, match=rf"Type \+routing_replay@_global_={typed}"):
        instantiate(section, _convert_="partial")


def test_disabled_is_not_checked():
    config = compose_run("+routing_replay@_global_=r3", f"{REPLAY}.mode=disabled", f"{RETURN_ROUTES}=false", *ENOUGH)
    assert actor_config(config).engine.router_replay.mode == "disabled"


def test_sis_alone_with_routes_that_nobody_replays_is_refused():
    config = compose_run("+sis@_global_=grpo", f"{RETURN_ROUTES}=true", *ENOUGH)
    with pytest.raises(InstantiationException) as caught:
        actor_config(config)
    assert "+routing_replay@_global_=r3" in str(caught.value)
    metrics = "actor_rollout_ref.rollout.moe_load_balance_metrics_interval=1"
    actor_config(compose_run("+sis@_global_=grpo", f"{RETURN_ROUTES}=true", metrics, *ENOUGH))


def test_an_error_of_ours_is_what_the_driver_shows():
    config = compose_run("+routing_replay@_global_=r3", f"{RETURN_ROUTES}=false", *ENOUGH)
    with pytest.raises(InstantiationException) as caught:
        actor_config(config)
    assert isinstance(caught.value.__cause__, SisConfigError)

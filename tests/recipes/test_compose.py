"""Every variant composes, verl accepts it, and SIS and routing replay are on where ``expected.json`` says so only."""

import pytest
import torch
import yaml
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.workers.config import RolloutConfig

from tests.contract.compose import actor_config
from tests.recipes.composing import (
    RECIPES,
    composed,
    composed_at_once,
    every_variant,
    expected,
    recipes,
    value,
    variants,
    written,
)
from verl_sis.config import SisPolicyLossConfig
from verl_sis.run_facts import ACTIVATION_MODULE

pytestmark = pytest.mark.filterwarnings("ignore:Disabled critic")

MATH = ("math_llama3_2_3b", "math_qwen3_30b_a3b", "math_qwen3_8b")
SECTIONS = {"fsdp2": "fsdp_config", "megatron": "megatron"}
ACTOR = "actor_rollout_ref.actor"
ACCEPTED_ROLLOUTS = set()
"""Sections that verl's class has taken, as text: most variants of a recipe have the same, and building one is slow."""
TOP_K = "math_qwen3_8b/top_k@_global_"
STALENESS = "math_qwen3_8b/staleness@_global_"


def with_groups():
    """Combinations with files of groups that ``expected.json`` names; each file once in the fast suite."""
    seen = set()
    for recipe in recipes():
        for entry in expected(recipe).get("with_groups", []):
            marks = [pytest.mark.e2e] if seen.issuperset(entry["groups"]) else []
            seen.update(entry["groups"])
            yield pytest.param(recipe, entry, marks=marks, id="-".join([entry["variant"], *entry["groups"]]))


def states(config):
    """What is active, read from the configuration that verl would run."""
    actor = config.actor_rollout_ref.actor
    engine = actor[SECTIONS[actor.strategy]]
    # validate_config builds the rest of the actor.
    loss = omega_conf_to_dataclass(actor.policy_loss)
    sis = isinstance(loss, SisPolicyLossConfig) and loss.loss_mode == "sis"
    replay = OmegaConf.select(engine, "router_replay.mode", default="disabled")
    libraries = config.actor_rollout_ref.model.external_lib
    if sis or (replay != "disabled" and actor.strategy == "fsdp2"):
        assert libraries == ACTIVATION_MODULE
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay == (replay == "R3")
    return {"sis": sis, "top_k": loss.sis.top_k if sis else None, "r3": replay == "R3"}


def test_all_math_recipes_are_found():
    assert set(MATH) <= set(recipes())
    assert len(variants("math_qwen3_8b")) == 15
    assert len(variants("math_qwen3_30b_a3b")) == 24
    assert len(variants("math_llama3_2_3b")) == 6


@pytest.mark.parametrize(("recipe", "variant"), every_variant())
def test_verl_accepts_it_and_it_is_what_it_says(recipe, variant):
    config = composed(recipe, variant)
    validate_config(config, need_reference_policy(config), need_critic(config))
    rollout = repr(OmegaConf.to_container(config.actor_rollout_ref.rollout))
    if rollout not in ACCEPTED_ROLLOUTS:
        assert isinstance(omega_conf_to_dataclass(config.actor_rollout_ref.rollout), RolloutConfig)
        ACCEPTED_ROLLOUTS.add(rollout)
    assert isinstance(omega_conf_to_dataclass(config.algorithm), AlgoConfig)
    said = expected(recipe)["variants"][variant]
    assert states(config) == {name: said[name] for name in ("sis", "top_k", "r3")}
    assert config.actor_rollout_ref.actor.strategy == said.get("engine", "fsdp2")
    missing = {key for key, value in written(recipe, variant).items() if value == "???"}
    assert missing <= {"reward.reward_model.rollout.name", "critic.model.path"}


@pytest.mark.parametrize("recipe", recipes())
def test_each_file_is_a_variant_or_part_of_one(recipe):
    files = {file.stem: yaml.safe_load(file.read_text()) for file in (RECIPES / recipe).glob("*.yaml")}
    parts = {part for content in files.values() for part in content.get("defaults", []) if isinstance(part, str)}
    assert set(variants(recipe)) <= set(files)
    assert set(files) - set(variants(recipe)) <= parts


def test_each_folder_is_complete():
    folders = {file.parent.name for file in RECIPES.glob("*/*.yaml")}
    assert set(recipes()) == folders
    index = (RECIPES / "README.md").read_text()
    for recipe in recipes():
        assert (RECIPES / recipe / "run.sh").exists()
        assert f"[{recipe}]({recipe}/README.md)" in index
        readme = (RECIPES / recipe / "README.md").read_text()
        for variant in variants(recipe):
            assert f"`{variant}`" in readme, variant


@pytest.mark.parametrize(("recipe", "entry"), list(with_groups()))
def test_groups_change_what_they_say(recipe, entry):
    config = composed(recipe, entry["variant"], *entry["groups"])
    validate_config(config, need_reference_policy(config), need_critic(config))
    base = expected(recipe)["variants"][entry["variant"]]
    assert states(config) == {name: entry.get(name, base[name]) for name in ("sis", "top_k", "r3")}
    updates = config.data.train_batch_size / config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert updates == entry.get("staleness", 8)
    assert updates * config.trainer.total_training_steps == 400
    assert updates * config.trainer.test_freq == updates * config.trainer.save_freq == 80
    assert config.trainer.nnodes == entry.get("nodes", 1)


@pytest.mark.parametrize("recipe", recipes())
def test_verl_finds_the_reward_function(recipe):
    config = composed(recipe, variants(recipe)[0])
    function = get_custom_reward_fn(config)
    assert function is not None
    named = config.reward.custom_reward_function
    assert function.args[0].__name__ == named.name
    if str(named.path).startswith("pkg://"):
        assert function.args[0].__module__ == named.path.removeprefix("pkg://")


def test_a_k_without_sis_is_refused():
    with pytest.raises(ConfigCompositionException, match="No match in the defaults list"):
        composed("math_qwen3_8b", "grpo", f"{TOP_K}=k50")


TWINS = [
    (recipe, twin, sis)
    for recipe, sis in every_variant()
    if expected(recipe)["variants"][sis]["sis"] and (twin := sis.replace("_sis", "", 1)) in variants(recipe)
]
LIBRARY = "actor_rollout_ref.model.external_lib"


@pytest.mark.parametrize(("recipe", "variant", "sis"), TWINS)
def test_a_variant_and_its_sis_twin_differ_in_sis_only(recipe, variant, sis):
    without, with_sis = written(recipe, variant), written(recipe, sis)
    loss = f"{ACTOR}.policy_loss"
    differing = {key for key in without.keys() | with_sis.keys() if without.get(key) != with_sis.get(key)}
    own = {key for key in with_sis if key.startswith(f"{loss}.sis.")}
    # Routing replay needs the activation module, too.
    switch = {f"{loss}._target_", f"{loss}.loss_mode"} | ({LIBRARY} if without[LIBRARY] is None else set())
    assert differing == own | switch
    assert with_sis[f"{loss}.sis.base_loss"] == without[f"{loss}.loss_mode"]
    assert with_sis[f"{loss}.sis.seed"] == with_sis["actor_rollout_ref.rollout.seed"] == "${data.seed}"


def test_each_variant_with_sis_has_a_twin():
    assert len(TWINS) == sum(expected(recipe)["variants"][variant]["sis"] for recipe, variant in every_variant())
    assert ("math_qwen3_8b", "no_clip", "no_clip_sis") in TWINS
    assert ("math_qwen3_30b_a3b", "gspo_r3", "gspo_sis_r3") in TWINS


def losses(variant, shift, advantages):
    """Loss and gradient of verl's own policy loss of a variant, for old log-probs ``log_prob - shift``."""
    actor = actor_config(composed("math_qwen3_8b", variant))
    log_prob = torch.full_like(shift, -21.0, requires_grad=True)
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=log_prob.detach() - shift,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=torch.ones_like(shift, dtype=torch.bool),
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return loss.item(), torch.autograd.grad(loss, log_prob)[0]


@pytest.mark.parametrize(("advantage", "clipped_by_grpo"), [(1.0, 2), (-1.0, 4)])
def test_nothing_clips_without_a_clip(advantage, clipped_by_grpo):
    shift = torch.tensor([[-19.9, -2.0, 0.0, 2.0, 19.9]], dtype=torch.float64)
    advantages = torch.full_like(shift, advantage)
    _, gradient = losses("no_clip", shift, advantages)
    torch.testing.assert_close(gradient, -advantages * shift.exp() / 5)
    _, clipped = losses("grpo", shift, advantages)
    # Two ratios above 1.2; or two below 0.8, and those two above 3 by the dual clip.
    assert (clipped == 0).sum() == clipped_by_grpo


def test_without_importance_sampling_the_old_policy_does_not_matter():
    advantages = torch.tensor([[1.0, -1.0, 2.0]])
    for shift in (torch.zeros(1, 3), torch.tensor([[3.0, -3.0, 1.0]])):
        _, gradient = losses("no_is", shift, advantages)
        torch.testing.assert_close(gradient, -advantages / 3)


@pytest.mark.parametrize(("variant", "outside"), [("icepop", 0.0), ("tis", 2.0)])
def test_what_the_rollout_corrections_do_with_ratios(variant, outside):
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    settings = composed("math_qwen3_8b", variant).algorithm.rollout_correction
    ratio = torch.tensor([[0.4, 0.6, 1.0, 1.9, 6.0]])
    weights, _ = compute_rollout_correction_weights(
        ratio.log(), torch.ones_like(ratio), settings.rollout_is, settings.rollout_is_threshold
    )
    low = 0.0 if variant == "icepop" else 0.4
    torch.testing.assert_close(weights, torch.tensor([[low, 0.6, 1.0, 1.9, outside]]))
    assert not settings.bypass_mode


def test_sis_runs_on_both_engines():
    """Each loss with SIS has a variant per engine, with and without replay, which differ in the engine alone."""
    names = set(variants("math_qwen3_30b_a3b"))
    for name in {name for name in names if "_sis" in name and "megatron" not in name}:
        assert f"{name}_megatron" in names
    on_fsdp, on_megatron = (
        OmegaConf.to_container(composed("math_qwen3_30b_a3b", name).actor_rollout_ref.actor.policy_loss)
        for name in ("grpo_sis", "grpo_sis_megatron")
    )
    assert on_fsdp == on_megatron


@pytest.mark.parametrize(
    ("recipe", "variant"), [("math_qwen3_8b", "dapo_sis"), ("math_qwen3_30b_a3b", "grpo_megatron")]
)
def test_it_is_what_hydra_composes(recipe, variant):
    assert composed_at_once(recipe, variant) == composed(recipe, variant)


@pytest.mark.e2e
@pytest.mark.parametrize(("recipe", "variant"), every_variant())
def test_each_is_what_hydra_composes(recipe, variant):
    assert composed_at_once(recipe, variant) == composed(recipe, variant)


def test_four_nodes_keep_weights_within_a_node():
    config = composed("math_qwen3_30b_a3b", "grpo", "math_qwen3_30b_a3b/nodes@_global_=four")
    assert config.trainer.nnodes == 4
    assert config.actor_rollout_ref.actor.fsdp_config.fsdp_size == config.trainer.n_gpus_per_node == 8
    assert config.actor_rollout_ref.ref.fsdp_config.fsdp_size == 8


def test_a_value_has_a_name_per_engine():
    keys = "actor_rollout_ref.actor.optim.lr_scheduler_type|actor_rollout_ref.actor.optim.lr_decay_style"
    assert value("math_qwen3_30b_a3b", "grpo", keys) == "constant"
    assert value("math_qwen3_30b_a3b", "grpo_megatron", keys) == "constant"
    with pytest.raises(KeyError, match="none of data"):
        value("math_qwen3_8b", "grpo", "data.no_such_key")

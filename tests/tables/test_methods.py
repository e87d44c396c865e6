"""What a configuration is called: rules on settings, presets and composed configurations."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import verl_sis
from tests.contract.compose import compose_run
from tests.tables.runs import ACTOR, DAPO, MINI_BATCH, NO_CLIP, R3, SIS, TOP_K, config
from verl_sis.errors import StudyFileError
from verl_sis.tables.configuration import Configuration, read_configuration
from verl_sis.tables.methods import LossFacts, Method, Sis, base_algorithm, method_of

PRESETS = Path(verl_sis.__file__).parent / "conf" / "sis"

GRPO = LossFacts("vanilla")
TIS = replace(GRPO, importance="token")


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (GRPO, "GRPO"),
        (replace(GRPO, advantage="grpo_vectorized"), "GRPO"),
        (replace(GRPO, clip_low=0.1, clip_high=0.1), "GRPO"),
        (replace(GRPO, clip_high=0.28, filter_groups=True), "DAPO"),
        (replace(GRPO, clip_high=0.3), "DAPO"),
        (LossFacts("gspo", 3e-4, 4e-4), "GSPO"),
        (LossFacts("cispo", 10.0, 0.2), "CISPO"),
        (LossFacts("vanilla", 1.0, 1e9, 1e9), "w/o clip"),
        (LossFacts("vanilla", 1e9, 1e3, 1e3), "w/o clip"),
        (LossFacts("gpg"), "w/o IS"),
        (LossFacts("clip_cov"), "Clip-Cov"),
        (LossFacts("dppo_tv"), "DPPO-TV"),
        (replace(TIS, importance_threshold="2.0"), "GRPO + TIS"),
        (replace(TIS, importance_threshold="0.5_5.0"), "GRPO + IcePop"),
        (replace(TIS, clip_high=0.28, importance_threshold="2"), "DAPO + TIS"),
    ],
)
def test_known_combinations(facts, name):
    assert base_algorithm(facts) == name


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        # The dual clip still binds, or the upper side alone is open: neither GRPO nor "without clip".
        (LossFacts("vanilla", 1.0, 1e9, 3.0), "other: vanilla, clip 1/1e+09/3, advantage grpo"),
        (LossFacts("vanilla", 0.2, 1e9, 1e9), "other: vanilla, clip 0.2/1e+09/1e+09, advantage grpo"),
        (LossFacts("vanilla", 0.3, 0.2), "other: vanilla, clip 0.3/0.2/3, advantage grpo"),
        (replace(GRPO, filter_groups=True), "other: vanilla, clip 0.2/0.2/3, advantage grpo, filter_groups True"),
        (replace(GRPO, advantage="gae"), "other: vanilla, clip 0.2/0.2/3, advantage gae"),
        (replace(GRPO, bypass=True), "other: vanilla, clip 0.2/0.2/3, advantage grpo, bypass True"),
        (
            replace(GRPO, importance="sequence"),
            "other: vanilla, clip 0.2/0.2/3, advantage grpo, rollout_is sequence 2.0",
        ),
        (replace(GRPO, rejection="token_k1"), "other: vanilla, clip 0.2/0.2/3, advantage grpo, rollout_rs token_k1"),
        (LossFacts("my_loss"), "other: my_loss, clip 0.2/0.2/3, advantage grpo"),
    ],
)
def test_unknown_combinations_say_what_they_are(facts, name):
    assert base_algorithm(facts) == name


def method(groups=(), **values):
    return method_of(Configuration(config(groups, **values), Path("run/.hydra/config.yaml")))


@pytest.mark.parametrize("preset", ["grpo", "dapo", "gspo", "cispo"])
def test_presets_are_what_they_are_called(preset):
    """A preset is a difference, laid over verl's configuration with SIS as Hydra does it."""
    difference = OmegaConf.load(PRESETS / f"{preset}.yaml")
    tree = OmegaConf.merge(config(SIS), difference)
    found = method_of(Configuration(OmegaConf.to_container(tree, resolve=False), Path("config.yaml")))
    assert (found.base, found.sis) == (preset.upper(), Sis(10))
    assert found.label == f"{preset.upper()} + SIS (K=10)"


def test_base_and_sis_have_the_same_base():
    """1024 prompts over mini-batches of 256, verl's defaults, twice."""
    values = {"data.train_batch_size": 1024, MINI_BATCH: 256, f"{ACTOR}.ppo_epochs": 2}
    assert method(**values) == Method("GRPO", None, 8, "off")
    assert method(SIS, **values) == Method("GRPO", Sis(10), 8, "off")
    assert method(**DAPO).base == method(SIS, **DAPO).base == "DAPO"
    assert method(**NO_CLIP).base == method(SIS, **NO_CLIP).base == "w/o clip"


def test_what_differs_from_the_paper_is_in_the_label():
    found = method(SIS, **{TOP_K: 7, f"{ACTOR}.policy_loss.sis.estimator": "expected"})
    assert found.label == "GRPO + SIS (K=7, expected)"
    assert found.sis is not None
    assert not found.sis.is_paper
    assert str(Sis(3, outside_top_k="envelope")) == "K=3, outside top-K: envelope"


def test_replay_is_that_of_the_engine():
    assert method(R3).replay == "R3"
    tree = config(R3)
    tree["actor_rollout_ref"]["actor"]["fsdp_config"]["router_replay"]["mode"] = "R9"
    with pytest.raises(StudyFileError, match="to be disabled, R2 or R3, found 'R9'"):
        method_of(Configuration(tree, Path("config.yaml")))
    with pytest.raises(StudyFileError, match=r"strategy to be one of fsdp, .* found 'mlx'"):
        method(**{f"{ACTOR}.strategy": "mlx"})


def test_a_staleness_that_is_no_integer_is_refused():
    with pytest.raises(StudyFileError, match="N is an integer, found 10 and 4"):
        method(**{"data.train_batch_size": 10})


def test_values_are_read_as_omegaconf_wrote_them(tmp_path, monkeypatch):
    """Interpolations of keys follow; those of the environment are not the run's."""
    monkeypatch.setenv("WORLD", "reader")
    composed = compose_run("+sis@_global_=grpo")
    composed.actor_rollout_ref.model.path = "${oc.env:WORLD}/model"
    composed.data.train_files = ["${trainer.project_name}/2026-01-31", "${oc.env:OTHER,x}/b"]
    composed.actor_rollout_ref.actor.optim.lr = 1e-20
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(composed))
    found = read_configuration(path)
    assert found.get("actor_rollout_ref.model.path") == "WORLD/model"
    assert found.get("data.train_files") == ["verl_examples/2026-01-31", "OTHER/b"]
    assert found.number("actor_rollout_ref.actor.optim.lr") == 1e-20
    assert found.get("actor_rollout_ref.actor.policy_loss.sis.run.strategy") == "fsdp"
    assert found.get("actor_rollout_ref.rollout.response_length") == 512
    assert found.get("no.such.key", 7) == 7


def test_what_does_not_resolve_is_named():
    found = Configuration({"a": "${hydra:run.dir}/x", "b": "one"}, Path("c.yaml"))
    with pytest.raises(StudyFileError, match=r"c\.yaml: expected a to be a value"):
        found.get("a")
    with pytest.raises(StudyFileError, match="expected b to be a number, found 'one'"):
        found.number("b")
    with pytest.raises(StudyFileError, match="expected b to be an integer of at least 1, found 'one'"):
        found.integer("b", 1)
    with pytest.raises(StudyFileError, match="a value for nothing, found none"):
        found.need("nothing")


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "\x00"])
def test_what_is_no_configuration_is_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(StudyFileError, match="expected a configuration that Hydra wrote"):
        read_configuration(tmp_path / "config.yaml")

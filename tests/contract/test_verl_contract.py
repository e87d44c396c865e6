"""What verl_sis builds on in verl is there, and a verl that differs is noticed."""

import dataclasses
import logging

import pytest
from packaging.specifiers import SpecifierSet

from verl_sis import verl_compat
from verl_sis.errors import SisConfigError, VerlContractError
from verl_sis.verl_compat import checks


@pytest.mark.parametrize("touchpoint", verl_compat.CONTRACT, ids=lambda touchpoint: touchpoint.name)
def test_installed_verl_keeps_the_contract(touchpoint):
    assert touchpoint.problems() == []
    assert touchpoint.why
    assert touchpoint.upstream.startswith("https://github.com/verl-project/verl/")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "TrainingWorker.no_such_method"}, "is missing"),
        ({"module": "verl.no_such_module"}, "is missing"),
        ({"parameters": ("self", "data", "something_new")}, "expected the parameters"),
        ({"fragments": ("a line that verl does not have",)}, "its source no longer has"),
    ],
)
def test_a_difference_is_found_and_named(change, problem, monkeypatch):
    touchpoint = next(entry for entry in verl_compat.CONTRACT if entry.name == "TrainingWorker.train_batch")
    changed = dataclasses.replace(touchpoint, **change)
    monkeypatch.setattr(checks, "CONTRACT", (changed,))
    with pytest.raises(VerlContractError, match=f"(?s){problem}.*Type: pip install verl==0.9.1"):
        verl_compat.check_contract()


def test_an_unknown_verl_is_refused(monkeypatch):
    monkeypatch.setattr(checks, "SUPPORTED_VERL", SpecifierSet(">=7"))
    with pytest.raises(VerlContractError, match=r"found 0\.9\.1\. Type: pip install"):
        verl_compat.check_version()


@pytest.mark.parametrize("policy", ["none", "verl-sis", "other_plugin, another"])
def test_excluded_by_environment(policy, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    with pytest.raises(SisConfigError, match="type VERL_USE_EXTERNAL_PLUGINS=verl_sis"):
        verl_compat.check_plugin_policy()


@pytest.mark.parametrize("policy", ["auto", "verl_sis", "other, verl_sis"])
def test_allowed_by_environment(policy, monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", policy)
    verl_compat.check_plugin_policy()


def test_every_registered_loss_still_has_the_shared_signature():
    import inspect

    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from verl_sis.integration.policy_loss import sis_policy_loss

    expected = list(inspect.signature(sis_policy_loss).parameters)
    for name, loss in POLICY_LOSS_REGISTRY.items():
        if name != "bypass_mode":
            assert list(inspect.signature(loss).parameters) == expected, name


def test_a_second_plugin_with_our_loss_name_is_refused(monkeypatch):
    from verl.trainer.ppo import core_algos

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "sis", core_algos.compute_policy_loss_vanilla)
    with pytest.raises(SisConfigError, match=r"another plugin has registered the policy loss 'sis'.*vanilla"):
        verl_compat.check_registered_loss()


def test_a_second_plugin_with_our_group_name_is_refused():
    from hydra.core.config_store import ConfigStore

    from verl_sis import register

    store = ConfigStore.instance()
    store.store(group="sis", name="theirs", node={"a": 1}, provider="another")
    try:
        with pytest.raises(SisConfigError, match=r"claimed by another plugin too \(presets \['theirs.yaml'\]\)"):
            register.register()
    finally:
        del store.repo["sis"]["theirs.yaml"]
    register.register()


def test_registering_twice_changes_nothing():
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from verl_sis import register

    before = dict(POLICY_LOSS_REGISTRY)
    register.register()
    assert before == POLICY_LOSS_REGISTRY


def test_activation_replaces_the_actors_worker_and_nothing_else(monkeypatch):
    from verl.workers import engine_workers

    from verl_sis.integration.activate import activate
    from verl_sis.integration.actor import ActorTrainingWorker

    worker = engine_workers.ActorRolloutRefWorker
    monkeypatch.setattr(worker, "actor_worker_cls", engine_workers.TrainingWorker)
    activate(engine_workers)
    assert worker.actor_worker_cls is ActorTrainingWorker
    assert worker.ref_worker_cls is engine_workers.TrainingWorker
    activate(engine_workers)
    monkeypatch.setattr(worker, "actor_worker_cls", type("Theirs", (engine_workers.TrainingWorker,), {}))
    with pytest.raises(SisConfigError, match=r"another library has set .*Theirs"):
        activate(engine_workers)


def test_overridden_methods_keep_verls_dispatch():
    """Ray dispatch reads attributes that verl's decorator leaves on the methods."""
    from verl.workers.engine_workers import TrainingWorker

    from verl_sis.integration.actor import ActorTrainingWorker

    for name in ("infer_batch", "train_batch", "train_mini_batch", "save_checkpoint", "load_checkpoint"):
        ours, theirs = vars(getattr(ActorTrainingWorker, name)), vars(getattr(TrainingWorker, name))
        assert {key: value for key, value in ours.items() if key != "__wrapped__"} == {
            key: value for key, value in theirs.items() if key != "__wrapped__"
        }, name


def test_logging_of_the_package_does_not_touch_the_root_logger():
    assert logging.getLogger("verl_sis").handlers == []

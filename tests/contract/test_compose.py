"""The composition of these tests in two steps is what Hydra alone makes of the same command line."""

import pytest
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from tests.contract.compose import ENOUGH, compose_in_one_go, compose_run
from tests.contract.test_refusals import ROLLOUT, SIS

EVERY_KIND = [
    "+sis@_global_=dapo",
    f"{SIS}.top_k=50",
    f"{SIS}.estimator=expected",
    f"{SIS}.top_k=51",
    f"{SIS}.normalizer_share=0.5",
    "+routing_replay@_global_=r3",
    f"+{ROLLOUT}.min_p=0.05",
    f"++{ROLLOUT}.top_p=0.9",
    f"~{ROLLOUT}.top_k",
    "actor_rollout_ref.model.external_lib=[verl_sis.integration.activate,json]",
    "trainer.default_local_dir='a b=${trainer.experiment_name}'",
    "actor_rollout_ref.model.path=null",
    "distillation.enabled=True",
    *ENOUGH,
]


def test_two_steps_are_hydras_own():
    ours, hydras = compose_run(*EVERY_KIND), compose_in_one_go(*EVERY_KIND)
    assert ours == hydras
    assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(hydras)
    assert OmegaConf.is_struct(ours) and OmegaConf.is_struct(hydras)


def test_what_a_test_changes_stays_in_that_test():
    compose_run("+sis@_global_=grpo").trainer.default_local_dir = "changed"
    assert compose_run("+sis@_global_=grpo").trainer.default_local_dir != "changed"


def test_a_key_that_does_not_exist_is_refused():
    with pytest.raises(ConfigCompositionException, match="no_such_key"):
        compose_run("+sis@_global_=grpo", f"{SIS}.no_such_key=1")

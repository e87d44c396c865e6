"""The quickstart's configuration composes over verl's own, and a failed run is reported."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.subprocesses import output_of
from verl_sis.cpu import launch, quickstart

COMPOSE = """
import verl
from hydra import compose, initialize_config_module
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides={overrides!r})
print(config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size,
      config.trainer.total_training_steps, config.actor_rollout_ref.model.path,
      config.actor_rollout_ref.actor.policy_loss.loss_mode)
"""


@pytest.mark.parametrize(("extra", "loss"), [((), "vanilla"), (quickstart.SIS_OVERRIDES, "sis")])
def test_four_updates_per_rollout_and_thirty_steps(extra, loss):
    code = COMPOSE.format(overrides=[*quickstart.OVERRIDES, *extra])
    updates, steps, model, mode = output_of(code, VERL_SIS_TINY_WORLD="/world").splitlines()[-1].split()
    assert (updates, model, mode) == ("4", "/world/model", loss)
    assert int(steps) >= 30


def test_routing_replay_measures_both_sides_in_bfloat16():
    replay = ["+routing_replay@_global_=r3", *quickstart.ROUTING_OVERRIDES]
    code = COMPOSE.replace("loss_mode)", "loss_mode)\nprint(config.actor_rollout_ref.actor.fsdp_config.router_replay)")
    code = code.format(overrides=[*quickstart.OVERRIDES, *quickstart.SIS_OVERRIDES, *replay])
    text = output_of(code, VERL_SIS_TINY_WORLD="/world").splitlines()[-1]
    assert "'mode': 'R3'" in text and "'native_pass_every': 1" in text


@pytest.fixture
def fake_run(monkeypatch, tmp_path):
    """Replaces verl by a function that writes a log; returns the overrides it was given."""
    seen, worlds = [], []

    def install(returncode, log_text, metrics="", typed=None):
        def run(overrides, *, log, variables, on_poll):
            seen.extend(overrides)
            log.write_text(log_text)
            Path(variables["VERL_FILE_LOGGER_PATH"]).write_text(metrics)
            on_poll()
            return launch.RunResult(returncode, False, 1.0, 2**30, ())

        monkeypatch.setattr(quickstart, "run_verl", run)
        monkeypatch.setattr(quickstart.tiny_world, "build", lambda root, world: worlds.append(world) or root / "world")
        console = Console(file=io.StringIO(), width=140)
        typed = ["trainer.total_training_steps=2"] if typed is None else typed
        code = quickstart.run(tmp_path / "quickstart", typed, False, console)
        return code, console.file.getvalue(), seen

    install.worlds = worlds
    return install


def test_a_users_override_comes_last_and_results_are_written(fake_run, tmp_path):
    code, text, overrides = fake_run(0, "fine", '{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n')
    assert code == 0
    assert overrides[-1] == "trainer.total_training_steps=2"
    assert "+sis@_global_=grpo" in overrides
    assert "'trainer.logger=[console,file]'" in text, "text in brackets is no markup"
    assert "step 1  reward 0.500" in text
    assert {"metrics.jsonl", "curves.png"} <= {path.name for path in (tmp_path / "quickstart").iterdir()}


def test_a_failure_shows_the_end_of_the_log(fake_run):
    code, text, _ = fake_run(7, "".join(f"line {i}\n" for i in range(100)) + "SisConfigError: because\n")
    assert code == 7
    assert "exit code 7" in text and "SisConfigError: because" in text and "line 5\n" not in text


def test_routing_replay_brings_its_world_and_its_precision(fake_run):
    _, _, overrides = fake_run(0, "fine", typed=["+routing_replay@_global_=r3"])
    assert fake_run.worlds == [quickstart.tiny_world.ROUTING_WORLD]
    assert overrides[-1] == "+routing_replay@_global_=r3"
    assert set(quickstart.ROUTING_OVERRIDES) <= set(overrides)


def test_without_it_nothing_of_that(fake_run):
    _, _, overrides = fake_run(0, "fine")
    assert fake_run.worlds == [None]
    assert not set(quickstart.ROUTING_OVERRIDES) & set(overrides)

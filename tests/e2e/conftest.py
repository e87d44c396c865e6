"""One tiny world, and a way to train in it."""

import json
from pathlib import Path

import pytest

from verl_sis.cpu import tiny_world
from verl_sis.cpu.launch import run_verl
from verl_sis.cpu.tiny_world import ROUTING_WORLD

ROOT = Path(__file__).parents[2]
MINUTES = 60


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")
            # A run takes one to two minutes on two idle cores.
            item.add_marker(pytest.mark.timeout(20 * MINUTES))


@pytest.fixture(scope="session")
def world():
    """The quickstart's own world: built once, found by its key afterwards."""
    return tiny_world.build(ROOT / "runs" / "tiny_world", quiet=True)


@pytest.fixture(scope="session")
def routing_world():
    """The quickstart's world under routing replay: more experts and layers, so that engines differ in their choices."""
    return tiny_world.build(ROOT / "runs" / "tiny_world", ROUTING_WORLD, quiet=True)


@pytest.fixture
def train(world, tmp_path):
    """Trains with ``python -m verl.trainer.main_ppo`` and returns one dictionary of metrics per step."""

    def run(*overrides, name="run", check=True, variables=None, world=world):
        folder = tmp_path / name
        folder.mkdir()
        metrics = folder / "metrics.jsonl"
        result = run_verl(
            [
                "+cpu@_global_=tiny",
                "trainer.total_training_steps=3",
                "trainer.logger=[console,file]",
                "actor_rollout_ref.actor.optim.lr=3e-4",
                f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
                f"hydra.run.dir={folder / 'hydra'}",
                *overrides,
            ],
            log=folder / "verl.log",
            timeout=10 * MINUTES,
            variables={
                "VERL_SIS_TINY_WORLD": str(world),
                "VERL_FILE_LOGGER_PATH": str(metrics),
                **(variables or {}),
            },
        )
        log = (folder / "verl.log").read_text(errors="replace")
        if check:
            assert result.returncode == 0, log[-5000:]
            return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
        return result, log

    return run

"""``run.sh`` starts verl with the command line that the other tests compose, and Hydra reads it the same."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.recipes.composing import RECIPES, composed_at_once, expected, recipes, variants
from tests.subprocesses import output_of

SCRIPTS = sorted(RECIPES.glob("**/*.sh"))


def started(tmp_path, recipe, *arguments, **variables):
    """Run ``run.sh`` with a ``python`` that prints its arguments, one per line."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["bash", str(RECIPES / recipe / "run.sh"), *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: str(file.relative_to(RECIPES)))
def test_scripts_are_short_and_clean(script):
    assert len(script.read_text().splitlines()) <= 35
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


@pytest.mark.parametrize("recipe", [name for name in recipes() if name.startswith("math_")])
def test_settings_of_a_run(tmp_path, recipe):
    variant = variants(recipe)[0]
    here = started(tmp_path, recipe, variant, "--cfg", "job").stdout.splitlines()
    run = tmp_path / "runs" / recipe / variant / "seed_1"
    assert here[:5] == ["-m", "verl.trainer.main_ppo", "--config-dir", str(RECIPES), f"+{recipe}@_global_={variant}"]
    assert here[-2:] == ["--cfg", "job"]
    metrics = "ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"
    assert set(here[5:-2]) == {
        f"hydra.run.dir={run}",
        f"+{metrics}={run}/metrics.jsonl",
        f"data.folder={tmp_path}/data/math",
        "data.seed=1",
        f"trainer.project_name={recipe}",
        f"trainer.experiment_name={variant}",
        f"trainer.default_local_dir={run}/checkpoints",
        f"trainer.validation_data_dir={run}/validation",
    }
    chosen = {"RUN": "elsewhere", "SEED": "7", "VERL_SIS_DATA": "/my data", "MODEL": "/models/a b"}
    there = started(tmp_path, recipe, variant, "trainer.nnodes=2", **chosen).stdout.splitlines()
    assert {f"hydra.run.dir={tmp_path}/elsewhere", "data.seed=7", "data.folder=/my data"} <= set(there)
    assert "actor_rollout_ref.model.path=/models/a b" in there
    assert there[-1] == "trainer.nnodes=2"


def test_an_unknown_variant_is_refused_with_the_known_ones(tmp_path):
    for arguments in ([], ["grpo_siss"], ["recipe"]):
        done = started(tmp_path, "math_qwen3_8b", *arguments)
        assert done.returncode == 2
        assert "expected a variant" in done.stderr
        assert done.stderr.splitlines()[1:] == list(expected("math_qwen3_8b")["variants"])
        assert not done.stdout


def test_metrics_of_another_run_are_not_overwritten(tmp_path):
    metrics = tmp_path / "mine" / "metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text("{}\n")
    done = started(tmp_path, "math_qwen3_8b", "grpo", RUN="mine")
    assert done.returncode == 2
    assert "Type RUN=ANOTHER_FOLDER" in done.stderr
    metrics.write_text("")
    assert started(tmp_path, "math_qwen3_8b", "grpo", RUN="mine").returncode == 0


def test_the_command_line_is_what_the_tests_compose(tmp_path):
    """In a process of its own, to the point where verl prints its configuration."""
    groups = ["math_qwen3_8b/staleness@_global_=n16", "math_qwen3_8b/top_k@_global_=k100"]
    line = started(tmp_path, "math_qwen3_8b", "gspo_sis", *groups, "--cfg", "job").stdout.splitlines()
    printed = OmegaConf.create(output_of(line[1:]))
    overrides = [word for word in line[5:] if "=" in word]
    assert printed == composed_at_once("math_qwen3_8b", "gspo_sis", *overrides)
    assert printed.actor_rollout_ref.actor.policy_loss.sis.top_k == 100
    assert printed.data.train_batch_size == 4096
    path = Path(printed.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH)
    assert path == tmp_path / "runs" / "math_qwen3_8b" / "gspo_sis" / "seed_1" / "metrics.jsonl"

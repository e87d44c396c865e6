"""Each tiny twin of a math recipe trains one rollout by its own ``run.sh``: what it says is active, is."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from verl_sis.tables.runs import read_run

ROOT = Path(__file__).parents[2]
VARIANTS = json.loads((ROOT / "recipes" / "tiny" / "expected.json").read_text())["variants"]

UPDATES = 2

SHORT = (
    "trainer.total_training_steps=1",
    "trainer.test_freq=1",
    # 8 prompts x 8 responses, of which each update sees half.
    "data.train_batch_size=8",
    # Sixteen held-out problems, four of each level.
    "data.val_max_samples=16",
    "data.validation_shuffle=false",
)

OFTEN = {"grpo", "no_clip_sis", "no_is", "clip_cov", "icepop", "dapo_sis", "moe_dapo_sis_r3"}
"""A loss or correction of each kind. The others are their neighbours, or combine them: --long."""


@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in VARIANTS]
)
def test_a_twin_trains(variant, world, routing_world, tmp_path):
    log = tmp_path / "verl.log"
    with log.open("wb") as stream:
        code = subprocess.run(
            ["bash", ROOT / "recipes" / "tiny" / "run.sh", variant, *SHORT],
            cwd=tmp_path,
            env={**os.environ, "RUN": str(tmp_path / "run"), "SEED": "5"},
            stdout=stream,
            stderr=stream,
        ).returncode
    assert code == 0, log.read_text(errors="replace")[-5000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = {name: value for row in rows if row["step"] == 1 for name, value in row["data"].items()}
    assert math.isfinite(metrics["actor/grad_norm"]) and metrics["actor/grad_norm"] > 0.0
    assert_what_is_active(metrics, VARIANTS[variant])
    run = read_run(tmp_path / "run", variant)
    assert (run.method.sis is not None, run.seed, run.is_finished) == (VARIANTS[variant]["sis"], 5, True)


def assert_what_is_active(metrics, expected):
    """SIS and routing replay, by what they log; and kappa, which would show misaligned columns."""
    assert (metrics.get("actor/sis/active") == 1.0) == expected["sis"]
    assert ("actor/routing/disagreement" in metrics) == expected["r3"]
    if expected["sis"]:
        # The first update meets the old policy itself.
        inside = metrics["actor/sis/in_topk_rate_by_age/0"]
        assert metrics["actor/sis/accept_rate_by_age/0"] == pytest.approx(inside, abs=1e-3)
        assert abs(metrics["actor/sis/kappa"] - 1.0) <= 4.0 * metrics["actor/sis/kappa_se"] + 1e-3
        assert f"actor/sis/accept_rate_by_age/{UPDATES - 1}" in metrics
    if expected["r3"]:
        assert metrics["actor/routing/agreement"] > 0.5

"""The benchmark of routing replay at a tiny size: it runs, and its record holds the figures of the README."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        module = importlib.import_module("bench_routing_replay")
        patch.setattr(module, "QWEN3_30B_A3B", {**module.QWEN3_30B_A3B, "hidden_size": 64, "moe_intermediate_size": 32})
        path = tmp_path_factory.mktemp("bench") / "new" / "replay.json"
        sizes = ["--tokens=12", "--layers=2", "--rounds=2"]
        finished = CliRunner().invoke(module.app, [*sizes, f"--json={path}"], catch_exceptions=False)
    assert finished.exit_code == 0, finished.output
    assert "forward + backward" in finished.output
    return json.loads(path.read_text())


def test_bytes_per_token_of_the_30b_model(record):
    """48 layers x 8 experts in int16; one layer is widened to int64 at a time."""
    assert record["bytes_per_token"] == {"in transit": 768, "on the device": 768, "one layer, while in use": 64}


def test_ratios_are_of_the_same_rounds(record):
    assert len(record["seconds"]["with"]) == len(record["seconds"]["without"]) == 2
    assert record["ratio_min"] == min(record["seconds"]["with"]) / min(record["seconds"]["without"])
    assert record["peak_ratio"] == record["peak_bytes"]["with"] / record["peak_bytes"]["without"] > 0

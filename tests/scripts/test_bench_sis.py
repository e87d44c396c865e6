"""The benchmark at a tiny size: it runs, and its record has what a reader of the figures needs."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def bench_sis():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        module = importlib.import_module("bench_sis")
        # Here verl is on the CPU anyway, and a process of its own would import it once more.
        patch.setattr(module, "in_cpu_process", lambda function, *arguments: function(*arguments))
        yield module


@pytest.fixture(scope="module")
def record(bench_sis, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "new" / "sis.json"
    sizes = ["--tokens=12", "--vocab=600", "--k=3", "--k=5", "--rounds=2", "--sequences=3", "--chunk=2"]
    finished = CliRunner().invoke(bench_sis.app, [*sizes, f"--json={path}"], catch_exceptions=False)
    assert finished.exit_code == 0, finished.output
    assert "bytes between processes" in finished.output
    assert [file.name for file in path.parent.iterdir()] == [path.name], "no temporary file is left"
    return json.loads(path.read_text())


def test_it_says_what_was_measured_and_with_what(record):
    assert record["shape"] == {"tokens": 12, "vocab": 600, "sequences": 3, "chunk": 2, "device": "cpu"}
    assert record["rounds"] == 2
    assert set(record["environment"]) == {"python", "threads", "torch", "verl", "verl-sis", "tensordict"}
    assert set(record["targets"]) == {"old pass", "update pass", "peak memory", "bytes per token", "step time"}


def test_each_pass_is_there_for_each_dtype_k_and_way(record):
    ways = {"fp32": {"SIS", "straightforward"}, "bf16": {"SIS", "straightforward"}}
    expected = {("old pass", dtype, k, way) for dtype in ways for k in (3, 5) for way in ways[dtype]}
    ways["bf16"] |= {"SIS, float32 log-probs given", "its float32 log-sum-exp alone"}
    expected |= {("update pass", dtype, k, way) for dtype in ways for k in (3, 5) for way in ways[dtype]}
    found = [(row["pass"], row["dtype"], row["k"], row["way"]) for row in record["passes"]]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_ratios_come_from_the_times_of_the_same_rounds(record):
    for row in record["passes"]:
        assert len(row["extra_s"]) == len(row["verl_s"]) == 2
        assert row["ratio_min"] == pytest.approx(min(row["extra_s"]) / min(row["verl_s"]))
        assert row["ratio_median"] == pytest.approx(sum(row["extra_s"]) / sum(row["verl_s"]))


def test_peak_memory_is_measured_against_the_bound(record):
    for row in record["passes"]:
        assert row["peak_bound_bytes"] == 2 * 600 * 4 + 12 * row["k"] * 8
        assert row["peak_ratio"] == pytest.approx(row["peak_bytes"] / row["peak_bound_bytes"])
        if row["way"] == "straightforward":
            assert row["peak_bytes"] >= 12 * 600 * 4, "a float32 softmax of everything"


def test_sis_returns_no_bytes_per_token(record):
    moved = record["bytes"]
    assert moved["extra_per_token"] == 0
    assert moved["per_token"]["verl"] == moved["per_token"]["SIS"] > 4, "at least one log-prob per token"
    assert moved["straightforward_per_token"] == {"3": 36, "5": 60}
    assert 0 < moved["extra_per_update"] < 10_000


def test_step_time_alternates_and_leaves_the_first_steps_out(bench_sis, tmp_path, monkeypatch):
    commands = []

    def run(command, **_):
        commands.append(command)
        output = Path(next(word for word in command if word.startswith("--output=")).removeprefix("--output="))
        output.mkdir(parents=True)
        seconds = 4.0 if "--base" in command else 5.0
        rows = [{"step": step, "timing_s/step": 99.0 if step < 5 else seconds} for step in range(1, 9)]
        lines = [json.dumps({**row, "response_length/mean": 7.0}) + "\n" for row in rows]
        (output / "metrics.jsonl").write_text("".join(lines))

    monkeypatch.setattr(bench_sis.subprocess, "run", run)
    found = bench_sis.measure_step_time(tmp_path, pairs=2)
    assert ["--base" in command for command in commands] == [False, True, True, False]
    assert found["ratio_of_medians"] == 1.25
    assert found["ratio_of_pairs"] == [1.25, 1.25]
    assert found["steps_s"]["base"] == [[4.0] * 4] * 2
    assert found["response_length"] == {"SIS": [7.0, 7.0], "base": [7.0, 7.0]}


def test_the_two_passes_alone_are_timed_in_turn(bench_sis, monkeypatch, tmp_path):
    from tests.worker import harness

    worker = sys.modules["bench_worker"]
    monkeypatch.setattr(worker, "RESPONSES", 8)
    monkeypatch.setattr(worker, "MINI_BATCH", 4)
    found = worker.measure_worker_passes(2, harness.build_model_folder(tmp_path))
    for name, ways in found["seconds"].items():
        assert len(ways["SIS"]) == len(ways["base"]) == 2
        middle = {way: sum(values) / 2 for way, values in ways.items()}
        assert found["extra_s"][name] == pytest.approx(middle["SIS"] - middle["base"])

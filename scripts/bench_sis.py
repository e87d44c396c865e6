"""What SIS costs: extra time and memory beside verl's own work on the same logits, and bytes between processes.

    python scripts/bench_sis.py [--tokens 1024] [--vocab 151936] [--k 10 --k 50 --k 100] [--json FILE] [--step-time]

All times of one ratio are taken in one process, in turn, round after round; the table shows the ratio of the minima and
of the medians. What is timed stands in ``bench_jobs.py``. Where other work shares the cores, set OMP_NUM_THREADS=1: a
thread that has to wait for a core holds up all others.
"""

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from bench_jobs import MicroBatch, Shape, SisJobs, StraightforwardJobs
from bench_timing import Job, environment, peak_bytes, time_in_turn, write_json
from bench_worker import measure_worker_passes
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = {"old pass": 0.7, "update pass": 0.05, "peak memory": 1.0, "bytes per token": 0.0, "step time": 1.05}
RUN_OVERRIDES = ("trainer.total_training_steps=16", "trainer.val_before_train=false", "trainer.test_freq=-1")
WORKER_ROUNDS = 30
FIRST_STEP = 5
"""Steps before this one warm up and are left out of the step time."""


def jobs_of(batch: MicroBatch, ks: list[int]) -> tuple[dict[str, Job], dict[tuple[str, str, int], Job]]:
    """Verl's own work by pass, and what is added to it by pass, way and K."""
    base: dict[str, Job] = {"old pass": batch.verl_forward, "update pass": batch.verl_forward_backward}
    extra: dict[tuple[str, str, int], Job] = {}
    for k in ks:
        sis, straightforward = SisJobs(batch, k), StraightforwardJobs(batch, k)
        extra["old pass", "SIS", k] = sis.old_pass
        extra["old pass", "straightforward", k] = straightforward.old_pass
        extra["update pass", "SIS", k] = sis.update_pass
        if batch.logits.dtype != torch.float32:
            extra["update pass", "SIS, float32 log-probs given", k] = sis.update_pass_given_float32
            extra["update pass", "its float32 log-sum-exp alone", k] = sis.log_normalizer
        extra["update pass", "straightforward", k] = straightforward.update_pass
    return base, extra


def measure_passes(shape: Shape, name: str, ks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Extra time and memory of both passes for one dtype of logits: one record per pass, way and K."""
    base, extra = jobs_of(MicroBatch(shape, DTYPES[name]), ks)
    seconds = time_in_turn({**base, **extra}, rounds, shape.device)
    records = []
    for (which, way, k), job in extra.items():
        own, verl = seconds[which, way, k], seconds[which]
        bound = min(shape.chunk, shape.tokens) * shape.vocab * 4 + shape.tokens * k * 8
        peak = peak_bytes(job, shape.device)
        records.append(
            {"pass": which, "dtype": name, "k": k, "way": way, "extra_s": own, "verl_s": verl}
            | {"ratio_min": min(own) / min(verl), "ratio_median": statistics.median(own) / statistics.median(verl)}
            | {"peak_bytes": peak, "peak_bound_bytes": bound, "peak_ratio": peak / bound}
        )
    return records


def in_cpu_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in another process: verl settles on one platform per process, and this worker is on the CPU."""
    variables = {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with mock.patch.dict(os.environ, variables), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure_bytes(ks: list[int]) -> dict[str, Any]:
    """Serialised size of what real workers return per response token, with SIS and without."""
    sys.path.insert(0, str(ROOT))
    from tests.worker import harness

    harness.prepare_environment()
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        return _measure_bytes(harness, ks)


def _measure_bytes(harness: Any, ks: list[int]) -> dict[str, Any]:
    from verl_sis.core.statistics import PooledStatistics

    short, long, rows = 8, 72, 4
    with tempfile.TemporaryDirectory() as folder:
        model = harness.build_model_folder(Path(folder))
        workers = {
            "verl": harness.build_worker(harness.Settings(model=model, sis=None)),
            "SIS": harness.build_worker(harness.Settings(model=model, sis={"top_k": min(10, *ks)})),
        }
        sizes: dict[str, dict[str, list[int]]] = {name: {"old pass": [], "update pass": []} for name in workers}
        for name, worker in workers.items():
            for length in (short, long):
                rollout = harness.made_up_rollout([length] * rows)
                output = harness.old_pass(worker, rollout)
                metrics = harness.update(worker, rollout, harness.response_log_probs(output, rollout))
                sizes[name]["old pass"].append(len(pickle.dumps(output)))
                sizes[name]["update pass"].append(len(pickle.dumps(metrics)))
    per_token = {
        name: sum(large - small for small, large in of_worker.values()) / ((long - short) * rows)
        for name, of_worker in sizes.items()
    }
    return {
        "per_token": per_token,
        "extra_per_token": per_token["SIS"] - per_token["verl"],
        "extra_per_update": sizes["SIS"]["update pass"][0] - sizes["verl"]["update pass"][0],
        "statistics_per_micro_batch": len(pickle.dumps(PooledStatistics())),
        "straightforward_per_token": {str(k): 12 * k for k in ks},
    }


def measure_step_time(folder: Path, pairs: int) -> dict[str, Any]:
    """Step time of the quickstart with SIS and without, in alternating short runs."""
    runs: dict[str, list[list[dict[str, float]]]] = {"SIS": [], "base": []}
    for pair in range(pairs):
        # The order within a pair alternates too, so that a drift of the machine falls on both alike.
        for name in sorted(runs, reverse=pair % 2 == 1):
            output = folder / f"{pair}-{name}"
            command = ["bash", str(ROOT / "scripts" / "quickstart.sh"), f"--output={output}", *RUN_OVERRIDES]
            subprocess.run(command + ["--base"] * (name == "base"), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
            runs[name].append([row for row in rows if row["step"] >= FIRST_STEP])

    def medians(name: str, metric: str) -> list[float]:
        return [statistics.median(row[metric] for row in run) for run in runs[name]]

    seconds = {name: [[row["timing_s/step"] for row in run] for run in runs[name]] for name in runs}
    pooled = {name: statistics.median(step for run in seconds[name] for step in run) for name in runs}
    pair_medians = zip(medians("SIS", "timing_s/step"), medians("base", "timing_s/step"), strict=True)
    return {
        "steps_s": seconds,
        "ratio_of_medians": pooled["SIS"] / pooled["base"],
        "ratio_of_pairs": [sis / base for sis, base in pair_medians],
        # Two policies that learn differently answer at different lengths, which is no cost of SIS.
        "response_length": {name: medians(name, "response_length/mean") for name in runs},
    }


def print_passes(records: list[dict[str, Any]], shape: Shape, console: Console) -> None:
    """Print extra time and memory of both passes."""
    table = Table(
        title="extra time over verl's log-probs (update: their forward and backward), extra peak memory over one chunk "
        f"+ \\[tokens, K]; {shape.tokens} tokens, V = {shape.vocab}, chunk {shape.chunk}"
    )
    for header in ("pass", "logits", "K", "way", "ratio of minima", "of medians", "target", "peak MB", "of bound"):
        table.add_column(header, justify="left" if header in ("pass", "logits", "way") else "right")
    for record in records:
        target = f"{TARGETS[record['pass']]:.2f}" if record["way"] == "SIS" else ""
        table.add_row(
            *(record["pass"], record["dtype"], str(record["k"]), record["way"]),
            *(f"{record['ratio_min']:.3f}", f"{record['ratio_median']:.3f}", target),
            *(f"{record['peak_bytes'] / 1e6:.1f}", f"{record['peak_ratio']:.3f}"),
        )
    console.print(table)


def print_bytes(moved: dict[str, Any], console: Console) -> None:
    """Print what moves between processes."""
    table = Table(title="bytes between processes")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    for name, value in moved["per_token"].items():
        table.add_row(f"returned per response token, {name}", f"{value:.2f}")
    table.add_row("extra per response token, SIS (target 0)", f"{moved['extra_per_token']:.2f}")
    for k, value in moved["straightforward_per_token"].items():
        table.add_row(f"extra per response token, straightforward, K = {k}", str(value))
    table.add_row("extra per update, SIS: its metrics", str(moved["extra_per_update"]))
    table.add_row(
        "per micro-batch between data-parallel ranks, SIS: statistics", str(moved["statistics_per_micro_batch"])
    )
    console.print(table)


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Packed tokens of the micro-batch.")] = 1024,
    vocab: Annotated[int, typer.Option(min=8, help="Vocabulary size V.")] = 151_936,
    k: Annotated[list[int], typer.Option(help="K; repeat for several.")] = [10, 50, 100],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 9,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that the tokens are cut into.")] = 4,
    chunk: Annotated[int, typer.Option(min=1, help="sis.chunk_tokens.")] = 256,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
    step_time: Annotated[
        bool, typer.Option("--step-time", help="Also run the quickstart, with and without SIS.")
    ] = False,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs for --step-time.")] = 3,
) -> None:
    """Measure what SIS costs, as ratios to verl's own work in the same run."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    shape = Shape(tokens, vocab, sequences, chunk, device)
    record: dict[str, Any] = {
        "environment": environment(),
        "shape": asdict(shape),
        "rounds": rounds,
        "targets": TARGETS,
    }
    record["passes"] = [row for dtype in DTYPES for row in measure_passes(shape, dtype, k, rounds)]
    print_passes(record["passes"], shape, console)
    record["bytes"] = in_cpu_process(measure_bytes, k)
    print_bytes(record["bytes"], console)
    if step_time:
        record["step_time"] = measure_step_time(ROOT / "runs" / "bench", pairs)
        ratios = ", ".join(f"{ratio:.3f}" for ratio in record["step_time"]["ratio_of_pairs"])
        console.print(
            f"step time with SIS over without: {record['step_time']['ratio_of_medians']:.3f} (target "
            f"{TARGETS['step time']}); pair by pair {ratios}"
        )
        record["worker_passes"] = in_cpu_process(measure_worker_passes, WORKER_ROUNDS)
        extra = record["worker_passes"]["extra_s"]
        step = statistics.median(step for run in record["step_time"]["steps_s"]["base"] for step in run)
        console.print(
            f"of that, the two passes that SIS touches, measured alone: {1000 * extra['old pass']:+.0f} ms in the old "
            f"pass, {1000 * extra['update']:+.0f} ms in the update, {sum(extra.values()) / step:+.1%} of a step"
        )
    if json_file is not None:
        write_json(record, json_file)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()

"""Time and memory of reading a large study: made-up tables of the size that real ones have.

    python scripts/bench_report.py [--rows 10000000] [--layers 48] [--json FILE]

Rows are random, so they compress badly and take longer to read than real ones. Printed are the wall time of summing up
the study and of the whole report, also as a ratio to one plain read of the same columns, and the peak memory of all
processes together. The target is 10 million tokens within a minute and 2 GB.
"""

import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from verl_sis.core.by_k import grid_up_to
from verl_sis.records.read import TokenFile, open_study
from verl_sis.records.schema import Header
from verl_sis.records.write import write_tokens
from verl_sis.study.pool import pool_study
from verl_sis.study.report.write import write_report

KS = grid_up_to(100)
ROWS_PER_FILE = 1_000_000
LENGTH = 500
VOCABULARY = 150_000

app = typer.Typer(add_completion=False)


def made_up(rows: int, layers: int, seed: int) -> tuple[dict[str, np.ndarray], Header]:
    """Columns of a collected study of a mixture of experts, random.

    Args:
        rows: Tokens, in responses of ``LENGTH``.
        layers: Layers with experts; 0 for a dense model.
        seed: Of the numbers.
    """
    rng = np.random.default_rng(seed)
    log_prob = -rng.exponential(1.0, rows).astype(np.float32)
    columns: dict[str, np.ndarray] = {
        "sequence": np.arange(rows) // LENGTH,
        "position": np.arange(rows) % LENGTH,
        "turn": np.zeros(rows),
        "token": rng.integers(0, VOCABULARY, rows),
        "entropy": rng.random(rows, dtype=np.float32),
        "rollout_log_prob": log_prob,
        "rollout_rank": np.minimum(rng.geometric(0.5, rows) - 1, 99),
        "rollout_mass": rng.random((rows, len(KS)), dtype=np.float32),
        "rollout_mass_before": rng.random(rows, dtype=np.float32),
        "rollout_filtered": np.zeros(rows),
        "engine_moments": rng.random((rows, 3), dtype=np.float32),
    }
    columns["native_rank"] = columns["rollout_rank"]
    for name in ("old", "native", "again", "replay", "precise"):
        columns[f"{name}_log_prob"] = log_prob + 0.02 * rng.standard_normal(rows, dtype=np.float32)
    if not layers:
        columns.pop("replay_log_prob")
    for pair in ("engine", "replay", "floor") if layers else ("engine", "floor"):
        for what in ("log_envelope", "residual_mass", "acceptance"):
            columns[f"{pair}_{what}"] = rng.random((rows, len(KS)), dtype=np.float32)
    if layers:
        columns["layer_overlap"] = np.minimum(8, rng.integers(7, 300, (rows, layers)))
    return columns, Header("collect", KS, layers=tuple(range(layers)), experts_per_token=8 if layers else 0)


def write_study(study: Path, rows: int, layers: int, rows_per_file: int) -> None:
    """Write a study of ``rows`` tokens; whole files hold the same numbers."""
    columns, header = made_up(min(rows_per_file, rows), layers, seed=0)
    for number, start in enumerate(range(0, rows, rows_per_file)):
        if rows - start < rows_per_file:
            columns, header = made_up(rows - start, layers, seed=number)
        write_tokens(study / "tokens" / f"part-{number:05d}.parquet", columns, header)


def plain_read(files: list[TokenFile]) -> float:
    """Seconds to read every column once."""
    start = time.perf_counter()
    for file in files:
        for batch in file.batches(file.columns):
            batch.clear()
    return time.perf_counter() - start


@app.command()
def main(
    rows: Annotated[int, typer.Option(help="Tokens of the study.")] = 10_000_000,
    layers: Annotated[int, typer.Option(help="Layers with experts.")] = 48,
    path: Annotated[Path | None, typer.Option("--json", help="File for the record.")] = None,
) -> None:
    """Measure, and print a record."""
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study"
        # In a process of its own: its memory is not that of reading.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            executor.submit(write_study, study, rows, layers, ROWS_PER_FILE).result()
        record = measured(study, Path(folder) / "report")
    for name, value in record.items():
        typer.echo(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(scratch, path)


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Yields a dictionary whose ``GB`` becomes the largest memory of this process and its children, sampled."""
    found, over = {"GB": 0.0}, threading.Event()
    own = psutil.Process()

    def watch() -> None:
        while not over.wait(0.05):
            total = 0
            for process in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    # Proportional: pages that processes share count once.
                    total += process.memory_full_info().pss
            found["GB"] = max(found["GB"], total / 1e9)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def measured(study: Path, out: Path) -> dict[str, Any]:
    """Time and memory of one study."""
    files = open_study(study)
    read = plain_read(files)
    start = time.perf_counter()
    with peak_memory() as summing:
        pool = pool_study(files)
    summed = time.perf_counter() - start
    start = time.perf_counter()
    with peak_memory() as reporting:
        write_report([study], out)
    reported = time.perf_counter() - start
    return {
        "rows": pool.rows,
        "responses": pool.responses,
        "terms": len(pool.names),
        "bytes": sum(file.path.stat().st_size for file in files),
        "read_s": read,
        "sum_s": summed,
        "report_s": reported,
        "sum_over_read": summed / read,
        "report_over_read": reported / read,
        "sum_peak_GB": summing["GB"],
        "report_peak_GB": reporting["GB"],
    }


if __name__ == "__main__":
    app()

"""Time and memory of reading a large study: made-up tables of the size that real ones have.

    python scripts/bench_report.py [--rows 10000000] [--layers 0] [--json FILE]

Rows are random, so they compress badly and take longer to read than real ones. Printed are the wall time of summing up
the study and of the whole report, each as a ratio to one plain read of the same columns, and the peak memory: of this
process, and of the largest of those that share the files. The target is 10 million tokens within a minute and 2 GB.
"""

import json
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
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
    for pair in ("engine", "replay", "floor"):
        for what in ("log_envelope", "residual_mass", "acceptance"):
            columns[f"{pair}_{what}"] = rng.random((rows, len(KS)), dtype=np.float32)
    if layers:
        columns["layer_overlap"] = np.minimum(8, rng.integers(7, 300, (rows, layers)))
    return columns, Header("collect", KS, layers=tuple(range(layers)), experts_per_token=8 if layers else 0)


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
    layers: Annotated[int, typer.Option(help="Layers with experts.")] = 0,
    path: Annotated[Path | None, typer.Option("--json", help="File for the record.")] = None,
) -> None:
    """Measure, and print a record."""
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder) / "study"
        for number, start in enumerate(range(0, rows, ROWS_PER_FILE)):
            columns, header = made_up(min(ROWS_PER_FILE, rows - start), layers, seed=number)
            write_tokens(study / "tokens" / f"part-{number:05d}.parquet", columns, header)
        record = measured(study, Path(folder) / "report")
    for name, value in record.items():
        typer.echo(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}")
        scratch.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(scratch, path)


def measured(study: Path, out: Path) -> dict[str, Any]:
    """Time and memory of one study."""
    files = open_study(study)
    read = plain_read(files)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    pool = pool_study(files)
    summed = time.perf_counter() - start
    start = time.perf_counter()
    write_report([study], out)
    reported = time.perf_counter() - start
    return {
        "rows": pool.rows,
        "responses": pool.responses,
        "bytes": sum(file.path.stat().st_size for file in files),
        "read_s": read,
        "sum_s": summed,
        "report_s": reported,
        "sum_over_read": summed / read,
        "report_over_read": reported / read,
        "peak_GB_before": before / 1e6,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "peak_GB_of_largest_child": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
    }


if __name__ == "__main__":
    app()

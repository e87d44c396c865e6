"""From verl's metric log to one flat JSON object per step, and to a table on the terminal."""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = Mapping[str, float]
"""One step: verl's metric names to values, with ``step`` beside them."""

HELD_OUT = "held_out_reward"
"""Column computed here: mean held-out reward over the data sources that verl reports one by one."""

_VALIDATION_PREFIX = "val-core/"

COLUMNS = (
    ("step", "step", "{:.0f}"),
    ("reward", "critic/rewards/mean", "{:.3f}"),
    ("held-out", HELD_OUT, "{:.3f}"),
    ("accept", "actor/sis/accept_rate", "{:.3f}"),
    ("expect", "actor/sis/accept_rate_expected", "{:.3f}"),
    ("kappa", "actor/sis/kappa", "{:.3f}"),
    ("xi_K", "actor/sis/residual_mass/mean", "{:.1e}"),
    ("D", "actor/sis/D", "{:.3f}"),
    ("D_SIS", "actor/sis/D_sis", "{:.3f}"),
    ("k1", "actor/mismatch/k1", "{:.1e}"),
    ("k3", "actor/mismatch/k3", "{:.1e}"),
    ("|dlogp|", "actor/mismatch/abs_log_ratio/mean", "{:.1e}"),
    ("grad", "actor/grad_norm", "{:.2f}"),
    ("s", "timing_s/step", "{:.1f}"),
)
"""Header, metric and format of each column of the table."""

ROUTING_COLUMNS = (
    ("native", "actor/mismatch/native/k3", "{:.1e}"),
    ("floor", "actor/mismatch/floor/k3", "{:.1e}"),
    ("routes", "actor/routing/disagreement", "{:.1e}"),
)
"""Columns of a run under routing replay: k3 without replay, k3 of the trainer against itself, routes that differ."""

ABSENT = "-"


def read_verl_log(path: Path) -> list[dict[str, float]]:
    """Read the file of verl's "file" logger, complete or still growing.

    Args:
        path: Lines of ``{"step": n, "data": {name: value}}``; several lines of one step are merged.

    Returns:
        One flat row per step, in order of steps. Values that are not numbers are left out.
    """
    rows: dict[int, dict[str, float]] = {}
    if not path.exists():
        return []
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # verl is in the middle of writing it
        record = json.loads(line)
        row = rows.setdefault(record["step"], {"step": record["step"]})
        row.update({name: value for name, value in record["data"].items() if _is_number(value)})
    return [_with_held_out(rows[step]) for step in sorted(rows)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _with_held_out(row: dict[str, float]) -> dict[str, float]:
    """Add the mean over data sources; each has equally many held-out problems."""
    means = [value for name, value in row.items() if name.startswith(_VALIDATION_PREFIX) and "/mean@" in name]
    return {**row, HELD_OUT: sum(means) / len(means)} if means else row


def write_jsonl(rows: Iterable[Row], path: Path) -> None:
    """Write one object a line; the file appears complete or not at all.

    Args:
        rows: Steps.
        path: Target; its directory is made if missing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)


def format_cell(row: Row, metric: str, pattern: str) -> str:
    """Format one value, or `ABSENT` if the step does not have it."""
    return pattern.format(row[metric]) if metric in row else ABSENT


def format_step(row: Row) -> str:
    """One line about a step, for progress."""
    cells = [
        f"{header} {format_cell(row, metric, pattern)}"
        for header, metric, pattern in COLUMNS + ROUTING_COLUMNS
        if metric in row
    ]
    return "  ".join(cells)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print all steps.

    Args:
        rows: Steps, from `read_verl_log`.
        console: Where to.
    """
    table = Table(title="one row per step; metrics of verl, prefix actor/ left out")
    replayed = any(metric in row for row in rows for _, metric, _ in ROUTING_COLUMNS)
    columns = COLUMNS + (ROUTING_COLUMNS if replayed else ())
    for header, _, _ in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(format_cell(row, metric, pattern) for _, metric, pattern in columns))
    console.print(table)

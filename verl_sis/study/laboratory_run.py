"""Run the laboratory: tables, figures, and a record of what was run, into one directory."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import pandas

from verl_sis.study.laboratory import Settings, by_k, by_sequence, side_by_side
from verl_sis.study.laboratory_figures import FIGURES, draw

TABLES = {"side_by_side": side_by_side, "by_k": by_k, "by_sequence": by_sequence}
"""Name of each table, which is its CSV file, and what makes it."""


def run(settings: Settings, out: Path) -> Iterator[str]:
    """Run everything.

    Args:
        settings: Size of the laboratory.
        out: Directory; made if missing. Files of an earlier run are replaced, one by one, complete.

    Yields:
        A line about each file that was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    tables = {}
    for name, make in TABLES.items():
        tables[name] = make(settings)
        _write_csv(tables[name], out / f"{name}.csv")
        yield f"{out / name}.csv: {len(tables[name])} rows"
    for figure in FIGURES:
        draw(figure, tables[figure.table], out / f"{figure.name}.png")
        yield f"{out / figure.name}.png: {figure.question} (data: {figure.table}.csv)"
    versions = {name: version(name) for name in ("verl-sis", "torch", "pandas")}
    record = {"settings": asdict(settings), "versions": versions, "figures": {f.name: f.question for f in FIGURES}}
    _write_text(json.dumps(record, indent=1) + "\n", out / "laboratory.json")
    yield f"{out / 'laboratory.json'}: settings and versions"


def _write_csv(table: pandas.DataFrame, path: Path) -> None:
    _write_text(table.to_csv(index=False), path)


def _write_text(text: str, path: Path) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text)
    os.replace(scratch, path)

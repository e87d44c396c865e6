"""All tables and figures of a call, written at once: Markdown, CSV, LaTeX, PNG, and JSON for programs."""

import csv
import json
import re
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_sis.tables.captions import common_caption, protocol_rows, run_rows, setting_rows
from verl_sis.tables.cells import Matrix
from verl_sis.tables.curves import FIGURES, curves, records
from verl_sis.tables.figures import draw
from verl_sis.tables.paper_tables import table1, table2, table3, table5
from verl_sis.tables.questions import question3, question5, question5_correlations, question8
from verl_sis.tables.table import Table

MAKERS = (table1, table2, table3, table5, question3, question5, question5_correlations, question8)

FIGURE_TITLES = {
    "figure2": "Figure 2: training and held-out reward over optimizer steps, each algorithm alone and with SIS",
    "figure3": "Figure 3: acceptance, and divergence with and without SIS's unit weights, for each N",
    "figure4": "Figure 4: entropy, gradient norm and mismatch, SIS off and on, replay off and on",
}

_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    **{sign: "\\" + sign for sign in "&%$#_"},
}


def tex(text: str) -> str:
    """Escape a text for LaTeX; what its default fonts lack becomes a question mark.

    Args:
        text: Plain text.
    """
    return "".join(_TEX.get(sign, sign if sign.isascii() else "?") for sign in text)


def markdown(text: str) -> str:
    """Escape a text for a cell of a Markdown table.

    Args:
        text: Plain text.
    """
    return re.sub(r"([\\|*<>`])", r"\\\1", text)


def write_tables(matrix: Matrix, out: Path) -> list[Table]:
    """Compute and write everything; each file appears complete or not at all.

    Args:
        matrix: All cells.
        out: Directory; files of an earlier call are replaced.

    Returns:
        The tables.
    """
    common = common_caption(matrix)
    tables = [replace(table, caption=[*table.caption, *common]) for table in (make(matrix) for make in MAKERS)]
    out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".tables-", dir=out))
    try:
        _fill(matrix, tables, common, scratch)
        for file in sorted(file for file in scratch.rglob("*") if file.is_file()):
            target = out / file.relative_to(scratch)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)
    finally:
        shutil.rmtree(scratch)
    return tables


def _fill(matrix: Matrix, tables: Sequence[Table], common: Sequence[str], folder: Path) -> None:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("verl_sis.tables", "."),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(tex=tex, md=markdown)
    for table in tables:
        _write_csv(
            table.records, [key for column in table.columns for key in column.keys], folder / f"{table.name}.csv"
        )
        (folder / f"{table.name}.tex").write_text(environment.get_template("table.tex.j2").render(table=table))
    (folder / "figures").mkdir()
    (folder / "data").mkdir()
    for name in FIGURES:
        points = curves(matrix, name)
        _write_csv(records(points), _POINT_KEYS, folder / "data" / f"{name}.csv")
        draw(name, points, folder / "figures" / f"{name}.png")
    page = environment.get_template("tables.md.j2").render(
        tables=tables,
        figures=FIGURE_TITLES,
        common=common,
        runs=run_rows(matrix),
        protocols=protocol_rows(matrix),
        settings=setting_rows(matrix),
    )
    (folder / "tables.md").write_text(page)
    (folder / "tables.json").write_text(json.dumps(_programs(matrix, tables), indent=1, allow_nan=False) + "\n")


_POINT_KEYS = ("model", "task", "N", "replay", "method", "metric", "x", "mean", "se", "n", "not_finite")


def _write_csv(rows: Sequence[dict[str, Any]], keys: Sequence[str], path: Path) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, keys, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _programs(matrix: Matrix, tables: Sequence[Table]) -> dict[str, Any]:
    return {
        "at": matrix.at,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "caption": list(table.caption),
                "columns": {key: column.header for column in table.columns for key in column.keys},
                "rows": table.records,
                "missing": list(table.missing),
            }
            for table in tables
        ],
        "runs": [
            {
                "run": run.name,
                "model": run.model,
                "task": run.task,
                "method": run.method.label,
                "N": run.method.staleness,
                "replay": run.method.replay,
                "seed": run.seed,
                "other_seeds": run.other_seeds,
                "optimizer_steps": run.steps,
                "last_step": run.last_step,
                "protocol": run.protocol,
                "settings": run.settings,
                "versions": run.versions,
            }
            for run in matrix.runs
        ],
    }

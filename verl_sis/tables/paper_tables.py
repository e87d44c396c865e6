"""The paper's Tables 1, 2, 3 and 5 from our runs."""

from collections.abc import Callable

from verl_sis.tables.cells import Cell, Group, Matrix, compare
from verl_sis.tables.paper import PAPER_K
from verl_sis.tables.rows import (
    COMPARISON,
    COMPARISON_CAPTION,
    GROUP,
    MEAN_CAPTION,
    PaperColumn,
    comparison_cells,
    group_cells,
    missing,
    paper_name,
    unpaired,
)
from verl_sis.tables.runs import MATH
from verl_sis.tables.table import Column, Table, Value

FAMILY = ("GRPO", "DAPO", "GSPO")
"""Algorithms that the paper plugs SIS into."""

SWEEP = (10, 50, 100)
"""K of the paper's Table 3."""

_AVERAGE = Column("average", "Avg", "measured")
_SEEDS = Column("n", "n", "number")
_AVERAGE_CAPTION = (
    "Avg: mean of MATH-500, AMC23, AIME24 and AIME25 where a run has all four, else of all its data sources, each with "
    "the same weight."
)


def _measured_cells(cell: Cell | None) -> dict[str, Value]:
    return {"average": cell.average, "n": len(cell.runs)} if cell else {}


def table1(matrix: Matrix) -> Table:
    """Model by task: each algorithm alone and with SIS.

    Args:
        matrix: All cells.
    """
    paper, rows, absent = PaperColumn("Table 1", matrix.groups), [], []
    for group in matrix.groups:
        others = sorted({cell.method.base for cell in matrix.of(group)} - set(FAMILY), key=_place(matrix, group))
        for base in (*FAMILY, *others):
            alone = matrix.base(group, base)
            if alone is None and base in FAMILY:
                absent.append(missing(group, base, base, None))
            if alone or base in FAMILY:
                rows.append(_row1(paper, group, alone, alone.label if alone else base, base))
            for cell, label in _with_sis(matrix, group, base, absent):
                row = _row1(paper, group, cell, label, paper_name(cell.method) if cell else f"{base}+SIS")
                rows.append({**row, **comparison_cells(alone, cell)})
                absent += unpaired(alone, cell)
    sources = {source for cell in matrix.cells for scores in cell.scores.values() for source in scores.values}
    order = [source for source in MATH if source in sources] + sorted(sources - set(MATH))
    benchmarks = [Column(source, source, "measured") for source in order]
    columns = [*GROUP, Column("method", "method"), _SEEDS, *benchmarks, _AVERAGE, *COMPARISON, *paper.columns]
    caption = [MEAN_CAPTION, _AVERAGE_CAPTION, COMPARISON_CAPTION, *paper.caption]
    return Table("table1", "Table 1: each algorithm alone and with SIS", columns, rows, caption, absent)


def _place(matrix: Matrix, group: Group) -> Callable[[str], int]:
    """Order of algorithms as in the matrix."""
    order = [cell.method.base for cell in matrix.of(group)]
    return order.index


def _with_sis(matrix: Matrix, group: Group, base: str, absent: list[str]) -> list[tuple[Cell | None, str]]:
    """Cells under SIS with their labels; without one of the paper's K, a missing cell, which is noted."""
    cells = matrix.of(group, base, sis=True)
    found: list[tuple[Cell | None, str]] = [(cell, cell.label) for cell in cells]
    if base in PAPER_K and not any(paper_name(cell.method) for cell in cells):
        label = f"{base} + SIS (K={PAPER_K[base]})"
        absent.append(missing(group, label, base, PAPER_K[base]))
        found.append((None, label))
    return found


def _row1(paper: PaperColumn, group: Group, cell: Cell | None, label: str, name: str | None) -> dict[str, Value]:
    values: dict[str, Value] = {
        **group_cells(group),
        "method": label,
        **_measured_cells(cell),
        **paper.cells(group, name),
    }
    if cell:
        sources = {source for scores in cell.scores.values() for source in scores.values}
        values |= {source: cell.source(source) for source in sources}
    return values


VARIANTS = (
    ("w/o IS", "w/o IS", False),
    ("w/o clip", "w/o clip", False),
    ("GRPO", "GRPO", False),
    ("DAPO Clip-Higher", "DAPO", False),
    ("GSPO seq-level IS", "GSPO", False),
    ("CISPO", "CISPO", False),
    ("SIS vanilla", "w/o clip", True),
    ("SIS + GRPO", "GRPO", True),
    ("SIS + DAPO", "DAPO", True),
)
"""Rows of the paper's Table 2: its name, our name of the algorithm, with SIS or without."""

RELATIVE = (
    Column("points", "vs GRPO, points", "measured"),
    Column("percent", "vs GRPO, %", "number"),
    Column("paper_points", "paper vs GRPO, points", "number"),
    Column("paper_percent", "paper vs GRPO, %", "number"),
)


def table2(matrix: Matrix) -> Table:
    """The GRPO family: what clipping, importance sampling and SIS each do, relative to GRPO.

    Args:
        matrix: All cells.
    """
    paper, rows, absent = PaperColumn("Table 2", matrix.groups), [], []
    for group in matrix.groups:
        grpo = matrix.base(group, "GRPO")
        for name, base, sis in VARIANTS:
            cells: list[Cell | None] = [*matrix.of(group, base, sis=sis)]
            if group.replay == "off" and not any(cell and paper_name(cell.method) for cell in cells):
                absent.append(missing(group, name, base, PAPER_K.get(base, 10) if sis else None))
                cells.append(None)
            for cell in cells:
                in_paper = name if cell is None or paper_name(cell.method) else None
                label = f"{name} ({cell.label})" if cell and cell.label != name else name
                rows.append(
                    group_cells(group)
                    | {"variant": label, **_measured_cells(cell), **paper.cells(group, in_paper)}
                    | _relative(grpo, cell)
                    | _paper_relative(paper, group, in_paper)
                )
    columns = [*GROUP, Column("variant", "variant"), _SEEDS, _AVERAGE, *RELATIVE[:2], *paper.columns, *RELATIVE[2:]]
    caption = [
        MEAN_CAPTION,
        _AVERAGE_CAPTION,
        "Relative to GRPO: difference over common seeds in points, and that in per cent of GRPO's mean over these "
        "seeds. The paper's columns are computed from its averages in the same way: its own -0.92 % of w/o clip is the "
        "difference in points.",
        *paper.caption,
    ]
    return Table("table2", "Table 2: the GRPO family", columns, rows, caption, absent)


def _relative(grpo: Cell | None, cell: Cell | None) -> dict[str, Value]:
    if not grpo or not cell or cell is grpo:
        return {}
    result = compare(grpo, cell)
    if result is None:
        return {}
    common = [grpo.scores[seed].average for seed in grpo.scores if seed in cell.scores]
    level = sum(common) / len(common)
    return {"points": result.gain, "percent": 100 * result.gain.mean / level if level else None}


def _paper_relative(paper: PaperColumn, group: Group, name: str | None) -> dict[str, Value]:
    grpo, found = paper.value(group, "GRPO"), paper.value(group, name)
    if not grpo or not found or name == "GRPO":
        return {}
    points = found.value - grpo.value
    return {"paper_points": points, "paper_percent": 100 * points / grpo.value}


def table3(matrix: Matrix) -> Table:
    """The sweep over K, with what K does to acceptance and to the mass that the top-K misses.

    Args:
        matrix: All cells.
    """
    paper, rows, absent = PaperColumn("Table 3", matrix.groups), [], []
    for group in matrix.groups:
        found = {cell.method.base: 0 for cell in matrix.of(group, sis=True)}
        for base in dict.fromkeys((*FAMILY, *found)):
            cells = matrix.of(group, base, sis=True)
            have = {cell.method.sis.top_k for cell in cells if cell.method.sis and cell.method.sis.is_paper}
            entries: list[tuple[int, Cell | None]] = [
                (cell.method.sis.top_k, cell) for cell in cells if cell.method.sis
            ]
            if base in FAMILY and group.replay == "off":
                lacking = [k for k in SWEEP if k not in have]
                entries += [(k, None) for k in lacking]
                absent += [missing(group, f"{base} + SIS (K={k})", base, k) for k in lacking]
            for k, cell in sorted(entries, key=lambda entry: entry[0]):
                rows.append(_row3(paper, group, base, k, cell))
    columns = [
        *(*GROUP, Column("method", "method"), _SEEDS, _AVERAGE),
        Column("accept", "acceptance", "measured", 4),
        Column("residual", "residual mass", "measured", 5),
        *paper.columns,
    ]
    caption = [
        MEAN_CAPTION,
        _AVERAGE_CAPTION,
        "Acceptance and residual mass (mean over tokens of the policy's mass outside V_K): pooled over the tokens of a "
        "run up to the reported step, then mean ± standard error over seeds.",
        *paper.caption,
    ]
    return Table("table3", "Table 3: the sweep over K", columns, rows, caption, absent)


def _row3(paper: PaperColumn, group: Group, base: str, k: int, cell: Cell | None) -> dict[str, Value]:
    is_paper = cell is None or (cell.method.sis is not None and cell.method.sis.is_paper)
    row: dict[str, Value] = {
        **group_cells(group),
        "method": cell.label if cell else f"{base} + SIS (K={k})",
        **_measured_cells(cell),
        **paper.cells(group, f"{base}+SIS K={k}" if is_paper else None),
    }
    if cell:
        row["accept"] = cell.over_seeds("actor/sis/accept_rate")
        row["residual"] = cell.over_seeds("actor/sis/residual_mass/mean")
    return row


def table5(matrix: Matrix) -> Table:
    """GRPO with its clip against SIS without any.

    Args:
        matrix: All cells.
    """
    paper, rows, absent = PaperColumn("Table 5", matrix.groups), [], []
    for group in matrix.groups:
        clipped, unclipped = matrix.base(group, "GRPO"), matrix.of(group, "w/o clip", sis=True)
        name, other = "GRPO with clip", "GRPO+SIS without clip"
        if group.replay != "off" and not (clipped and unclipped):
            continue
        rows.append({**group_cells(group), "method": name, **_measured_cells(clipped), **paper.cells(group, name)})
        if clipped is None:
            absent.append(missing(group, name, "GRPO", None))
        if not unclipped:
            absent.append(missing(group, other, "w/o clip", PAPER_K["GRPO"]))
            rows.append({**group_cells(group), "method": other, **paper.cells(group, other)})
        for cell in unclipped:
            in_paper = other if cell.method.sis and cell.method.sis.is_paper else None
            values = _measured_cells(cell) | comparison_cells(clipped, cell) | paper.cells(group, in_paper)
            rows.append({**group_cells(group), "method": f"{other} ({cell.method.sis})", **values})
            absent += unpaired(clipped, cell)
    columns = [*GROUP, Column("method", "method"), _SEEDS, _AVERAGE, *COMPARISON, *paper.columns]
    caption = [MEAN_CAPTION, _AVERAGE_CAPTION, COMPARISON_CAPTION, *paper.caption]
    return Table("table5", "Table 5: GRPO with clip, and SIS without", columns, rows, caption, absent)

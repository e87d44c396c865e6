"""Questions that the paper's reviewers left open, answered from runs as far as the runs allow.

Q3: are gains larger than the variance between runs? Q5: does a smaller D explain accuracy, or only accompany it?
Q8: do a tiny top-K, and the exact envelope, change results?
"""

from collections.abc import Sequence
from typing import Any

from verl_sis.tables.cells import Cell, Group, Matrix, compare, mean_over_steps
from verl_sis.tables.paper import PAPER_K
from verl_sis.tables.problems import Problems, over_problems
from verl_sis.tables.rows import (
    COMPARISON,
    COMPARISON_CAPTION,
    GROUP,
    MEAN_CAPTION,
    comparison_cells,
    group_cells,
    unpaired,
)
from verl_sis.tables.runs import Run
from verl_sis.tables.statistics import SIGNIFICANCE, Paired, spearman, standard_deviation
from verl_sis.tables.table import Column, Table, Value

EXACT = 1e-5
"""Residual mass up to which the envelope is that of the whole vocabulary: float32 sums of it leave about 1e-7."""


def answer(result: Paired | None) -> str:
    """Whether a difference is larger than what seeds alone give, in words.

    Args:
        result: The comparison.
    """
    if result is None:
        return "no pair of seeds"
    if result.gain.n < 2:
        return "one pair: no answer"
    if result.smallest_p > SIGNIFICANCE:
        return f"cannot be shown with {result.gain.n} pairs"
    if result.p > SIGNIFICANCE:
        return "not shown"
    return "larger" if result.gain.mean > 0 else "smaller"


_ANSWER_CAPTION = (
    f"Answer: larger or smaller if p is at most {SIGNIFICANCE:g}; cannot be shown, if even the smallest p is above: at "
    "least six pairs are needed. Tests are not corrected for their number."
)


def question3(matrix: Matrix) -> Table:
    """Gains of SIS beside the spread between seeds.

    Args:
        matrix: All cells.
    """
    rows, notes = [], []
    for group in matrix.groups:
        for cell in matrix.of(group, sis=True):
            base = matrix.base(group, cell.method.base)
            if base is None:
                notes.append(f"{group}: {cell.label} has no base to compare with: no run of {cell.method.base} alone")
                continue
            notes += unpaired(base, cell)
            rows.append(_row3(group, base, cell))
    columns = [
        *(
            *GROUP,
            Column("method", "method"),
            Column("base", "base", "measured"),
            Column("sis", "with SIS", "measured"),
        ),
        *(Column("base_sd", "sd of base", "number"), Column("sis_sd", "sd with SIS", "number"), *COMPARISON),
        Column("problem_gain", "gain over problems", "number"),
        Column("problem_interval", "interval, seeds x problems", "interval"),
        *(Column("problems", "problems", "number"), Column("answer", "answer")),
    ]
    caption = [
        MEAN_CAPTION,
        "sd: standard deviation between seeds (n - 1).",
        COMPARISON_CAPTION,
        _problem_caption(rows),
        _ANSWER_CAPTION,
    ]
    return Table("q3", "Q3: are the gains larger than the variance between runs?", columns, rows, caption, notes)


def _row3(group: Group, base: Cell, cell: Cell) -> dict[str, Value]:
    spread = {name: [scores.average for scores in one.scores.values()] for name, one in (("base", base), ("sis", cell))}
    row: dict[str, Value] = {
        **group_cells(group),
        "method": cell.label,
        "base": base.average,
        "sis": cell.average,
        "base_sd": standard_deviation(spread["base"]),
        "sis_sd": standard_deviation(spread["sis"]),
        **comparison_cells(base, cell),
        "answer": answer(compare(base, cell)),
    }
    problems: Problems | None = over_problems(base, cell)
    if problems:
        row |= {"problem_gain": problems.gain, "problem_interval": problems.interval, "problems": problems.count}
    return row


def _problem_caption(rows: Sequence[dict[str, Value]]) -> str:
    if not any("problems" in row for row in rows):
        return (
            "Bootstraps are over seeds only: the runs hold no answers to single problems (trainer.validation_data_dir)."
        )
    return (
        "Over problems: mean difference of all problems, each with the same weight, not the mean of benchmarks; "
        "interval: crossed bootstrap over seeds and problems. Rows without it hold no answers to single problems."
    )


DIVERGENCE = {"D": "actor/sis/D", "D_sis": "actor/sis/D_sis", "accept": "actor/sis/accept_rate"}
"""Key of a column to verl's name of the metric."""


def question5(matrix: Matrix) -> Table:
    """Divergence, acceptance and held-out result of each run.

    Args:
        matrix: All cells.
    """
    rows = [_row5(cell, seed, run) for cell in matrix.cells for seed, run in cell.runs.items()]
    columns = [
        *(*GROUP, Column("method", "method"), Column("seed", "seed", "number"), Column("D", "D", "number", 4)),
        *(Column("D_sis", "D_SIS", "number", 4), Column("accept", "acceptance", "number", 4)),
        *(Column("average", "Avg", "number"), Column("not_finite", "not finite", "number")),
    ]
    caption = [
        "D: sum of |log w| over a response, mean over responses of a step, then over steps up to the reported one; "
        "D_SIS: the same over rejected tokens; acceptance: pooled over tokens. verl_sis logs them under SIS only. Not "
        "finite: logged values of these metrics that are NaN or infinite, and are left out.",
    ]
    lacking = {run.name: [name for name in DIVERGENCE.values() if not run.series(name)] for run in matrix.runs}
    absent = [f"{run}: no {', '.join(names)} in its log" for run, names in lacking.items() if names]
    return Table("q5", "Q5: divergence and accuracy of each run", columns, rows, caption, absent)


def _row5(cell: Cell, seed: int, run: Run) -> dict[str, Value]:
    until = cell.scores[seed].step
    values = [value for name in DIVERGENCE.values() for step, value in run.series(name).items() if step <= until]
    return {
        **group_cells(cell.group),
        "method": cell.label,
        "seed": seed,
        **{key: mean_over_steps(run, name, until) for key, name in DIVERGENCE.items()},
        "average": cell.scores[seed].average,
        "not_finite": sum(not abs(value) < float("inf") for value in values),
    }


def question5_correlations(matrix: Matrix) -> Table:
    """Rank correlations of divergence with the held-out result, within cells and between cells.

    Args:
        matrix: All cells.
    """
    rows = []
    for group in matrix.groups:
        cells = matrix.of(group, sis=True)
        for cell in cells:
            points = [_row5(cell, seed, run) for seed, run in cell.runs.items()]
            rows.append(_correlations(group, f"seeds of {cell.label}", points))
        means = [
            {key: found.mean if (found := cell.over_seeds(name)) else None for key, name in DIVERGENCE.items()}
            | {"average": cell.average.mean}
            for cell in cells
        ]
        if means:
            rows.append(_correlations(group, "methods (means over seeds)", means))
    columns = [
        *(*GROUP, Column("across", "across"), Column("n", "n", "number")),
        *(Column(f"rho_{key}", f"rho({name}, Avg)", "number") for key, name in _NAMES.items()),
    ]
    caption = [
        "Spearman's rank correlation of the columns of Q5 with Avg; none for fewer than three points or constant "
        "values. Across the seeds of one method nothing but chance differs; across methods the algorithm differs, too, "
        "so that a correlation there may come from anything else that the algorithm changes. With few points even "
        "|rho| near 1 is likely by chance (n = 3: |rho| = 1 in one of three cases). D_SIS is below D by construction, "
        "so that a smaller D_SIS under SIS shows nothing about accuracy. A correlation tells that D accompanies "
        "accuracy, not that it explains it.",
    ]
    return Table("q5_correlations", "Q5: does D go with accuracy?", columns, rows, caption)


_NAMES = {"D": "D", "D_sis": "D_SIS", "accept": "acceptance"}


def _correlations(group: Group, across: str, points: Sequence[dict[str, Any]]) -> dict[str, Value]:
    logged = [point for point in points if all(isinstance(point[key], float) for key in _NAMES)]
    averages = [point["average"] for point in logged]
    return {
        **group_cells(group),
        "across": across,
        "n": len(logged),
        **{f"rho_{key}": spearman([point[key] for point in logged], averages) for key in _NAMES},
    }


def is_exact(cell: Cell) -> bool:
    """Whether the top-K was the whole vocabulary, by the residual mass that was logged.

    Args:
        cell: With SIS.
    """
    logged = [value for run in cell.runs.values() for value in run.series("actor/sis/residual_mass/max").values()]
    return bool(logged) and all(abs(value) <= EXACT for value in logged)


def question8(matrix: Matrix) -> Table:
    """K = 1, the usual K and the exact envelope against each other.

    Args:
        matrix: All cells.
    """
    rows, absent = [], []
    for group in matrix.groups:
        for base in dict.fromkeys(cell.method.base for cell in matrix.of(group, sis=True)):
            cells = [cell for cell in matrix.of(group, base, sis=True) if cell.method.sis and cell.method.sis.is_paper]
            reference = _usual(base, cells)
            kinds = [_kind(cell, reference) for cell in cells]
            absent += [
                f"{group}: {base} + SIS with {name}; run it with actor_rollout_ref.actor.policy_loss.sis.top_k={top_k}"
                for name, top_k in (("K = 1", "1"), ("K = V", "VOCABULARY_SIZE"))
                if name not in kinds
            ]
            for cell, kind in zip(cells, kinds, strict=True):
                rows.append(_row8(group, cell, kind, reference))
    columns = [
        *(
            *GROUP,
            Column("method", "method"),
            Column("kind", "kind"),
            Column("n", "n", "number"),
            Column("average", "Avg", "measured"),
        ),
        *(
            Column("residual", "residual mass", "measured", 6),
            Column("accept", "acceptance", "measured", 4),
            *COMPARISON,
        ),
        Column("answer", "answer"),
    ]
    caption = [
        MEAN_CAPTION,
        "Usual: the paper's K of the algorithm where it was run, else the smallest K between the extremes. K = V: the "
        f"logged residual mass never exceeds {EXACT:g}, which is the exact envelope up to float32. Gain: against the "
        "usual K. If unit weights were wrong where the residual mass is large, K = 1 should differ from the usual K, "
        "and K = V should not be worse.",
        COMPARISON_CAPTION,
        _ANSWER_CAPTION,
    ]
    return Table("q8", "Q8: the falsifier, K = 1 and the exact envelope", columns, rows, caption, absent)


def _usual(base: str, cells: Sequence[Cell]) -> Cell | None:
    between = [cell for cell in cells if cell.method.sis and cell.method.sis.top_k > 1 and not is_exact(cell)]
    papers = [cell for cell in between if cell.method.sis and cell.method.sis.top_k == PAPER_K.get(base)]
    return next(iter(papers or between), None)


def _kind(cell: Cell, reference: Cell | None) -> str:
    if is_exact(cell):
        return "K = V"
    if cell.method.sis and cell.method.sis.top_k == 1:
        return "K = 1"
    return "usual" if cell is reference else "other K"


def _row8(group: Group, cell: Cell, kind: str, reference: Cell | None) -> dict[str, Value]:
    row: dict[str, Value] = {
        **group_cells(group),
        "method": cell.label,
        "kind": kind,
        "n": len(cell.runs),
        "average": cell.average,
        "residual": cell.over_seeds("actor/sis/residual_mass/mean"),
        "accept": cell.over_seeds("actor/sis/accept_rate"),
    }
    if reference and cell is not reference:
        row |= {**comparison_cells(reference, cell), "answer": answer(compare(reference, cell))}
    return row

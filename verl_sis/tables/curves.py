"""The data of the figures: metrics over optimizer steps, mean and standard error over the seeds of a cell."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from verl_sis.tables.cells import Cell, Matrix, mean_over_steps
from verl_sis.tables.statistics import measured

HELD_OUT = "held-out reward"
REWARD = "critic/rewards/mean"

_BY_AGE = re.compile(r"actor/sis/accept_rate_by_age/(\d+)")


@dataclass(frozen=True)
class Point:
    """One point of a curve.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        N: Optimizer steps on one rollout.
        replay: Routing replay.
        method: Label of the cell.
        metric: verl's name, or ``HELD_OUT``: the average of the tables, as a share.
        x: Optimizer step; for acceptance by age, the age: optimizer steps since the rollout.
        mean: Over the seeds with a finite value.
        se: Standard error; None for one seed.
        n: Number of these seeds.
        not_finite: Seeds whose value was NaN or infinite, left out.
    """

    model: str
    task: str
    N: int
    replay: str
    method: str
    metric: str
    x: int
    mean: float | None
    se: float | None
    n: int
    not_finite: int


FIGURES: dict[str, tuple[str, ...]] = {
    "figure2": (REWARD, HELD_OUT),
    "figure3": ("actor/sis/accept_rate", "actor/sis/accept_rate_by_age", "actor/sis/D", "actor/sis/D_sis"),
    "figure4": ("actor/entropy", "actor/grad_norm", "actor/mismatch/k3", "rollout_corr/k3_kl"),
}
"""Metrics of each figure."""


def curves(matrix: Matrix, figure: str) -> list[Point]:
    """All points of a figure.

    Args:
        matrix: All cells.
        figure: A key of ``FIGURES``.
    """
    return [point for cell in matrix.cells for metric in FIGURES[figure] for point in _points(cell, metric)]


def _points(cell: Cell, metric: str) -> Iterator[Point]:
    found = [_series(cell, seed, metric) for seed in cell.runs]
    for x in sorted({x for series in found for x in series}):
        values = [series[x] for series in found if x in series]
        finite = [value for value in values if math.isfinite(value)]
        mean = measured(finite)
        yield Point(
            *(cell.group.model, cell.group.task, cell.group.staleness, cell.group.replay, cell.label, metric, x),
            mean.mean if mean else None,
            mean.se if mean else None,
            len(finite),
            len(values) - len(finite),
        )


def _series(cell: Cell, seed: int, metric: str) -> dict[int, float]:
    run = cell.runs[seed]
    if metric == HELD_OUT:
        return {step: scores.average / 100 for step, scores in run.scores.items()}
    if metric == "actor/sis/accept_rate_by_age":
        names = {name: int(match[1]) for row in run.rows.values() for name in row if (match := _BY_AGE.fullmatch(name))}
        means = {age: mean_over_steps(run, name, run.last_step) for name, age in names.items()}
        return {age: mean for age, mean in means.items() if mean is not None}
    return run.series(metric)


def records(points: Sequence[Point]) -> list[dict[str, object]]:
    """Points as rows of a CSV file, six significant digits.

    Args:
        points: Of a figure.
    """
    return [
        {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in asdict(point).items()}
        for point in points
    ]

"""Runs become cells, one per model, task and method; runs that do not make one comparison are refused."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from verl_sis.errors import RunComparisonError
from verl_sis.tables.methods import Method
from verl_sis.tables.protocol import KEYS
from verl_sis.tables.runs import Run, Scores, reported
from verl_sis.tables.statistics import Measured, Paired, measured, paired


@dataclass(frozen=True)
class Group:
    """What a comparison of methods holds fixed.

    Attributes:
        model: Name of the model.
        task: Name of the task.
        staleness: N.
        replay: Routing replay.
    """

    model: str
    task: str
    staleness: int
    replay: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.model}, {self.task}, N = {self.staleness}, replay {self.replay}"


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed alone.

    Attributes:
        group: Model, task, N, replay.
        method: What ran.
        runs: By seed.
        scores: What each reports, by seed.
    """

    group: Group
    method: Method
    runs: dict[int, Run]
    scores: dict[int, Scores]

    @property
    def label(self) -> str:
        """The method, with a dagger (+) if a run did not reach its end."""
        return self.method.label + " (+)" * any(not run.is_finished for run in self.runs.values())

    @property
    def average(self) -> Measured:
        """Average over benchmarks, then over seeds."""
        found = measured([scores.average for scores in self.scores.values()])
        assert found is not None, "a cell has a run"
        return found

    def source(self, name: str) -> Measured | None:
        """One benchmark over seeds.

        Args:
            name: Of the data source.
        """
        return measured([scores.values[name] for scores in self.scores.values() if name in scores.values])

    def over_seeds(self, metric: str) -> Measured | None:
        """Mean of a metric over the steps of each run, then over seeds; see ``mean_over_steps``.

        Args:
            metric: verl's name.
        """
        means = [mean_over_steps(run, metric, self.scores[seed].step) for seed, run in self.runs.items()]
        return measured([mean for mean in means if mean is not None])


def mean_over_steps(run: Run, metric: str, until: int) -> float | None:
    """Mean of a metric up to a step, a rate of tokens weighted by its tokens; None if there is none.

    Args:
        run: The run.
        metric: verl's name.
        until: Optimizer step.
    """
    rows = [row for step, row in run.rows.items() if step <= until and math.isfinite(row.get(metric, math.nan))]
    weights = [row.get("actor/sis/tokens", 1.0) if metric in TOKEN_MEANS else 1.0 for row in rows]
    total = math.fsum(weights)
    return math.fsum(weight * row[metric] for weight, row in zip(weights, rows, strict=True)) / total if total else None


TOKEN_MEANS = ("actor/sis/accept_rate", "actor/sis/residual_mass/mean")
"""Metrics that are means over the tokens of a rollout, so that steps weigh as their tokens do."""


@dataclass(frozen=True)
class Matrix:
    """All cells of one call.

    Attributes:
        cells: In the order of tables.
        at: Which step is reported.
        mixed: Sentences on what was allowed to differ.
    """

    cells: tuple[Cell, ...]
    at: str
    mixed: tuple[str, ...]

    @property
    def groups(self) -> list[Group]:
        """In order."""
        return sorted(
            {cell.group for cell in self.cells},
            key=lambda group: (group.model, group.task, group.staleness, group.replay != "off", group.replay),
        )

    @property
    def runs(self) -> list[Run]:
        """By cell, then seed."""
        return [run for cell in self.cells for run in cell.runs.values()]

    def of(self, group: Group, base: str | None = None, sis: bool | None = None) -> list[Cell]:
        """Cells of a group.

        Args:
            group: The group.
            base: Name of the base algorithm; any without.
            sis: With or without SIS; both without.
        """
        return [
            cell
            for cell in self.cells
            if cell.group == group and base in (None, cell.method.base) and sis in (None, cell.method.sis is not None)
        ]

    def base(self, group: Group, base: str) -> Cell | None:
        """The cell of a base algorithm alone.

        Args:
            group: The group.
            base: Its name.
        """
        return next(iter(self.of(group, base, sis=False)), None)


def compare(first: Cell, second: Cell) -> Paired | None:
    """Second minus first, over their common seeds; None without one.

    Args:
        first: For example the base.
        second: For example with SIS.
    """
    seeds = sorted(set(first.scores) & set(second.scores))
    return paired([second.scores[seed].average - first.scores[seed].average for seed in seeds])


def make_matrix(runs: Sequence[Run], at: str, allow_mixed: Sequence[str], allow_unfinished: bool) -> Matrix:
    """Group runs, and refuse what is no comparison.

    Args:
        runs: In any order.
        at: "last", "best", or an optimizer step.
        allow_mixed: Keys of the protocol that may differ.
        allow_unfinished: Whether runs may have ended early.

    Raises:
        RunComparisonError: Runs differ in more than their methods, two of a cell have the same seed, a run ended early,
            or one has no finite result at the step.
    """
    _check_arguments(at, allow_mixed)
    _check_finished(runs, allow_unfinished)
    mixed = _check_protocols(runs, allow_mixed)
    grouped: dict[tuple[Group, Method], list[Run]] = defaultdict(list)
    for run in runs:
        group = Group(run.model, run.task, run.method.staleness, run.method.replay)
        grouped[group, run.method].append(run)
    order = sorted(grouped, key=lambda key: (key[0].model, key[0].task, key[1].order))
    cells = tuple(_cell(group, method, grouped[group, method], at) for group, method in order)
    if at == "last":
        _check_reported_steps(cells)
    return Matrix(cells, at, mixed)


def _check_arguments(at: str, allow_mixed: Iterable[str]) -> None:
    if at not in ("last", "best") and not at.isdecimal():
        raise RunComparisonError(f"--at takes last, best or an optimizer step, got {at!r}. Type --at last")
    unknown = sorted(set(allow_mixed) - set(KEYS))
    if unknown:
        raise RunComparisonError(f"--allow-mixed takes one of {', '.join(KEYS)}, got {', '.join(unknown)}")


def _check_finished(runs: Iterable[Run], allow_unfinished: bool) -> None:
    ended = [f"{run.name} (step {run.last_step} of {run.steps})" for run in runs if not run.is_finished]
    if ended and not allow_unfinished:
        raise RunComparisonError(
            f"expected runs that reached their end, but these did not (optimizer steps): {', '.join(sorted(ended))}. "
            "Let them end, leave them out, or type --allow-unfinished: they are marked then"
        )


def _check_protocols(runs: Iterable[Run], allow_mixed: Sequence[str]) -> tuple[str, ...]:
    """Sentences on the differences that are allowed."""
    values: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        scope = f"{run.model}, {run.task}"
        for key, value in run.protocol.items():
            values[key, scope][value].append(run.name)
        for key, value in run.settings.items():
            values[key, f"{run.method.base} on {scope}"][value].append(run.name)
    refused, allowed = [], []
    for (key, scope), found in sorted(values.items()):
        if len(found) > 1:
            listing = "; ".join(f"{value!r} in {', '.join(sorted(names))}" for value, names in sorted(found.items()))
            (allowed if key in allow_mixed else refused).append((key, f"{key} ({scope}): {listing}."))
    if refused:
        raise RunComparisonError(
            "expected one protocol for all runs on a model and task, and one choice of settings for an algorithm with "
            f"and without SIS, but runs differ in {' '.join(text for _, text in refused)} Name runs that agree, or "
            "type "
            + " ".join(f"--allow-mixed {key}" for key in dict.fromkeys(key for key, _ in refused))
            + ": every caption then says so"
        )
    return tuple(f"Mixed {text}" for _, text in allowed)


def _cell(group: Group, method: Method, runs: list[Run], at: str) -> Cell:
    by_seed: dict[int, Run] = {}
    for run in sorted(runs, key=lambda run: (run.seed, run.name)):
        if run.seed in by_seed:
            raise RunComparisonError(
                f"expected one run per seed of {method.label} ({group}), but {by_seed[run.seed].name} and {run.name} "
                f"both have data.seed={run.seed}. Leave one out, or run it with another data.seed"
            )
        by_seed[run.seed] = run
    return Cell(group, method, by_seed, {seed: reported(run, at) for seed, run in by_seed.items()})


def _check_reported_steps(cells: Iterable[Cell]) -> None:
    """The last validation comes after the last step, unless ``trainer.test_freq`` was changed on the way."""
    for cell in cells:
        for seed, scores in cell.scores.items():
            if cell.runs[seed].is_finished and scores.step < cell.runs[seed].steps:
                raise RunComparisonError(
                    f"{cell.runs[seed].name}: expected held-out results after its last optimizer step "
                    f"{cell.runs[seed].steps}, the last ones are of step {scores.step}. Type --at {scores.step}"
                )

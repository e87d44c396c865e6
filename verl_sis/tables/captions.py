"""What every caption says: protocol, reported step, what was mixed, versions; and the lists of runs and settings."""

import math
from collections import defaultdict
from collections.abc import Sequence

from verl_sis.tables.cells import Matrix
from verl_sis.tables.curves import FIGURES
from verl_sis.tables.protocol import LOGGED, PROTOCOL
from verl_sis.tables.runs import Run

_AT = {
    "last": "Reported: the last validation of each run.",
    "best": (
        "Reported: the validation with the highest average of each run (--at best), chosen on the same data that it "
        "reports, which flatters every method."
    ),
}


def common_caption(matrix: Matrix) -> list[str]:
    """Sentences for every table.

    Args:
        matrix: All cells.
    """
    at = _AT.get(matrix.at, f"Reported: the validation at optimizer step {matrix.at}.")
    protocols = [f"Protocol of {scope}: {values}." for scope, values in _protocols(matrix, IN_CAPTIONS)]
    return [at, *protocols, *matrix.mixed, *_unfinished(matrix), *_not_finite(matrix), _versions(matrix)]


IN_CAPTIONS = (
    *("reward", "validation_sampling", "evaluation_sets", "optimizer_steps", "training_sampling", "lengths", "dtype"),
)
"""Keys of the protocol that every caption states; all of them stand in a section of their own."""


def protocol_rows(matrix: Matrix) -> list[tuple[str, str]]:
    """The whole protocol of each model and task.

    Args:
        matrix: All cells.
    """
    return _protocols(matrix, (*PROTOCOL, *LOGGED))


def _protocols(matrix: Matrix, keys: Sequence[str]) -> list[tuple[str, str]]:
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for run in matrix.runs:
        for key in keys:
            found[f"{run.model}, {run.task}"][key].add(run.protocol[key])
    return [
        (scope, "; ".join(f"{key.replace('_', ' ')}: {_only(values)}" for key, values in protocol.items()))
        for scope, protocol in sorted(found.items())
    ]


def _only(values: set[str]) -> str:
    return next(iter(values)) if len(values) == 1 else "mixed, see below"


def _not_finite(matrix: Matrix) -> list[str]:
    """Counts of what means and curves leave out."""
    found = []
    for run in matrix.runs:
        for metric in USED:
            count = sum(not math.isfinite(value) for value in run.series(metric).values())
            found += [f"{count} of {metric} in {run.name}"] * bool(count)
        count = sum(not math.isfinite(scores.average) for scores in run.scores.values())
        found += [f"{count} validations in {run.name}"] * bool(count)
    return [f"Logged as NaN or infinite, left out of means and curves: {', '.join(found)}."] if found else []


USED = ("actor/sis/residual_mass/mean", *dict.fromkeys(metric for metrics in FIGURES.values() for metric in metrics))
"""Metrics that stand in tables or figures."""


def _unfinished(matrix: Matrix) -> list[str]:
    ended = [f"{run.name} ({run.last_step} of {run.steps})" for run in matrix.runs if not run.is_finished]
    cut = [run.name for run in matrix.runs if run.cut_lines]
    sentences = []
    if ended:
        sentences.append(f"(+): not finished, optimizer steps in brackets: {', '.join(ended)}.")
    if cut:
        sentences.append(f"The last line of the log was cut off, and is left out, in {', '.join(cut)}.")
    return sentences


def _versions(matrix: Matrix) -> str:
    found: dict[str, set[str]] = defaultdict(set)
    for run in matrix.runs:
        for package, version in run.versions.items():
            found[package].add(version)
    silent = sum(not run.versions for run in matrix.runs)
    if not found:
        return "Versions of packages: not recorded by these runs (run.json)."
    named = ", ".join(f"{package} {' and '.join(sorted(versions))}" for package, versions in sorted(found.items()))
    return f"Versions: {named}" + f"; {silent} of {len(matrix.runs)} runs did not record them" * bool(silent) + "."


def run_rows(matrix: Matrix) -> list[tuple[str, ...]]:
    """One row per run: name, model, task, N, replay, method, data.seed, other seeds, steps.

    Args:
        matrix: All cells.
    """
    return [_run_row(run) for run in matrix.runs]


def _run_row(run: Run) -> tuple[str, ...]:
    steps = str(run.steps) if run.is_finished else f"{run.last_step} of {run.steps}"
    method = run.method
    others = ", ".join(f"{name} {seed}" for name, seed in run.other_seeds.items())
    what = (run.name, run.model, run.task, str(method.staleness), method.replay, method.label)
    return (*what, str(run.seed), others, steps)


def setting_rows(matrix: Matrix) -> list[tuple[str, str]]:
    """Settings of each base algorithm that occurs.

    Args:
        matrix: All cells.
    """
    rows = dict.fromkeys(
        (
            f"{run.method.base} ({run.model}, {run.task})",
            "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in run.settings.items()),
        )
        for run in matrix.runs
    )
    return list(rows)

"""Answers to single problems: verl's dumps of its validation (``trainer.validation_data_dir``), one JSONL per step.

A line is one sample: ``input`` (the prompt), ``output``, ``gts``, ``score``, ``step``, the numbers of the reward
function (``acc``), and, from verl's V1 trainer, ``uid`` as PROMPT_SESSION_TURN. The data source is not among them.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_sis.errors import RunComparisonError, StudyFileError
from verl_sis.tables.cells import Cell
from verl_sis.tables.runs import Run
from verl_sis.tables.statistics import Interval, crossed_interval

Problem = tuple[str, str]
"""Prompt and ground truth: what a problem is recognised by in another run."""


@dataclass(frozen=True)
class Problems:
    """A comparison over problems and seeds.

    Attributes:
        gain: Mean difference in points, each problem with the same weight.
        interval: Of the crossed bootstrap; None for a single problem.
        count: Number of problems.
    """

    gain: float
    interval: Interval | None
    count: int


def over_problems(first: Cell, second: Cell) -> Problems | None:
    """Second minus first, problem by problem; None if a run of a pair holds no answers.

    Args:
        first: The base.
        second: What is compared with it.

    Raises:
        StudyFileError: A dump cannot be read.
        RunComparisonError: Two runs answered different problems.
    """
    rows, names = [], None
    for seed in sorted(set(first.runs) & set(second.runs)):
        a, b = (problem_means(cell.runs[seed], cell.scores[seed].step) for cell in (first, second))
        if a is None or b is None:
            return None
        names = names or sorted(a)
        if set(a) != set(names) or set(b) != set(names):
            raise RunComparisonError(
                f"expected answers to the same problems in all runs of {first.label} and {second.label} "
                f"({first.group}), but those of seed {seed} differ. Evaluate all runs on the same files"
            )
        rows.append([b[name] - a[name] for name in names])
    if not rows:
        return None
    differences = np.array(rows)
    return Problems(float(differences.mean()), crossed_interval(differences), differences.shape[1])


def problem_means(run: Run, step: int) -> dict[Problem, float] | None:
    """Mean over samples of each problem, in points; None if the run holds no answers of this step.

    Args:
        run: The run.
        step: Optimizer step.

    Raises:
        StudyFileError: The dump cannot be read.
    """
    if run.validation_dir is None:
        return None
    name = f"{step // run.method.staleness}.jsonl"
    # Runs are moved; what lies inside the run moves with it.
    places = [run.path / Path(run.validation_dir).name / name, Path(run.validation_dir) / name]
    path = next((place for place in places if place.is_file()), None)
    return _read(path) if path else None


def _read(path: Path) -> dict[Problem, float]:
    """Read; verl writes a line for each turn of a dialogue, all with the same result: the first counts."""
    samples: dict[Problem, list[float]] = defaultdict(list)
    sessions: set[tuple[str, str]] = set()
    try:
        with path.open(encoding="utf-8") as stream:
            records = [json.loads(line) for line in stream]
        for record in records:
            prompt, *session = str(record.get("uid", "")).rsplit("_", 2)
            if len(session) == 2:
                if (prompt, session[0]) in sessions:
                    continue
                sessions.add((prompt, session[0]))
            value = record["acc"] if record.get("acc") is not None else record["score"]
            samples[str(record["input"]), str(record["gts"])].append(100 * float(value))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StudyFileError(
            f"{path}: expected a dump of verl's validation, lines with input, gts and score, but {error!r}"
        ) from error
    if not all(math.isfinite(value) for values in samples.values() for value in values):
        raise StudyFileError(f"{path}: expected finite results, found others. Leave this run out")
    return {problem: math.fsum(values) / len(values) for problem, values in samples.items()}

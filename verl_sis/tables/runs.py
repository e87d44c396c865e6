"""Run directories: what ran (``.hydra/config.yaml``) and what it logged (``metrics.jsonl``)."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from verl_sis.errors import RunComparisonError, StudyFileError
from verl_sis.study.run_log_formats import read_jsonl
from verl_sis.tables.configuration import Configuration, read_configuration
from verl_sis.tables.methods import Method, method_of
from verl_sis.tables.protocol import protocol_of, settings_of

CONFIG = ".hydra/config.yaml"
METRICS = "metrics.jsonl"

SCORE = re.compile(r"val-core/(?P<source>.+)/(?P<kind>acc|reward)/mean@(?P<n>\d+)")
"""verl's name of a held-out mean: accuracy where the reward gives one, else the reward."""

MATH = ("math500", "amc23", "aime24", "aime25")
"""Benchmarks of the paper's average on mathematics."""

SEARCH = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")

_GENERIC = ("model", "huggingface", "hf", "actor", "checkpoint")


@dataclass(frozen=True)
class Scores:
    """Held-out results at one step.

    Attributes:
        step: Optimizer step.
        values: Points (100 times verl's mean) of each data source.
    """

    step: int
    values: dict[str, float]

    @property
    def average(self) -> float:
        """Mean of the four benchmarks of mathematics where all are there, else of all data sources."""
        sources = MATH if set(MATH) <= set(self.values) else sorted(self.values)
        return math.fsum(self.values[source] for source in sources) / len(sources)


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Path for people: below the argument that was named.
        path: Its directory.
        model: Name of the model.
        method: What ran.
        seed: ``data.seed``.
        other_seeds: Of the rollout engine and, under SIS, of the acceptance test.
        steps: Optimizer steps that the configuration asks for.
        settings: Of the base algorithm.
        protocol: Of training and evaluation.
        rows: Metrics by name, of each optimizer step that was logged. NaN where verl logged what is not finite.
        cut_lines: Lines at the end of the log that were not complete.
        versions: Of packages, from ``run.json`` where there is one.
        validation_dir: Where verl dumped its answers, or None.
    """

    name: str
    path: Path
    model: str
    method: Method
    seed: int
    other_seeds: dict[str, int]
    steps: int
    settings: dict[str, str]
    protocol: dict[str, str]
    rows: dict[int, dict[str, float]]
    cut_lines: int
    versions: dict[str, str]
    validation_dir: str | None

    @property
    def last_step(self) -> int:
        """Last optimizer step that was logged."""
        return max(self.rows)

    @property
    def is_finished(self) -> bool:
        """Whether the log reaches the end."""
        return self.last_step >= self.steps

    @cached_property
    def scores(self) -> dict[int, Scores]:
        """Held-out results by optimizer step."""
        found = {step: _scores(step, row) for step, row in self.rows.items()}
        return {step: scores for step, scores in found.items() if scores.values}

    @property
    def task(self) -> str:
        """From the data sources that it was evaluated on."""
        return task_of({source for scores in self.scores.values() for source in scores.values})

    def series(self, metric: str) -> dict[int, float]:
        """A metric by optimizer step, not finite values included.

        Args:
            metric: verl's name.
        """
        return {step: row[metric] for step, row in self.rows.items() if metric in row}


def _scores(step: int, row: dict[str, float]) -> Scores:
    matches = {match["source"]: value for name, value in row.items() if (match := SCORE.fullmatch(name))}
    return Scores(step, {source: 100 * value for source, value in sorted(matches.items())})


def task_of(sources: set[str]) -> str:
    """Name a task by its data sources.

    Args:
        sources: Names of data sources.
    """
    if sources & set(MATH):
        return "math"
    if sources & set(SEARCH):
        return "agentic search"
    if sources and all(source.startswith("tiny_arithmetic") for source in sources):
        return "tiny arithmetic"
    return "other: " + ", ".join(sorted(sources))


def model_name(path: str) -> str:
    """Name a model by its path: ``Qwen/Qwen3-8B-Base``, a directory, or an entry of the hub's cache.

    Args:
        path: ``actor_rollout_ref.model.path``.
    """
    parts = PurePosixPath(path.rstrip("/")).parts
    cached = [part for part in parts if part.startswith("models--")]
    if cached:
        return cached[-1].split("--")[-1]
    return "/".join(parts[-2:]) if parts[-1] in _GENERIC else parts[-1]


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """Read runs, and all runs below directories.

    Args:
        paths: Run directories, or directories with runs below them.

    Returns:
        Each run once, however often it was named; in no order that means anything.

    Raises:
        StudyFileError: A path holds no run, or a run cannot be read.
    """
    found: dict[Path, str] = {}
    for path in paths:
        configs = [path / CONFIG] if (path / CONFIG).is_file() else sorted(path.rglob(CONFIG))
        if not configs:
            raise StudyFileError(
                f"{path}: expected a run, a directory with {CONFIG} and {METRICS}, or runs below it, found none. A run "
                f"has both with hydra.run.dir=RUN trainer.logger=[console,file] and VERL_FILE_LOGGER_PATH=RUN/{METRICS}"
            )
        for config in configs:
            directory = config.parent.parent
            name = (Path(path.resolve().name) / directory.relative_to(path)).as_posix()
            found.setdefault(directory.resolve(), name)
    return [read_run(directory, name) for directory, name in sorted(found.items())]


def read_run(directory: Path, name: str) -> Run:
    """Read one run.

    Args:
        directory: Of the run.
        name: For people.

    Raises:
        StudyFileError: Its configuration or its log is absent, or lacks what tables need.
    """
    config = read_configuration(directory / CONFIG)
    method = method_of(config)
    rows, cut = _read_rows(directory / METRICS, method.staleness)
    run = Run(
        name=name,
        path=directory,
        model=model_name(str(config.need("actor_rollout_ref.model.path"))),
        method=method,
        seed=config.integer("data.seed", 0),
        other_seeds=_other_seeds(config, method),
        steps=config.integer("trainer.total_training_steps", 1) * method.staleness,
        settings=settings_of(config),
        protocol=protocol_of(config),
        rows=rows,
        cut_lines=cut,
        versions=_versions(directory / "run.json"),
        validation_dir=config.get("trainer.validation_data_dir"),
    )
    run.protocol.update(evaluation_sets=_evaluation_sets(run, config), optimizer_steps=str(run.steps))
    return run


def _other_seeds(config: Configuration, method: Method) -> dict[str, int]:
    keys = {"rollout": "actor_rollout_ref.rollout.seed"}
    if method.sis:
        keys["sis"] = "actor_rollout_ref.actor.policy_loss.sis.seed"
    return {name: config.integer(key, 0) for name, key in keys.items()}


def _read_rows(path: Path, staleness: int) -> tuple[dict[int, dict[str, float]], int]:
    """Metrics by optimizer step: a step of verl's trainer is one rollout with N optimizer steps."""
    if not path.is_file():
        raise StudyFileError(
            f"{path}: expected the log of verl's logger file beside {CONFIG}, found none. Type "
            f"trainer.logger=[console,file] and VERL_FILE_LOGGER_PATH=RUN/{METRICS} for each run, or leave this one out"
        )
    reading = read_jsonl(path)
    if reading is None:
        raise StudyFileError(f'{path}: expected lines {{"step": n, "data": {{name: number}}}}, found none')
    return {step * staleness: reading.rows[step] for step in sorted(reading.rows)}, reading.skipped


def _evaluation_sets(run: Run, config: Configuration) -> str:
    """Data sources with metric and number of samples; the same at every validation."""
    names = {
        step: " ".join(sorted(f"{m['source']} {m['kind']}/mean@{m['n']}" for m in map(SCORE.fullmatch, row) if m))
        for step, row in run.rows.items()
    }
    different = sorted(set(names.values()) - {""})
    if not different:
        raise StudyFileError(
            f"{run.path / METRICS}: expected held-out results val-core/SOURCE/acc/mean@n, found none. Run with "
            "trainer.test_freq=STEPS, or leave this run out"
        )
    if len(different) > 1:
        raise StudyFileError(
            f"{run.path / METRICS}: expected the same data sources at every validation, found {different}"
        )
    return different[0]


def _versions(path: Path) -> dict[str, str]:
    """Versions of packages, where the run wrote them down."""
    if not path.is_file():
        return {}
    try:
        record: Any = json.loads(path.read_text())
        versions = record.get("versions", {})
        return {str(name): str(version) for name, version in sorted(versions.items())}
    except (OSError, ValueError, AttributeError) as error:
        raise StudyFileError(
            f'{path}: expected {{"versions": {{package: version}}, ...}}, but it does not read so: {error}'
        ) from error


def reported(run: Run, at: str) -> Scores:
    """The held-out results that stand in the tables.

    Args:
        run: The run.
        at: "last", "best" (highest average; the first of equals), or an optimizer step.

    Raises:
        RunComparisonError: The run has none at that step, or a value is not finite or not a share.
    """
    if at == "best":
        finite = [scores for scores in run.scores.values() if math.isfinite(scores.average)]
        chosen = max(finite, key=lambda scores: scores.average, default=next(iter(run.scores.values())))
    else:
        step = max(run.scores) if at == "last" else int(at)
        if step not in run.scores:
            raise RunComparisonError(
                f"{run.name}: expected held-out results at optimizer step {step} (N = {run.method.staleness}), it has "
                f"them at {', '.join(map(str, run.scores))}. Type --at with one that all runs have, or --at last"
            )
        chosen = run.scores[step]
    _check(run, chosen)
    return chosen


def _check(run: Run, scores: Scores) -> None:
    is_share = "reward/mean@" not in run.protocol["evaluation_sets"]
    for source, value in scores.values.items():
        if not math.isfinite(value) or (is_share and not 0 <= value <= 100):
            raise RunComparisonError(
                f"{run.name}: expected the held-out result of {source} at optimizer step {scores.step} to be a finite "
                f"number{' in [0, 1]' * is_share}, found {value / 100}. Leave the run out, or choose --at"
            )

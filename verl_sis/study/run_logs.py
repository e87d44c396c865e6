"""The metric logs of verl runs, with verl_sis or without it, as one table per run.

    logs = find_run_logs(Path("outputs"))
    logs[0].table["critic/rewards/mean"]

Read are verl's loggers "tensorboard", "wandb" and "file", and the rows of this project's quickstart
(``verl_sis.study.run_log_formats``).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_sis.errors import StudyFileError
from verl_sis.study.run_log_formats import Reading, read_jsonl, read_tensorboard, read_wandb
from verl_sis.study.run_log_records import imported

if TYPE_CHECKING:
    import pandas

_EVENT_FILES = "events.out.tfevents."


@dataclass(frozen=True)
class RunLog:
    """Metrics of one run.

    Attributes:
        name: Name for people: verl's experiment name where the log has it, else that of its file or directory.
            Logs of one search that would share a name are named by their paths.
        source: File, or directory of event files.
        format: "tensorboard", "wandb" or "jsonl".
        table: One row per step (index ``step``, int64, ascending), one float64 column per metric, by name. NaN where
            a step lacks the metric, or logged NaN; infinities stay.
        config: The run's configuration where the format stores it, which only wandb does.
        skipped: Values and records that were not usable, such as the last line of a file that is still growing.
    """

    name: str
    source: Path
    format: str
    table: "pandas.DataFrame"
    config: dict[str, Any]
    skipped: int


def find_run_logs(path: Path) -> list[RunLog]:
    """Read a run's log, or all logs below a directory.

    Args:
        path: ``events.out.tfevents.*``, ``*.wandb`` or ``*.jsonl``; or a directory, searched without following links.
            All event files directly in one directory are one run. JSONL files of other content are passed over.

    Returns:
        One log per run and format, by path; empty if the directory holds none.

    Raises:
        StudyFileError: There is nothing at the path, the file is of no known kind, or a log is not readable or corrupt
            before its end; or the package that reads its format is not installed.
    """
    if path.is_dir():
        found = (_read(source) for source in _sources(path))
        return _told_apart([log for log in found if log is not None], path)
    if not path.exists():
        raise StudyFileError(f"{path}: expected a log or a directory, found nothing. Type: ls '{path.parent}'")
    log = _read(path)
    if log is None:
        raise StudyFileError(
            f'{path}: expected {_EVENT_FILES}*, *.wandb, or *.jsonl whose first line is {{"step": n, "data": '
            '{name: number}} or {"step": n, name: number}, found none of these. '
            "Name a file that verl's logger tensorboard, wandb or file wrote"
        )
    return [log]


def _sources(directory: Path) -> list[Path]:
    """Files that may be logs; for event files, their directories."""
    files = (file for file in directory.rglob("*") if file.is_file())
    return sorted({file.parent if file.name.startswith(_EVENT_FILES) else file for file in files})


def _read(source: Path) -> RunLog | None:
    """Read by name; None if the file is not a log."""
    if source.is_dir():
        events = sorted(file for file in source.iterdir() if file.name.startswith(_EVENT_FILES) and file.is_file())
        return _log(source, "tensorboard", read_tensorboard(events))
    if source.name.startswith(_EVENT_FILES):
        return _log(source, "tensorboard", read_tensorboard([source]))
    if source.suffix == ".wandb":
        return _log(source, "wandb", read_wandb(source))
    reading = read_jsonl(source) if source.suffix == ".jsonl" else None
    return _log(source, "jsonl", reading) if reading else None


def _log(source: Path, format: str, reading: Reading) -> RunLog:
    pandas = imported("pandas", source)
    steps = sorted(reading.rows)
    table = pandas.DataFrame(
        [reading.rows[step] for step in steps],
        index=pandas.Index(steps, dtype="int64", name="step"),
        columns=sorted({name for row in reading.rows.values() for name in row}),
        dtype="float64",
    )
    return RunLog(reading.name, source, format, table, reading.config, reading.skipped)


def _told_apart(logs: Sequence[RunLog], searched: Path) -> list[RunLog]:
    """Name by their paths those logs whose names are not unique."""
    count = Counter(log.name for log in logs)
    base = searched.absolute().parent
    return [
        log if count[log.name] == 1 else replace(log, name=log.source.absolute().relative_to(base).as_posix())
        for log in logs
    ]

"""The formats in which verl logs a run, each read into one plain form.

* ``jsonl``: verl's "file" logger, lines of ``{"step": n, "data": {name: value}}``, and flat rows
  ``{"step": n, name: value}``. verl's encoder writes NaN and infinities as ``null``, which reads as NaN.
* ``tensorboard``: event files. verl's logger stores 32-bit floats.
* ``wandb``: the ``.wandb`` file of a run. The wandb package no longer ships a reader, so that the log of records is
  decoded here; wandb's own protocol buffers decode the records.

The tail of a file that is still being written may be cut anywhere: complete records are read, the cut one is counted.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_sis.study.run_log_records import corrupt, decoded, event_records, imported, unreadable, wandb_records

_WANDB_OWN = ("_step", "_runtime", "_timestamp")
"""Names that wandb adds to every step."""


@dataclass
class Reading:
    """What one run logged, whatever the format.

    Attributes:
        name: The name that the log gives to its run, else that of its file or directory.
        rows: Metrics by name, of each step.
        config: The run's configuration where the format stores it.
        skipped: Values and records that were not usable.
    """

    name: str
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0

    def add(self, step: int, metrics: dict[str, float]) -> None:
        """Merge metrics into a step; of equal names the later call wins."""
        self.rows.setdefault(step, {}).update(metrics)


def read_jsonl(path: Path) -> Reading | None:
    """Read lines of JSON in either form; lines of one step are merged.

    Args:
        path: The file, complete or still growing.

    Returns:
        The log, or None if the first complete line is of neither form. A flat row must hold numbers only to count as
        one: verl's dumps of rollouts have a step, too, beside their texts.

    Raises:
        StudyFileError: The file is not readable, or a later line is of neither form.
    """
    reading = Reading(path.stem)
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, 1):
                if line.isspace():
                    continue
                row = _json_row(line, numbers_only=not reading.rows)
                if row is not None:
                    reading.add(*row)
                elif not line.endswith(b"\n"):
                    reading.skipped += 1
                elif not reading.rows:
                    return None
                else:
                    raise corrupt(path, 'a row {"step": n, ...} as above', f"other text in line {number}")
    except OSError as error:
        raise unreadable(path, error) from error
    return reading if reading.rows else None


def _json_row(line: bytes, numbers_only: bool) -> tuple[int, dict[str, float]] | None:
    """Step and metrics of a line, complete or not; None if it has neither form."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    step = record.pop("step", None)
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
        return None
    nested = record.get("data")
    values = nested if isinstance(nested, dict) else record
    metrics = {name: number for name, value in values.items() if (number := _as_number(value)) is not None}
    if values is record and numbers_only and (not metrics or len(metrics) < len(record)):
        return None
    return step, metrics


def _as_number(value: Any) -> float | None:
    """A JSON value as a metric; None if it is not a number. Truth values count: tensorboard stores them as numbers."""
    if value is None:
        return math.nan
    return float(value) if isinstance(value, int | float) else None


def read_tensorboard(files: Sequence[Path]) -> Reading:
    """Read the scalars of one run, each logged as a plain value or as a tensor of one number.

    Args:
        files: All event files of the run; of a step that was logged twice, the later time wins.

    Returns:
        The log.

    Raises:
        StudyFileError: A file is not readable or not an event file, or tensorboard is not installed.
    """
    event_type = imported("tensorboard.compat.proto.event_pb2", files[0]).Event
    tensors = imported("tensorboard.util.tensor_util", files[0])
    reading = Reading(files[0].absolute().parent.name)
    scalars: list[tuple[float, int, str, float]] = []
    for path in files:
        records, is_cut = event_records(path)
        reading.skipped += is_cut
        for event in decoded(event_type, records, path):
            for value in event.summary.value:
                number = _scalar(value, tensors)
                if number is not None:
                    scalars.append((event.wall_time, event.step, value.tag, number))
    for _, step, tag, number in sorted(scalars, key=lambda scalar: scalar[0]):
        reading.add(step, {tag: number})
    return reading


def _scalar(value: Any, tensors: Any) -> float | None:
    """A summary's number; None for texts, histograms, images."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor":
        return None
    array = tensors.make_ndarray(value.tensor)
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else None


def read_wandb(path: Path) -> Reading:
    """Read the history and the configuration of a wandb run.

    Args:
        path: ``run-ID.wandb`` of an offline or online run. While a run lasts, wandb writes whole blocks of 32 KiB only.

    Returns:
        The log. Tables and histograms are left out; ``skipped`` includes values in wandb's experimental encoding.

    Raises:
        StudyFileError: The file is not readable, corrupt or not wandb's, or wandb is not installed.
    """
    record_type = imported("wandb.proto.wandb_internal_pb2", path).Record
    reading = Reading(path.stem.removeprefix("run-"))
    records, is_cut = wandb_records(path)
    reading.skipped += is_cut
    for record in decoded(record_type, records, path):
        kind = record.WhichOneof("record_type")
        if kind == "run":
            reading.name = record.run.display_name or reading.name
            _update_config(reading, record.run.config)
        elif kind == "config":
            _update_config(reading, record.config)
        elif kind == "history":
            _add_history(reading, record.history)
    return reading


def _update_config(reading: Reading, config: Any) -> None:
    for item in config.update:
        name = item.key or ".".join(item.nested_key)
        if name != "_wandb":
            reading.config[name] = json.loads(item.value_json)


def _add_history(reading: Reading, history: Any) -> None:
    step, metrics = history.step.num, {}
    for item in history.item:
        # Metrics have one name; several are the fields of a table or a histogram.
        name, *fields = item.nested_key or [item.key]
        if not item.value_json:
            reading.skipped += 1
        elif name == "_step":
            step = int(item.value_json)
        elif not fields and name not in _WANDB_OWN and (number := _as_number(json.loads(item.value_json))) is not None:
            metrics[name] = number
    if metrics:
        reading.add(step, metrics)

"""Contexts: at a sample of tokens, an old and a current policy over the old one's top-K, for the estimator laboratory.

Files of a study lie in ``contexts/``, each with one pair of policies (``verl_sis.records.schema.PAIRS``), and have the
columns

    sequence, position, token   as in the token table
    age                         int16, optimizer updates of the rollout before; 0 outside of training
    ids                         int32 [K], the old policy's top-K by decreasing probability
    old_log_prob                float32 [K], nats
    current_log_prob            float32 [K], log pi of the current policy at the same ids, nats
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_sis.errors import SisShapeError, StudyFileError
from verl_sis.records.schema import FOOTER_KEY, PAIRS
from verl_sis.records.write import write_table

CONTEXTS_FORMAT = "verl_sis.contexts"
CONTEXTS_VERSION = 1

_SCALARS = {
    "sequence": pyarrow.int64(),
    "position": pyarrow.int32(),
    "token": pyarrow.int32(),
    "age": pyarrow.int16(),
}
_BY_ENTRY = {"ids": pyarrow.int32(), "old_log_prob": pyarrow.float32(), "current_log_prob": pyarrow.float32()}


@dataclass(frozen=True)
class Contexts:
    """Contexts of one pair of policies, of all files of a study.

    Attributes:
        sequence: int64 ``[N]``, number of the response; unique within a file, not among files.
        position: int32 ``[N]``, index of the token in its response, from 0.
        token: int32 ``[N]``, id of the sampled token.
        age: int16 ``[N]``, optimizer updates of the rollout before; 0 outside of training.
        ids: int32 ``[N, K]``, the old policy's top-K by decreasing probability.
        old_log_prob: float32 ``[N, K]``, nats.
        current_log_prob: float32 ``[N, K]``, log pi of the current policy at ``ids``, nats.
    """

    sequence: np.ndarray
    position: np.ndarray
    token: np.ndarray
    age: np.ndarray
    ids: np.ndarray
    old_log_prob: np.ndarray
    current_log_prob: np.ndarray


def write_contexts(path: Path, pair: str, columns: Mapping[str, np.ndarray]) -> int:
    """Write the contexts of one pair of policies; the file appears complete or not at all.

    Args:
        path: Target, its directory made if missing.
        pair: Name of the pair.
        columns: All columns of the module's table, ``[N]`` or ``[N, K]``.

    Returns:
        Size of the file in bytes.

    Raises:
        SisShapeError: If a column is missing, unknown or of another shape.
    """
    if set(columns) != set(_SCALARS) | set(_BY_ENTRY) or pair not in PAIRS:
        raise SisShapeError(f"contexts of a pair of {PAIRS}: got pair {pair!r} with columns {sorted(columns)}")
    shape = np.shape(columns["ids"])
    fields, arrays = [], []
    for name, kind in {**_SCALARS, **_BY_ENTRY}.items():
        values = np.asarray(columns[name])
        if len(shape) != 2 or values.shape != (shape if name in _BY_ENTRY else shape[:1]):
            raise SisShapeError(f"{name} of contexts has shape {values.shape}, and ids {shape}")
        array = pyarrow.array(np.ascontiguousarray(values).reshape(-1), type=kind)
        if name in _BY_ENTRY:
            array = pyarrow.FixedSizeListArray.from_arrays(array, shape[1])
        arrays.append(array)
        fields.append(pyarrow.field(name, array.type, nullable=False))
    header = {"format": CONTEXTS_FORMAT, "version": CONTEXTS_VERSION, "pair": pair}
    schema = pyarrow.schema(fields, metadata={FOOTER_KEY: json.dumps(header).encode()})
    return write_table(path, pyarrow.Table.from_arrays(arrays, schema=schema))


def read_contexts(study: Path) -> dict[str, Contexts]:
    """Put together the contexts of a study.

    Args:
        study: Directory with ``contexts/`` inside.

    Returns:
        By pair, in the order of ``PAIRS``; only pairs that have a file, and so none without ``contexts/``.

    Raises:
        StudyFileError: If a file is damaged, holds no contexts, is of a newer version, or has another K than the other
            files of its pair.
    """
    parts: dict[str, list[Contexts]] = {}
    first: dict[str, Path] = {}
    for path in sorted((study / "contexts").glob("*.parquet")):
        # Names with a dot in front are files that are being written.
        if path.name.startswith("."):
            continue
        pair, part = _read(path)
        known = parts.setdefault(pair, [])
        if known and part.ids.shape[1] != known[0].ids.shape[1]:
            raise StudyFileError(
                f"{path} has K = {part.ids.shape[1]}, but {first[pair]} has K = {known[0].ids.shape[1]}: they are not "
                "of one study. Give each a directory of its own"
            )
        first.setdefault(pair, path)
        known.append(part)
    return {pair: _joined(parts[pair]) for pair in PAIRS if pair in parts}


def _read(path: Path) -> tuple[str, Contexts]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            pair = _pair(path, file.schema_arrow.metadata or {})
            _check_columns(path, file.schema_arrow)
            table = file.read()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise StudyFileError(
            f"{path} is truncated, damaged or not parquet ({error}). Writers put files in place only once they are "
            "complete, so it was damaged later: copy it anew, or delete it"
        ) from error
    return pair, Contexts(**{name: _array(table.column(name)) for name in table.column_names})


def _pair(path: Path, metadata: dict[bytes, bytes]) -> str:
    try:
        header: dict[str, Any] = json.loads(metadata[FOOTER_KEY])
        if header["format"] != CONTEXTS_FORMAT:
            raise KeyError
    except (KeyError, TypeError, ValueError) as error:
        raise StudyFileError(
            f"{path} holds no contexts of verl_sis: its footer does not say {CONTEXTS_FORMAT!r}. Remove it from "
            "contexts/"
        ) from error
    version, pair = header.get("version"), header.get("pair")
    if not isinstance(version, int) or not 1 <= version <= CONTEXTS_VERSION:
        raise StudyFileError(
            f"{path} has version {version} of contexts, and this verl_sis reads 1 to {CONTEXTS_VERSION}. Read it with "
            "the verl_sis that wrote it, or a later one"
        )
    if pair not in PAIRS:
        raise StudyFileError(f"{path} has contexts of the pair {pair!r}, expected one of {PAIRS}. Remove it")
    return pair


def _check_columns(path: Path, schema: pyarrow.Schema) -> None:
    if sorted(schema.names) != sorted([*_SCALARS, *_BY_ENTRY]):
        raise StudyFileError(f"{path} has the columns {schema.names}, expected {[*_SCALARS, *_BY_ENTRY]}")
    ids = schema.field("ids").type
    # Where ids are no list of fixed length, they fail their own check below, whatever K is put here.
    k = ids.list_size if pyarrow.types.is_fixed_size_list(ids) else 1
    for name, kind in {**_SCALARS, **_BY_ENTRY}.items():
        expected = pyarrow.list_(kind, k) if name in _BY_ENTRY else kind
        if schema.field(name).type != expected:
            raise StudyFileError(f"{path}: column {name!r} is {schema.field(name).type}, expected {expected}")


def _array(column: pyarrow.ChunkedArray) -> np.ndarray:
    values: Any = column.combine_chunks()
    if not pyarrow.types.is_fixed_size_list(values.type):
        return values.to_numpy(zero_copy_only=False)
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), values.type.list_size)


def _joined(parts: list[Contexts]) -> Contexts:
    names = [field.name for field in fields(Contexts)]
    return Contexts(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

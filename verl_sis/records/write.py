"""Write per-token tables: checked against the schema, complete or not at all."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_sis.errors import SisShapeError
from verl_sis.records.schema import BY_NAME, COLUMNS, FOOTER_KEY, Header, arrow_type, width_of

ROWS_PER_GROUP = 1 << 15
"""Rows that a reader holds at a time; with a grid of 7 K and three pairs about 10 MB."""


def tokens_table(columns: Mapping[str, np.ndarray], header: Header) -> pyarrow.Table:
    """Lay arrays out as the schema has it.

    Args:
        columns: By name; ``[N]``, ``[N, C]`` for C values of K, or ``[N, L]`` for L layers.
        header: Facts of all rows.

    Returns:
        The table, header in its metadata.

    Raises:
        SisShapeError: If a column is unknown, missing or of another shape, or the rows of a response are apart.
    """
    unknown = sorted(set(columns) - set(BY_NAME))
    missing = sorted(column.name for column in COLUMNS if column.required and column.name not in columns)
    if unknown or missing:
        raise SisShapeError(f"columns of a token table: unknown {unknown}, missing {missing}")
    rows = len(columns["sequence"])
    fields, arrays = [], []
    for column in COLUMNS:
        if column.name not in columns:
            continue
        values = np.asarray(columns[column.name])
        width = width_of(column, header)
        expected = (rows,) if width is None else (rows, width)
        if values.shape != expected:
            raise SisShapeError(f"{column.name} must be {expected}, got {values.shape}")
        flat = pyarrow.array(np.ascontiguousarray(values).reshape(-1), type=column.type)
        if width is not None:
            flat = pyarrow.FixedSizeListArray.from_arrays(flat, values.shape[1])
        arrays.append(flat)
        fields.append(pyarrow.field(column.name, arrow_type(column, header), nullable=False))
    _check_order(np.asarray(columns["sequence"]), np.asarray(columns["position"]))
    schema = pyarrow.schema(fields, metadata={FOOTER_KEY: header.to_bytes()})
    return pyarrow.Table.from_arrays(arrays, schema=schema)


def write_tokens(path: Path, columns: Mapping[str, np.ndarray], header: Header) -> int:
    """Write one file; it appears under its name once it is complete.

    Args:
        path: Target, its directory made if missing.
        columns: As ``tokens_table`` takes them.
        header: Facts of all rows.

    Returns:
        Size of the file in bytes.

    Raises:
        SisShapeError: As ``tokens_table`` does; nothing is written then.
    """
    return write_table(path, tokens_table(columns, header))


def write_table(path: Path, table: pyarrow.Table) -> int:
    """Write any table as one compressed parquet file, in one step.

    Args:
        path: Target, its directory made if missing.
        table: What to write.

    Returns:
        Size of the file in bytes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    options: dict[str, Any] = {"compression": "zstd", "row_group_size": ROWS_PER_GROUP}
    try:
        pyarrow.parquet.write_table(table, scratch, **options)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path.stat().st_size


def _check_order(sequence: np.ndarray, position: np.ndarray) -> None:
    """Rows of one response must stand together, by position: readers form per-response sums in one pass."""
    if not len(sequence):
        return
    starts = np.flatnonzero(np.r_[True, sequence[1:] != sequence[:-1]])
    if len(np.unique(sequence[starts])) != len(starts):
        raise SisShapeError("the rows of a response must stand together in a token table")
    same = sequence[1:] == sequence[:-1]
    if bool((np.diff(position.astype(np.int64))[same] <= 0).any()):
        raise SisShapeError("positions must increase within a response")

"""Read per-token tables: whole files are checked before anything is computed, rows come in bounded batches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_sis.errors import StudyFileError
from verl_sis.records.schema import BY_NAME, COLUMNS, FOOTER_KEY, FORMAT, VERSION, Header, arrow_type

Batch = dict[str, np.ndarray]
"""Columns of some rows by name: ``[n]``, or ``[n, C]`` where a row has several values."""


@dataclass(frozen=True)
class TokenFile:
    """One file of a token table, its footer read and checked.

    Attributes:
        path: Of the file.
        header: Facts of all rows.
        columns: Names of the columns that it has.
        rows: Number of rows.
    """

    path: Path
    header: Header
    columns: tuple[str, ...]
    rows: int

    @classmethod
    def open(cls, path: Path) -> "TokenFile":
        """Read and check the footer.

        Raises:
            StudyFileError: If it is no complete parquet file, no token table, of a newer version, or its columns are
                not those of its version.
        """
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise StudyFileError(
                f"{path} is truncated or not parquet ({error}). Writers put files in place only once they are "
                "complete, so it was damaged later: copy it anew, or delete it"
            ) from error
        header = _header(path, schema.metadata or {})
        _check_columns(path, schema, header)
        return cls(path, header, tuple(schema.names), rows)

    def batches(self, names: Sequence[str]) -> Iterator[Batch]:
        """The rows of some columns, a row group at a time.

        Args:
            names: Columns to read; those that the file does not have are left out.

        Raises:
            StudyFileError: If the data behind the footer are damaged.
        """
        wanted = [name for name in names if name in self.columns]
        try:
            with pyarrow.parquet.ParquetFile(self.path) as file:
                for group in range(file.num_row_groups):
                    table = file.read_row_group(group, columns=wanted)
                    yield {name: self._array(name, table.column(name)) for name in wanted}
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise StudyFileError(f"{self.path} is damaged ({error}). Copy it anew, or delete it") from error

    def _array(self, name: str, column: pyarrow.ChunkedArray) -> np.ndarray:
        values: Any = column.combine_chunks()
        if BY_NAME[name].shape == "token":
            return values.to_numpy(zero_copy_only=False)
        width = values.type.list_size
        return values.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def open_study(path: Path) -> list[TokenFile]:
    """Open all files of a study.

    Args:
        path: A study directory (``tokens/`` inside), a directory of token files, or one file.

    Returns:
        The files, by name; at least one.

    Raises:
        StudyFileError: If there are none, one of them is damaged, or they do not belong together.
    """
    if path.is_file():
        return [TokenFile.open(path)]
    folder = path / "tokens" if (path / "tokens").is_dir() else path
    # Names with a dot in front are files that are being written.
    paths = [file for file in sorted(folder.glob("*.parquet")) if not file.name.startswith(".")]
    if not paths:
        raise StudyFileError(
            f"expected a token table below {path}, found no tokens/*.parquet. `verl-sis study collect` writes one, and "
            "so does training with actor_rollout_ref.actor.policy_loss.sis.dump.every=N"
        )
    files = [TokenFile.open(file) for file in paths]
    first = files[0].header
    for file in files[1:]:
        for name in ("kind", "ks", "layers", "experts_per_token"):
            mine, expected = getattr(file.header, name), getattr(first, name)
            if mine != expected:
                raise StudyFileError(
                    f"{file.path} has {name} {mine}, but {files[0].path} has {expected}: they are not of one study. "
                    "Report on them one by one"
                )
    return files


def _header(path: Path, metadata: dict[bytes, bytes]) -> Header:
    try:
        found = json.loads(metadata[FOOTER_KEY])
        if found.pop("format") != FORMAT:
            raise KeyError
    except (KeyError, json.JSONDecodeError) as error:
        raise StudyFileError(
            f"{path} is no token table of verl_sis: its footer does not say {FORMAT!r}. Remove it from the study"
        ) from error
    version = found.get("version")
    if not isinstance(version, int) or not 1 <= version <= VERSION:
        raise StudyFileError(
            f"{path} has version {version} of the schema, and this verl_sis reads 1 to {VERSION}. Read it with the "
            "verl_sis that wrote it, or a later one"
        )
    known = {field.name for field in fields(Header)}
    lists = {name: tuple(found[name]) for name in ("ks", "layers")}
    return Header(**{**{name: value for name, value in found.items() if name in known}, **lists})


def _check_columns(path: Path, schema: pyarrow.Schema, header: Header) -> None:
    for name in schema.names:
        column = BY_NAME.get(name)
        if column is None or column.since > header.version:
            raise StudyFileError(f"{path} has the column {name!r}, which version {header.version} of the schema lacks")
        expected = arrow_type(column, header)
        if schema.field(name).type != expected:
            raise StudyFileError(f"{path}: column {name!r} is {schema.field(name).type}, expected {expected}")
    missing = [column.name for column in COLUMNS if column.required and column.name not in schema.names]
    if missing:
        raise StudyFileError(f"{path} lacks the columns {missing} that every token table has")

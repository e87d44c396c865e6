"""Counts of accepted and rejected tokens by id, of every loss-bearing token of a dumped rollout.

A file has the columns ``token`` (int32), ``accepted`` and ``rejected`` (int64), by the z that were drawn, and only ids
that occur.
"""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_sis.errors import StudyFileError
from verl_sis.records.schema import FOOTER_KEY
from verl_sis.records.write import write_table

COUNTS_FORMAT = "verl_sis.counts"
COUNTS_VERSION = 1
_COLUMNS = {"token": pyarrow.int32(), "accepted": pyarrow.int64(), "rejected": pyarrow.int64()}


def write_counts(path: Path, counts: np.ndarray) -> int:
    """Write counts; the file appears complete or not at all.

    Args:
        path: Target, its directory made if missing.
        counts: int64 ``[V, 2]``, rejected and accepted tokens of each id.

    Returns:
        Size of the file in bytes.
    """
    ids = np.flatnonzero(counts.sum(axis=1))
    rejected, accepted = counts[ids].T
    header = {"format": COUNTS_FORMAT, "version": COUNTS_VERSION}
    schema = pyarrow.schema(list(_COLUMNS.items()), metadata={FOOTER_KEY: json.dumps(header).encode()})
    return write_table(path, pyarrow.table([ids.astype(np.int32), accepted, rejected], schema=schema))


def read_counts(study: Path) -> np.ndarray | None:
    """Add up the counts of a study.

    Args:
        study: Directory with ``counts/`` inside.

    Returns:
        int64 ``[V, 2]``, rejected and accepted tokens of each id up to the largest; None if there are no counts.

    Raises:
        StudyFileError: If a file is not complete, or no file of counts.
    """
    paths = [path for path in sorted((study / "counts").glob("*.parquet")) if not path.name.startswith(".")]
    if not paths:
        return None
    total = np.zeros((0, 2), dtype=np.int64)
    for path in paths:
        token, accepted, rejected = _columns_of(path)
        total = np.pad(total, ((0, max(int(token.max(initial=-1)) + 1 - len(total), 0)), (0, 0)))
        np.add.at(total, token, np.stack([rejected, accepted], axis=1))
    return total


def _columns_of(path: Path) -> list[np.ndarray]:
    try:
        table = pyarrow.parquet.read_table(path)
        header = json.loads((table.schema.metadata or {})[FOOTER_KEY])
        if (header["format"], header["version"]) != (COUNTS_FORMAT, COUNTS_VERSION):
            raise KeyError
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise StudyFileError(f"{path} is not a complete parquet file ({error}). Copy it anew, or delete it") from error
    except (KeyError, json.JSONDecodeError) as error:
        raise StudyFileError(
            f"{path} holds no counts of version {COUNTS_VERSION} of {COUNTS_FORMAT!r}. Remove it from the study"
        ) from error
    return [table[name].to_numpy() for name in _COLUMNS]

"""Contexts: at a sample of tokens, an old and a current policy over the old one's top-K, for the estimator laboratory.

A file per pair of policies (``verl_sis.records.schema.PAIRS``), with the columns

    sequence, position, token   as in the token table
    age                         int16, optimizer updates of the rollout before; 0 outside of training
    ids                         int32 [K], the old policy's top-K by decreasing probability
    old_log_prob                float32 [K], nats
    current_log_prob            float32 [K], log pi of the current policy at the same ids, nats
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow

from verl_sis.errors import SisShapeError
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

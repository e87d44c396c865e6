"""What tests read of a dump, and the rollout that they dump."""

from pathlib import Path

import numpy as np
import torch
from pyarrow import Table, parquet

from tests.worker import harness

LENGTHS = [5, 1, 4, 7, 3, 6, 2, 8]
K = 20
KINDS = ("contexts", "counts", "tokens")


def two_turn_rollout() -> harness.Rollout:
    """Responses of which some have tool text in between, or in front; the last has no token that bears loss."""
    rollout = harness.made_up_rollout(LENGTHS)
    rollout.masks[3] = torch.tensor([1, 1, 0, 0, 1, 1, 0])
    rollout.masks[5] = torch.tensor([0, 1, 1, 0, 1, 1])
    rollout.masks[7] = torch.zeros(8, dtype=torch.int64)
    return rollout


def table(folder: Path, kind: str, update: int, rank: int = 0) -> Table:
    """One file of a dump."""
    return parquet.read_table(folder / kind / f"update-{update:08d}-rank-{rank:05d}.parquet")


def columns_of(found: Table) -> dict[str, np.ndarray]:
    """Columns as arrays, lists as rows."""
    return {name: np.array(found[name].to_pylist()) for name in found.column_names}


def responses_in(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Rows of each response."""
    return [
        {name: values[rows["sequence"] == number] for name, values in rows.items()}
        for number in np.unique(rows["sequence"])
    ]


def names(folder: Path) -> list[str]:
    """Files of a dump that a reader would see."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())

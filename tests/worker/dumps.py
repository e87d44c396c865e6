"""What tests read of a dump, and the rollout that they dump."""

from pathlib import Path
from typing import Any

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


def dumped(folder: Path) -> dict[str, Any]:
    """Settings of SIS with a dump of each rollout to a folder."""
    return {"dump": {"every": 1, "directory": str(folder)}}


def assert_dumps_are_those_of_one_rank(
    dumps: Path, layout: str, written_by: tuple[int, ...], *, updates: tuple[int, int], tokens: int
) -> None:
    """Each rank that verl takes outputs from writes its own files; together they hold what one rank would write.

    Args:
        dumps: Folders by layout; what one rank wrote is in ``one rank``.
        layout: To look at.
        written_by: The ranks that wrote.
        updates: At which the two rollouts began.
        tokens: Of a rollout, counted once for each epoch.
    """
    for kind in ("tokens", "contexts", "counts"):
        assert [file.name for file in sorted((dumps / layout / kind).iterdir())] == [
            f"update-{update:08d}-rank-{rank:05d}.parquet" for update in updates for rank in written_by
        ]
    for update in updates:
        tables = ["tokens", "contexts"] if len(written_by) == 1 else ["tokens"]
        for kind in tables:
            got, expected = (pooled(dumps / folder / kind, update) for folder in (layout, "one rank"))
            assert len(got["token"]) == tokens, "all of them fit"
            # Ranks number their responses each from 0. A token is accepted by its probability, so one may differ.
            for name in got.keys() - {"sequence", "accepted"}:
                at_first = (expected["age"] == 0) & (update == 0)
                for rows, tolerance in ((at_first, 2e-5), (~at_first, 5e-3)):
                    np.testing.assert_allclose(
                        got[name][rows], expected[name][rows], rtol=tolerance, atol=tolerance, err_msg=name
                    )


def pooled(folder: Path, update: int) -> dict[str, np.ndarray]:
    """Rows of all ranks of a dump, in one order."""
    columns = columns_of(parquet.read_table([*folder.glob(f"update-{update:08d}-*")]))
    sequence = "sample_key" if "sample_key" in columns else "sequence"
    order = np.lexsort([columns[name] for name in ("position", sequence, "age")])
    return {name: values[order] for name, values in columns.items()}

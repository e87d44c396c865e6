"""The numbers that the paper reports, with the source of each (``paper_numbers.csv``)."""

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

REFERENCE = ("Qwen3-8B-Base", "math")
"""Model and task whose numbers stand in a column of their own where the paper has none of ours."""

PAPER_K = {"GRPO": 10, "DAPO": 30, "GSPO": 50}
"""K of the paper's Table 1. GRPO and GSPO: by equality with its sweep; DAPO: inferred, its number equals none of the
sweep's K = 10, 50, 100, and reviewers of the paper name 10, 30 and 50 as the K of its algorithms."""


@dataclass(frozen=True)
class PaperValue:
    """One number.

    Attributes:
        value: In points.
        source: Where it was found, and what was inferred.
    """

    value: float
    source: str


@cache
def _numbers() -> dict[tuple[str, str, str, str, str], PaperValue]:
    text = files("verl_sis.tables").joinpath("paper_numbers.csv").read_text()
    return {
        (row["table"], row["model"], row["task"], row["method"], row["benchmark"]): PaperValue(
            float(row["value"]), row["source"]
        )
        for row in csv.DictReader(text.splitlines())
    }


def paper_value(table: str, model: str, task: str, method: str, benchmark: str = "Avg") -> PaperValue | None:
    """Look a number up; None if the paper, as far as it was at hand, has none.

    Args:
        table: "Table 1", ...
        model: Name of the model.
        task: "math" or "agentic search".
        method: As ``paper_numbers.csv`` spells it.
        benchmark: "Avg", or the name of a benchmark.
    """
    return _numbers().get((table, model, task, method, benchmark))


def knows(table: str, model: str, task: str) -> bool:
    """Whether the paper's table has a model and task.

    Args:
        table: "Table 1", ...
        model: Name of the model.
        task: Name of the task.
    """
    return any(key[:3] == (table, model, task) for key in _numbers())

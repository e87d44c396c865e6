"""A table: typed columns, rows, and what its caption must say; made once, written as Markdown, CSV, LaTeX and JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_sis.tables.statistics import Interval, Measured

MISSING = "-"
"""What stands in a cell without a number."""

Value = str | int | float | Measured | Interval | None
"""Of a cell; None is missing."""


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        key: Name for programs.
        header: Name for people.
        kind: "text", "number", "measured" (mean, standard error, n) or "interval".
        digits: Decimals for people; programs get six significant ones.
    """

    key: str
    header: str
    kind: str = "text"
    digits: int = 2

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the plain columns behind this one."""
        parts = {"measured": ("", "_se", "_n"), "interval": ("_low", "_high")}
        return tuple(self.key + part for part in parts.get(self.kind, ("",)))

    def text(self, value: Value) -> str:
        """A value for people.

        Args:
            value: Of this column.
        """
        if value is None:
            return MISSING
        if isinstance(value, Measured):
            mean = f"{value.mean:.{self.digits}f}"
            return mean if value.se is None else f"{mean} ± {value.se:.{self.digits}f}"
        if isinstance(value, tuple):
            return " to ".join(f"{end:.{self.digits}f}" for end in value)
        return f"{value:.{self.digits}f}" if isinstance(value, float) else str(value)

    def plain(self, value: Value) -> list[Any]:
        """A value for programs, one entry for each of ``keys``; None where there is none.

        Args:
            value: Of this column.
        """
        if value is None:
            return [None] * len(self.keys)
        if isinstance(value, Measured):
            return [_rounded(value.mean), _rounded(value.se), value.n]
        return [_rounded(end) for end in value] if isinstance(value, tuple) else [_rounded(value)]


def _rounded(value: Any) -> Any:
    """Six significant digits: the rest is arithmetic noise, which differs between machines."""
    return float(f"{value:.6g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: Of its files.
        title: First words of the caption.
        columns: In order.
        rows: Values by key of the column; an absent key is missing.
        caption: Sentences.
        missing: What is missing, and what makes it.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Value]]
    caption: Sequence[str]
    missing: Sequence[str] = field(default_factory=list)

    @property
    def texts(self) -> list[list[str]]:
        """All cells for people."""
        return [[column.text(row.get(column.key)) for column in self.columns] for row in self.rows]

    @property
    def records(self) -> list[dict[str, Any]]:
        """All rows for programs."""
        return [
            {
                key: value
                for column in self.columns
                for key, value in zip(column.keys, column.plain(row.get(column.key)), strict=True)
            }
            for row in self.rows
        ]

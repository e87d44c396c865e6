"""The passages of an index: read from a JSONL corpus, kept in one memory-mapped Arrow file.

wiki-18 has 21 million passages, 14 GB of text. Mapped, they cost the memory of the pages that queries touch.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_sis.errors import RetrievalError

ROWS_PER_BATCH = 4096
"""All batches of a file but the last have so many rows, so that a row number gives its batch."""


@dataclass(frozen=True)
class Passage:
    """One passage of the corpus."""

    id: str
    """As the corpus numbers it."""

    title: str
    """May be empty."""

    text: str
    """Without the title."""

    @property
    def contents(self) -> str:
        """Title and text as wiki-18 writes them, ``"Title"`` in quotes on a line of its own; what is embedded."""
        return f'"{self.title}"\n{self.text}' if self.title else self.text


def parse(line: str, where: str) -> Passage:
    """Read one line of a corpus.

    Args:
        line: A JSON object with ``id`` and ``contents`` (first line the title in quotes, as in wiki-18), or with
            ``id``, ``text`` and, optionally, ``title``.
        where: Names the line in errors.

    Raises:
        RetrievalError: If it is neither.
    """
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise RetrievalError(f"{where}: expected one JSON object a line, found {line[:80]!r}: {error}") from error
    if not isinstance(row, dict) or "id" not in row or not ("contents" in row or "text" in row):
        raise RetrievalError(
            f"{where}: expected an object with 'id' and 'contents', or 'id', 'text' and 'title', found {line[:80]!r}"
        )
    if "text" in row:
        title, text = str(row.get("title") or ""), str(row["text"])
    else:
        title, found, text = str(row["contents"]).partition("\n")
        if not found:
            title, text = "", title
        title = title.strip().strip('"')
    if not text.strip():
        raise RetrievalError(f"{where}: expected a passage, found one without text: {line[:80]!r}")
    return Passage(str(row["id"]), title, text)


def read_corpus(path: Path) -> Iterator[Passage]:
    """Read a corpus line by line; blank lines are skipped.

    Args:
        path: JSONL file, UTF-8.

    Raises:
        RetrievalError: If it cannot be read, or a line is no passage.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise RetrievalError(f"expected a JSONL corpus at {path}, but it cannot be read: {error}") from error


def write_passages(path: Path, passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    """Write passages as they come, and hand them on in batches, so that a corpus is read once.

    Args:
        path: Arrow file; complete when the iterator is exhausted.
        passages: Any number of them.

    Yields:
        At most `ROWS_PER_BATCH` passages that were written.
    """
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.large_string()) for name in ("id", "title", "text")])
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, schema) as writer:
        for rows in _batches(passages):
            columns = [[row.id for row in rows], [row.title for row in rows], [row.text for row in rows]]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))
            yield rows


def _batches(passages: Iterable[Passage]) -> Iterator[list[Passage]]:
    rows: list[Passage] = []
    for passage in passages:
        rows.append(passage)
        if len(rows) == ROWS_PER_BATCH:
            yield rows
            rows = []
    if rows:
        yield rows


class PassageStore:
    """Random access to the passages of one file."""

    def __init__(self, path: Path) -> None:
        """Map the file; nothing but its footer is read.

        Raises:
            RetrievalError: If it is missing or no Arrow file.
        """
        import pyarrow

        try:
            self._reader: Any = pyarrow.ipc.open_file(pyarrow.memory_map(str(path), "r"))
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise RetrievalError(f"expected the passages of an index at {path}: {error}") from error
        batches = self._reader.num_record_batches
        last = self._reader.get_batch(batches - 1).num_rows if batches else 0
        self._count = max(0, batches - 1) * ROWS_PER_BATCH + last

    def __len__(self) -> int:
        """Count of passages."""
        return self._count

    def __getitem__(self, row: int) -> Passage:
        """The passage of a row, from 0."""
        if not 0 <= row < self._count:
            raise IndexError(f"expected a row from 0 to {self._count - 1}, found {row}")
        batch = self._reader.get_batch(row // ROWS_PER_BATCH)
        return Passage(*(column[row % ROWS_PER_BATCH].as_py() for column in batch.columns))

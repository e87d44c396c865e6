"""Where public data sets come from: a file of the hub at a fixed revision, or a local file of the same schema."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_sis.errors import DataSetError

Row = dict[str, Any]
"""One row of a data set, by column."""

FORMATS = (".parquet", ".jsonl", ".json")
"""Of local files; the schema counts, not the format."""


@dataclass(frozen=True)
class Source:
    """A public data set, as read.

    Attributes:
        name: Ours; also the stem of a local file.
        hub_id: Owner and name on the Hugging Face hub.
        revision: Commit of the hub repository.
        file: Path in the hub repository.
        sha256: Of that file at that revision, as published by users of the data; None where nobody did, or where
            another revision was asked for.
    """

    name: str
    hub_id: str
    revision: str
    file: str
    sha256: str | None = None


@dataclass(frozen=True)
class Input:
    """A file that was found.

    Attributes:
        source: What it is a file of.
        path: Where it lies.
        sha256: Of its bytes.
        from_hub: Whether the hub gave it; else the revision is unknown.
    """

    source: Source
    path: Path
    sha256: str
    from_hub: bool

    def facts(self) -> dict[str, Any]:
        """What the manifest says of the input; no path of this machine."""
        return {
            "name": self.source.name,
            "hub_id": self.source.hub_id,
            "revision": self.source.revision if self.from_hub else None,
            "file": self.source.file if self.from_hub else self.path.name,
            "sha256": self.sha256,
            "sha256_as_published": None if self.source.sha256 is None else self.sha256 == self.source.sha256,
        }


def at_revisions(sources: tuple[Source, ...], revisions: list[str]) -> tuple[Source, ...]:
    """Replace revisions.

    Args:
        sources: The data sets of a command.
        revisions: ``name=revision`` each.

    Raises:
        DataSetError: A text is not of that form, or names no data set of the command.
    """
    known = {source.name: source for source in sources}
    for text in revisions:
        name, _, revision = text.partition("=")
        if name not in known or not revision:
            raise DataSetError(f"expected --revision NAME=REVISION with NAME one of {', '.join(known)}; found {text!r}")
        known[name] = replace(known[name], revision=revision, sha256=None)
    return tuple(known.values())


def locate(source: Source, directory: Path | None) -> Input:
    """Find the file of a data set.

    Args:
        source: The data set.
        directory: Directory of local files ``<name>.parquet``, ``.jsonl`` or ``.json``; None for the hub.

    Raises:
        DataSetError: There is no such file, or several; the hub cannot be reached; or the hub's file is not the one
            that was published at this revision.
    """
    if directory is not None:
        path = _local(source, directory)
        return Input(source, path, sha256_of(path), from_hub=False)
    path = _from_hub(source)
    digest = sha256_of(path)
    if source.sha256 is not None and digest != source.sha256:
        raise DataSetError(
            f"{source.hub_id}/{source.file} at {source.revision}: expected the SHA-256 {source.sha256}, found "
            f"{digest}. Delete {path} and repeat; or copy it to DIR/{source.name}{path.suffix} and type --source DIR "
            "to use it"
        )
    return Input(source, path, digest, from_hub=True)


def _local(source: Source, directory: Path) -> Path:
    names = [source.name + suffix for suffix in FORMATS]
    found = [directory / name for name in names if (directory / name).is_file()]
    if len(found) != 1:
        raise DataSetError(
            f"{directory}: expected one of the files {', '.join(names)}, found "
            f"{', '.join(path.name for path in found) or 'none'}. It is {source.file} of the data set "
            f"{source.hub_id}. Type: {_download_command(source, directory)}"
        )
    return found[0]


def _from_hub(source: Source) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ImportError as error:
        raise DataSetError("the hub needs the package huggingface_hub. Type: pip install huggingface_hub") from error
    try:
        return Path(hf_hub_download(source.hub_id, source.file, revision=source.revision, repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise DataSetError(
            f"{source.hub_id}: {source.file} at {source.revision} is not to be had from the hub ({first_line}). "
            f"Without a network, download it elsewhere and use --source DIR. Type: "
            f"{_download_command(source, Path('DIR'))}"
        ) from error


def _download_command(source: Source, directory: Path) -> str:
    local = directory / (source.name + Path(source.file).suffix)
    return (
        f"hf download {source.hub_id} {source.file} --repo-type dataset --revision {source.revision} "
        f"--local-dir '{directory}' && mv '{directory / source.file}' '{local}'"
    )


def read_rows(found: Input, columns: tuple[str, ...]) -> Iterator[Row]:
    """Read a file row by row; a parquet file is never in memory as a whole.

    Args:
        found: The file.
        columns: Columns that each row must have.

    Raises:
        DataSetError: The file is not of its format, or a column is missing.
    """
    path = found.path
    rows = {".parquet": _parquet_rows, ".jsonl": _jsonl_rows, ".json": _json_rows}[path.suffix](path)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            names = list(row) if isinstance(row, dict) else []
            if not set(columns) <= set(names):
                raise DataSetError(
                    f"{path}: expected the columns {', '.join(columns)} of {found.source.hub_id}, found "
                    f"{', '.join(names) or 'none'} in row {number}. Name the file of the right data set"
                )
            yield row
    except DataSetError:
        raise
    # pyarrow raises both, and so does json.
    except (OSError, ValueError) as error:
        message = f"{path}: not a {path.suffix} file after row {number} ({error}). Download it again"
        raise DataSetError(message) from error


def _parquet_rows(path: Path) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=4096):
            yield from batch.to_pylist()


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        yield from (json.loads(line) for line in lines if line.strip())


def _json_rows(path: Path) -> Iterator[Row]:
    rows = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(rows, list):
        raise DataSetError(f"{path}: expected a JSON list of rows, found {type(rows).__name__}")
    yield from rows


def sha256_of(path: Path) -> str:
    """Checksum of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

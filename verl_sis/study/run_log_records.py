"""Records in the files of tensorboard and wandb, complete or still growing, and the errors of files that have others.

Both formats frame records with checksums. A file that is being written may end anywhere in a record, which is normal; a
record that is complete and wrong is not.
"""

import importlib
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_sis.errors import StudyFileError

_WANDB_HEADER = b":W&B\xe1\xbe\x00"
_WANDB_BLOCK = 32768
_FULL, _FIRST, _LAST = 1, 2, 4
"""Kinds of chunks of a wandb record: all of it, its first and its last; 3 is in between."""


def imported(module: str, path: Path) -> Any:
    """Import what a file needs.

    Args:
        module: Full name.
        path: File to be read, for the error.

    Returns:
        The module.

    Raises:
        StudyFileError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise StudyFileError(
            f"{path}: expected the package {package}, which reads it, found none ({error}). "
            f"Type: pip install 'verl-sis[study]' {package}"
        ) from error


def event_records(path: Path) -> tuple[list[bytes], bool]:
    """Read the records of a tensorboard event file.

    tensorboard's own loader ends silently at a corrupt record as at a cut one; here the two differ.

    Args:
        path: The file, complete or still growing.

    Returns:
        Complete records in order, and whether another one is cut at the end.

    Raises:
        StudyFileError: The file is not readable or corrupt, or tensorboard is not installed.
    """
    checksum = imported("tensorboard.compat.tensorflow_stub.pywrap_tensorflow", path).masked_crc32c
    content, records, position = _content(path), [], 0
    while position + 12 <= len(content):
        # Length, its checksum, data, their checksum.
        length, length_checksum = struct.unpack_from("<QI", content, position)
        if checksum(content[position : position + 8]) != length_checksum:
            raise corrupt(path, "an event record", f"a wrong checksum at byte {position}")
        end = position + 12 + length
        if end + 4 > len(content):
            break
        data = content[position + 12 : end]
        if (checksum(data),) != struct.unpack_from("<I", content, end):
            raise corrupt(path, "an event record", f"a wrong checksum at byte {position}")
        records.append(data)
        position = end + 4
    return records, position < len(content)


def wandb_records(path: Path) -> tuple[list[bytes], bool]:
    """Read the records of a ``.wandb`` file: LevelDB's log format with plain CRC-32 after a header of wandb's.

    Args:
        path: The file, complete or still growing.

    Returns:
        Complete records in order, and whether another one is cut at the end.

    Raises:
        StudyFileError: The file is not readable, corrupt, or without wandb's header.
    """
    content, records = _content(path), []
    if content[:7] != _WANDB_HEADER[: len(content)]:
        raise corrupt(path, f"a file that starts with {_WANDB_HEADER!r}", f"{content[:7]!r}")
    position, chunks, is_open = len(_WANDB_HEADER), [], False
    while position < len(content):
        room = _WANDB_BLOCK - position % _WANDB_BLOCK
        if room < 7:
            position += room
            continue
        if position + 7 > len(content):
            break
        checksum, length, kind = struct.unpack_from("<IHB", content, position)
        end = position + 7 + length
        if 7 + length <= room and end > len(content):
            break
        is_start = kind in (_FULL, _FIRST)
        if 7 + length > room or zlib.crc32(content[position + 6 : end]) != checksum or is_start == is_open:
            raise corrupt(path, "a record of wandb", f"a wrong checksum, length or kind at byte {position}")
        chunks.append(content[position + 7 : end])
        is_open = kind not in (_FULL, _LAST)
        if not is_open:
            records.append(b"".join(chunks))
            chunks.clear()
        position = end
    return records, is_open or position < len(content) or len(content) < len(_WANDB_HEADER)


def decoded(kind: Any, records: Iterable[bytes], path: Path) -> list[Any]:
    """Decode protocol buffers.

    Args:
        kind: Their class.
        records: Their bytes.
        path: File that they are from, for the error.

    Returns:
        The messages.

    Raises:
        StudyFileError: A record is not of this kind.
    """
    # Comes with the package that has the class.
    from google.protobuf.message import DecodeError

    try:
        return [kind.FromString(record) for record in records]
    except DecodeError as error:
        raise corrupt(path, f"records of kind {kind.__name__}", f"others ({error})") from error


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> StudyFileError:
    """Error of a file that the system does not let us read."""
    return StudyFileError(f"{path}: expected a readable file, found {error.strerror}. Type: ls -l '{path}'")


def corrupt(path: Path, expected: str, found: str) -> StudyFileError:
    """Error of a file that is complete where it is wrong."""
    return StudyFileError(
        f"{path}: expected {expected}, found {found}. Copy the file anew from where the run wrote it, or move it away"
    )

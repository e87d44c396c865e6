"""What an index is made of and made by; written beside it, checked whenever it is opened."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_sis.errors import RetrievalError, SisConfigError
from verl_sis.search.encoder import Encoder, EncoderSettings, same_weights

FORMAT = 1
"""Of the directory; raised when it changes."""

MANIFEST, VECTORS, PASSAGES, PROBES = "manifest.json", "vectors.faiss", "passages.arrow", "probe.npy"
"""Files of an index."""

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Manifest:
    """One index."""

    model: str
    """Directory or hub name of the encoder when the index was built."""

    encoder: EncoderSettings
    """How it was used."""

    dimension: int
    """Length of an embedding."""

    passages: int
    """Count of passages, and of vectors."""

    factory: str
    """FAISS's description of the index; "Flat" is exact."""

    corpus: str
    """Name of the corpus file."""

    corpus_sha256: str
    """Of the corpus file."""

    files: dict[str, dict[str, Any]]
    """``bytes`` and ``sha256`` of each other file, by name."""

    format: int = FORMAT
    """Version of the directory."""

    def write(self, directory: Path) -> None:
        """Write into the directory of an index that is being built."""
        (directory / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of an index.

    Raises:
        RetrievalError: If there is none, or it is of another format.
    """
    path = directory / MANIFEST
    try:
        row = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise RetrievalError(
            f"expected an index in {directory}, but {MANIFEST} cannot be read: {error}. Build one: "
            "verl-sis search index CORPUS --encoder DIR --out DIRECTORY"
        ) from error
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        found = row.get("format") if isinstance(row, dict) else row
        raise RetrievalError(f"{path}: expected format {FORMAT}, found {found}. Build the index again.")
    try:
        return Manifest(**{**row, "encoder": EncoderSettings(**row["encoder"])})
    except (KeyError, TypeError, SisConfigError) as error:
        raise RetrievalError(f"{path} is not a manifest of this version: {error}. Build the index again.") from error


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files."""
    return {name: {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)} for name in names}


def sha256(path: Path) -> str:
    """Checksum of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_files(directory: Path, manifest: Manifest, checksums: bool) -> None:
    """Check that the files are those that were built.

    Args:
        directory: Of the index.
        manifest: Of the index.
        checksums: Also read every byte; the size is checked always.

    Raises:
        RetrievalError: If a file is missing, cut off or changed.
    """
    for name, expected in manifest.files.items():
        path = directory / name
        size = path.stat().st_size if path.exists() else None
        if size != expected["bytes"]:
            found = "none" if size is None else f"{size} bytes"
            raise RetrievalError(f"{path}: expected {expected['bytes']} bytes, found {found}. Build or copy it again.")
        if checksums and sha256(path) != expected["sha256"]:
            raise RetrievalError(f"{path}: its checksum is not the manifest's. Build or copy the index again.")


def check_encoder(directory: Path, manifest: Manifest, encoder: Encoder) -> None:
    """Check that an encoder is the one the index was built by.

    Raises:
        RetrievalError: If its settings, its dimension or its weights differ: scores would be meaningless.
    """
    if encoder.settings != manifest.encoder or encoder.dimension != manifest.dimension:
        raise RetrievalError(
            f"the index in {directory} was built by another encoder: expected {manifest.encoder} of dimension "
            f"{manifest.dimension}, found {encoder.settings} of dimension {encoder.dimension}. Serve it with the "
            f"encoder it was built by ({manifest.model}), or build it again."
        )
    if not same_weights(encoder.probe(), np.load(directory / PROBES)):
        raise RetrievalError(
            f"the index in {directory} was built by other weights than those of {encoder.model}: a text that both "
            f"embed has another embedding. Serve it with {manifest.model}, or build it again."
        )

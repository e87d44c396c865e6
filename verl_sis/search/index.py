"""An index of passages: FAISS for the vectors, Arrow for the texts, a manifest for what they are.

The default, "Flat", compares a query with every passage: exact, and the memory is passages x dimension x 4 bytes (64 GB
for wiki-18 with E5-base). For less memory or time give another of FAISS's descriptions, e.g. "IVF16384,SQ8": inverted
lists, of which a query visits a few, and one byte a component.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_sis.errors import RetrievalError, SisConfigError
from verl_sis.search.encoder import Encoder
from verl_sis.search.manifest import (
    PASSAGES,
    PROBES,
    VECTORS,
    Manifest,
    check_encoder,
    check_files,
    describe_files,
    read_manifest,
    sha256,
)
from verl_sis.search.passages import Passage, PassageStore, read_corpus, write_passages

TRAINING_VECTORS = 1_000_000
"""Most vectors that an index of inverted lists is trained on: a random sample of the corpus."""

_ROWS_PER_ADD = 65_536


def build(
    corpus: Path,
    target: Path,
    encoder: Encoder,
    factory: str = "Flat",
    seed: int = 0,
    report: Callable[[int], None] = lambda passages: None,
) -> Manifest:
    """Build an index; its directory appears complete or not at all.

    Args:
        corpus: JSONL, see `verl_sis.search.passages.parse`.
        target: Directory to make; must not exist.
        encoder: Embeds the passages.
        factory: FAISS's description of the index, over inner products.
        seed: Of the sample of vectors that inverted lists are trained on.
        report: Called with the count of passages that are embedded.

    Returns:
        The manifest.

    Raises:
        RetrievalError: If the corpus cannot be read or is empty.
        SisConfigError: If the target exists, or FAISS does not know the description.
    """
    if target.exists():
        raise SisConfigError(f"expected a new directory, found that {target} exists. Remove it or choose another.")
    vectors = _new_index(factory, encoder.dimension)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        embeddings = scratch / "embeddings.float32"
        count = _embed(corpus, scratch, embeddings, encoder, report)
        _add(vectors, np.memmap(embeddings, np.float32, "r", shape=(count, encoder.dimension)), seed)
        embeddings.unlink()
        _write_index(vectors, scratch / VECTORS)
        np.save(scratch / PROBES, encoder.probe())
        manifest = Manifest(
            model=encoder.model,
            encoder=encoder.settings,
            dimension=encoder.dimension,
            passages=count,
            factory=factory,
            corpus=corpus.name,
            corpus_sha256=sha256(corpus),
            files=describe_files(scratch, [VECTORS, PASSAGES, PROBES]),
        )
        manifest.write(scratch)
        scratch.chmod(0o755)
        os.rename(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _new_index(factory: str, dimension: int) -> Any:
    import faiss

    try:
        return faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise SisConfigError(
            f"expected a description that FAISS's index_factory knows, e.g. Flat or IVF4096,SQ8; found {factory!r}"
        ) from error


def _write_index(index: Any, path: Path) -> None:
    import faiss

    faiss.write_index(index, str(path))


def _embed(corpus: Path, scratch: Path, embeddings: Path, encoder: Encoder, report: Callable[[int], None]) -> int:
    """Write the passages and their embeddings, row by row; return how many."""
    count = 0
    with embeddings.open("wb") as stream:
        for rows in write_passages(scratch / PASSAGES, read_corpus(corpus)):
            stream.write(encoder.passages([row.contents for row in rows]).tobytes())
            count += len(rows)
            report(count)
    if not count:
        raise RetrievalError(f"{corpus}: expected passages, found none.")
    return count


def _add(index: Any, embeddings: np.ndarray, seed: int) -> None:
    """Train the index, if its kind needs it, and add all vectors in order."""
    if not index.is_trained:
        chosen = np.random.default_rng(seed).permutation(len(embeddings))[:TRAINING_VECTORS]
        try:
            index.train(np.ascontiguousarray(embeddings[np.sort(chosen)]))
        except RuntimeError as error:
            raise SisConfigError(
                f"FAISS cannot train this index on {len(embeddings)} passages: {error}. Use fewer lists, or Flat."
            ) from error
    for start in range(0, len(embeddings), _ROWS_PER_ADD):
        index.add(np.ascontiguousarray(embeddings[start : start + _ROWS_PER_ADD]))


@dataclass(frozen=True)
class Hit:
    """One passage that was found."""

    passage: Passage
    """The passage."""

    score: float
    """Cosine with the query; of an index that compresses vectors, an estimate of it."""


class PassageIndex:
    """An index on disk, opened for queries. The files are mapped: several servers on a machine share their pages."""

    def __init__(self, directory: Path, encoder: Encoder, probes: int | None = None, checksums: bool = False) -> None:
        """Open an index and check that it is whole and the encoder's.

        Args:
            directory: Result of `build`.
            encoder: Embeds the queries.
            probes: How many inverted lists a query visits; FAISS's own default, 1, if None.
            checksums: Read and check every byte first.

        Raises:
            RetrievalError: If the index is damaged or another encoder's.
            SisConfigError: If ``probes`` is given and the index has no inverted lists.
        """
        import faiss

        self.manifest = read_manifest(directory)
        check_files(directory, self.manifest, checksums)
        check_encoder(directory, self.manifest, encoder)
        self._encoder = encoder
        self._passages = PassageStore(directory / PASSAGES)
        self._vectors: Any = faiss.read_index(str(directory / VECTORS), faiss.IO_FLAG_MMAP_IFC)
        counts = (len(self._passages), self._vectors.ntotal)
        if counts != (self.manifest.passages,) * 2:
            raise RetrievalError(
                f"{directory}: expected {self.manifest.passages} passages and as many vectors, found {counts[0]} and "
                f"{counts[1]}. Build the index again."
            )
        if probes is not None:
            self._set_probes(probes)

    def __len__(self) -> int:
        """Count of passages."""
        return self.manifest.passages

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        """Find the best passages of each query.

        Args:
            queries: Texts, without the encoder's prefix.
            top_k: How many passages; fewer are found only if the index, or the lists that it visits, hold fewer.

        Returns:
            For each query its passages, best first.
        """
        if not queries:
            return []
        scores, rows = self._vectors.search(self._encoder.queries(queries), min(top_k, len(self)))
        # FAISS fills up with row -1 when the lists that were visited hold too few.
        return [
            [Hit(self._passages[int(row)], float(score)) for row, score in zip(*found, strict=True) if row >= 0]
            for found in zip(rows, scores, strict=True)
        ]

    def _set_probes(self, probes: int) -> None:
        import faiss

        try:
            faiss.extract_index_ivf(self._vectors).nprobe = probes
        except RuntimeError as error:
            raise SisConfigError(
                f"expected an index of inverted lists for probes={probes}, found {self.manifest.factory}. Leave it out."
            ) from error

"""Everything a report needs of a study, from one pass over its rows in bounded memory.

Sums are float64, taken per response, then per group of responses; a rate is formed once, from pooled sums. Groups are
what the bootstrap draws from: up to ``GROUPS`` responses each is its own group; beyond that responses are dealt out in
turn, so that memory does not grow with the study.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from verl_sis.core.statistics import HISTOGRAM_EDGES
from verl_sis.records.read import Batch, TokenFile
from verl_sis.study import measures
from verl_sis.study.groupings import Grouping, groupings
from verl_sis.study.terms import Layout, matrix

GROUPS = 1024
"""Groups of responses behind the confidence intervals of totals."""

CUT_GROUPS = 64
"""Groups of responses behind those of every bin of every grouping."""

SLICE_ROWS = 1 << 13
"""Rows whose terms are held at a time."""

PARALLEL_ROWS = 2_000_000
"""Rows from which files are shared among processes."""

EXAMPLES = 4
"""Responses of each kind that are kept as examples."""


@dataclass(frozen=True)
class Example:
    """A response to show.

    Attributes:
        file: Its file.
        sequence: Its number there.
        score: Mean ``|log w|`` of its tokens.
    """

    file: TokenFile
    sequence: int
    score: float


class Pool:
    """Sums over a study.

    Attributes:
        layout: What the study holds.
        names: Names of the terms, M of them (``verl_sis.study.terms``), and ``responses``.
        sums: float64 ``[GROUPS, M]``.
        by_age: The same for each age of the mini-batch; empty where rows have none.
        cuts: By grouping, float64 ``[CUT_GROUPS, bins, T]`` of the terms ``cut_names``.
        histograms: int64 counts of ``HISTOGRAM_EDGES``: ``{comparison}.abs``, ``{pair}.residual`` at the headline K.
        largest: Largest ``{comparison}.abs``, ``mass_before``, and ``usable`` entries where some were filtered.
        smallest: Smallest ``kept_mass`` and ``usable`` where entries were filtered.
        by_token: float64 ``[V, 3]`` by token id: count, acceptance, ``|log w|``, of the headline pair.
        responses: Number of responses.
        rows: Number of tokens.
        first, worst: Examples.
    """

    def __init__(self, layout: Layout) -> None:
        """Start empty."""
        self.layout = layout
        self.names: list[str] = []
        self.sums = np.zeros((GROUPS, 0))
        self.by_age: dict[int, np.ndarray] = {}
        self.cut_names: list[str] = []
        self.cuts: dict[str, np.ndarray] = {}
        self.histograms: dict[str, np.ndarray] = {}
        self.largest: dict[str, float] = {}
        self.smallest: dict[str, float] = {}
        self.by_token = np.zeros((0, 3))
        self.responses = self.rows = 0
        self.first: list[Example] = []
        self.worst: list[Example] = []
        self._file: TokenFile | None = None
        self._sequence: int | None = None
        self._open = np.zeros(0)
        self._headline = measures.headline(layout.ks)

    @property
    def groupings(self) -> list[Grouping]:
        """Ways to cut the study's tokens."""
        return groupings(self.layout.columns)

    def add_file(self, file: TokenFile) -> None:
        """Add all rows of a file.

        Raises:
            StudyFileError: If its data are damaged.
        """
        self._file, self._sequence = file, None
        for group in file.batches(self.layout.needed()):
            for start in range(0, len(group["position"]), SLICE_ROWS):
                self._add({name: values[start : start + SLICE_ROWS] for name, values in group.items()})

    def merge(self, other: "Pool") -> None:
        """Add the rows of another part of the same study; groups of responses are added up in pairs."""
        if not other.names:
            return
        if not self.names:
            self._start(other.names[:-1])
        self.sums = self.sums + other.sums
        for name, cut in other.cuts.items():
            self.cuts[name] = self.cuts[name] + cut
        for age, sums in other.by_age.items():
            self.by_age[age] = self.by_age.get(age, np.zeros_like(sums)) + sums
        for name, counts in other.histograms.items():
            self.histograms[name] = self.histograms.get(name, 0) + counts
        for name, value in other.largest.items():
            self._raise(name, np.array([value]))
        for name, value in other.smallest.items():
            self._lower(name, np.array([value]))
        size = max(len(self.by_token), len(other.by_token))
        self.by_token = _grown(self.by_token, size) + _grown(other.by_token, size)
        self.responses += other.responses
        self.rows += other.rows
        self.first = (self.first + other.first)[:EXAMPLES]
        self.worst = sorted(self.worst + other.worst, key=lambda example: -example.score)[:EXAMPLES]

    def column(self, name: str) -> int:
        """Index of a term."""
        return self.names.index(name)

    def total(self, name: str) -> float:
        """Sum of a term over the study; 0 if it has none such."""
        return float(self.sums[:, self.column(name)].sum()) if name in self.names else 0.0

    def _add(self, batch: Batch) -> None:
        names, terms = matrix(batch, self.layout)
        if not self.names:
            self._start(names)
        starts, group, new = self._runs(batch["sequence"])
        # A response is counted where it starts.
        sums = np.column_stack([np.add.reduceat(terms, starts, axis=1).T, new])
        ages = batch["age"][starts] if "age" in batch else None
        np.add.at(self.sums, group % GROUPS, sums)
        if ages is not None:
            for age in np.unique(ages).tolist():
                mine = self.by_age.setdefault(age, np.zeros_like(self.sums))
                np.add.at(mine, group[ages == age] % GROUPS, sums[ages == age])
        lengths = np.diff(np.append(starts, terms.shape[1]))
        self._add_cuts(batch, terms, np.repeat(group % CUT_GROUPS, lengths))
        self._add_extremes(batch, terms)
        self._add_tokens(batch, terms)
        self._keep_examples(batch["sequence"][starts], sums)
        self.rows += terms.shape[1]

    def _start(self, names: list[str]) -> None:
        self.names = [*names, "responses"]
        self.sums = np.zeros((GROUPS, len(self.names)))
        k = self.layout.ks[self._headline]
        terms = ["tokens"]
        terms += [f"{c.name}.{term}" for c in self.layout.comparisons for term in ("tokens", "k3", "abs")]
        for pair in self.layout.pairs:
            terms += [f"{pair}.{term}" for term in measures.PAIR_TERMS]
            terms += [f"{pair}.{term}@{k}" for term in measures.PAIR_TERMS_BY_K[:-1]]
        terms += ["routes.any"] if self.layout.routed else []
        self.cut_names = terms
        self._cut_columns = [self.column(term) for term in terms]
        self.cuts = {g.name: np.zeros((CUT_GROUPS, g.bins, len(terms))) for g in self.groupings}

    def _runs(self, sequence: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each response in a slice: its start, its number in the study, and whether it starts there.

        The first may continue the last one of the slice before.
        """
        new = np.r_[sequence[0] != self._sequence, sequence[1:] != sequence[:-1]]
        number = self.responses - 1 + np.cumsum(new)
        self.responses = int(number[-1]) + 1
        self._sequence = int(sequence[-1])
        starts = np.flatnonzero(np.r_[True, new[1:]])
        return starts, number[starts], new[starts].astype(np.float64)

    def _add_cuts(self, batch: Batch, terms: np.ndarray, group: np.ndarray) -> None:
        for grouping in self.groupings:
            cut = self.cuts[grouping.name]
            code = group * grouping.bins + grouping.codes(batch)
            for column, term in enumerate(self._cut_columns):
                counts = np.bincount(code, weights=terms[term], minlength=CUT_GROUPS * grouping.bins)
                cut[:, :, column] += counts.reshape(CUT_GROUPS, grouping.bins)

    def _add_extremes(self, batch: Batch, terms: np.ndarray) -> None:
        k = self.layout.ks[self._headline]
        for comparison in self.layout.comparisons:
            finite = terms[self.column(f"{comparison.name}.tokens")] > 0
            self._add_values(f"{comparison.name}.abs", terms[self.column(f"{comparison.name}.abs")][finite])
        for pair in self.layout.pairs:
            finite = terms[self.column(f"{pair}.tested")] > 0
            self._add_values(f"{pair}.residual", terms[self.column(f"{pair}.residual@{k}")][finite])
        if "rollout_mass_before" in batch:
            self._raise("mass_before", batch["rollout_mass_before"])
        if "rollout_filtered" in batch and "engine_residual_mass" in batch:
            some = batch["rollout_filtered"] > 0
            usable = self.layout.ks[-1] - batch["rollout_filtered"][some]
            self._raise("usable", usable)
            self._lower("usable", usable)
            self._lower("kept_mass", 1.0 - batch["engine_residual_mass"][some, -1])

    def _add_values(self, name: str, values: np.ndarray) -> None:
        bins = np.searchsorted(HISTOGRAM_EDGES, values, side="right")
        counts = np.bincount(bins, minlength=len(HISTOGRAM_EDGES) + 1)
        self.histograms[name] = self.histograms.get(name, 0) + counts
        self._raise(name, values)

    def _raise(self, name: str, values: np.ndarray) -> None:
        if values.size:
            self.largest[name] = max(self.largest.get(name, -np.inf), float(values.max()))

    def _lower(self, name: str, values: np.ndarray) -> None:
        if values.size:
            self.smallest[name] = min(self.smallest.get(name, np.inf), float(values.min()))

    def _add_tokens(self, batch: Batch, terms: np.ndarray) -> None:
        pair = self.layout.headline_pair
        if pair is None:
            return
        k = self.layout.ks[self._headline]
        token = np.maximum(batch["token"], 0)
        self.by_token = _grown(self.by_token, int(token.max()) + 1)
        for column, term in enumerate((f"{pair}.tested", f"{pair}.accepted@{k}", f"{pair}.divergence")):
            values = terms[self.column(term)]
            self.by_token[:, column] += np.bincount(token, weights=values, minlength=len(self.by_token))

    def _keep_examples(self, sequences: np.ndarray, sums: np.ndarray) -> None:
        """Keep the first responses, and those that differ most; of one cut by a slice, its larger part counts."""
        pair = self.layout.headline_pair
        if pair is None or self._file is None:
            return
        tokens = np.maximum(sums[:, self.column("tokens")], 1.0)
        score = sums[:, self.column(f"{pair}.divergence")] / tokens
        for index in range(min(len(sequences), EXAMPLES - len(self.first))):
            self.first.append(Example(self._file, int(sequences[index]), float(score[index])))
        for index in np.argsort(-score)[:EXAMPLES].tolist():
            self.worst.append(Example(self._file, int(sequences[index]), float(score[index])))
        self.worst = sorted(self.worst, key=lambda example: -example.score)[:EXAMPLES]


def _grown(by_token: np.ndarray, size: int) -> np.ndarray:
    """The table with room for at least ``size`` token ids."""
    missing = size - len(by_token)
    return np.vstack([by_token, np.zeros((missing, by_token.shape[1]))]) if missing > 0 else by_token


def pool_study(files: Sequence[TokenFile], processes: int | None = None) -> Pool:
    """Sum up a study.

    Args:
        files: As ``verl_sis.records.read.open_study`` returns them.
        processes: To share the files among; by default one per core for large studies, else none besides this one.

    Returns:
        The sums; columns that some file lacks are left out of all.

    Raises:
        StudyFileError: If the data of a file are damaged.
    """
    header = files[0].header
    common = frozenset.intersection(*(frozenset(file.columns) for file in files))
    layout = Layout(header.ks, header.layers, header.experts_per_token, common)
    if processes is None:
        large = sum(file.rows for file in files) >= PARALLEL_ROWS
        processes = min(os.cpu_count() or 1, len(files)) if large else 1
    if processes == 1:
        return _pool_files(layout, files)
    pool = Pool(layout)
    shares = [files[start::processes] for start in range(processes)]
    # Spawned, not forked: a fork would copy the locks of arrow's threads in whatever state they are.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as executor:
        for part in executor.map(_pool_files, [layout] * processes, shares):
            pool.merge(part)
    return pool


def _pool_files(layout: Layout, files: Sequence[TokenFile]) -> Pool:
    pool = Pool(layout)
    for file in files:
        pool.add_file(file)
    return pool

"""Along which lines a study is cut: position, probability, entropy, turn and age, as bins of a token table's rows."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from verl_sis.records.read import Batch

_PROBABILITY_EDGES = np.array([0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999])
_ENTROPY_EDGES = np.array([0.01, 0.1, 0.3, 1.0, 2.0, 4.0])
_POSITION_BINS = 24
_SMALL_BINS = 32


@dataclass(frozen=True)
class Grouping:
    """One way to cut the tokens into bins.

    Attributes:
        name: Short, for tables and figures.
        title: Of the axis.
        needs: Column that it reads.
        bins: Number of bins; the last also takes what lies beyond.
        code: From the column to the bin of each row.
        label: Of a bin.
    """

    name: str
    title: str
    needs: str
    bins: int
    code: Callable[[np.ndarray], np.ndarray]
    label: Callable[[int], str]

    def codes(self, batch: Batch) -> np.ndarray:
        """Bin of each row, int64 ``[n]``."""
        return self.code(batch[self.needs])


def _between(edges: np.ndarray) -> Callable[[int], str]:
    def label(bin_: int) -> str:
        if bin_ == 0:
            return f"< {edges[0]:g}"
        return f"{edges[bin_ - 1]:g} - {edges[bin_]:g}" if bin_ < len(edges) else f">= {edges[-1]:g}"

    return label


def _probability_bin(log_prob: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.log(_PROBABILITY_EDGES), log_prob, side="right")


def _entropy_bin(entropy: np.ndarray) -> np.ndarray:
    return np.searchsorted(_ENTROPY_EDGES, entropy, side="right")


def _position_bin(position: np.ndarray) -> np.ndarray:
    """0, 1, 2-3, 4-7, ...: exact powers of two through the exponent of a float64."""
    return np.minimum(np.frexp(position.astype(np.float64))[1], _POSITION_BINS - 1)


def _position_label(bin_: int) -> str:
    first, last = (0, 0) if bin_ == 0 else (2 ** (bin_ - 1), 2**bin_ - 1)
    return str(first) if first == last else f"{first}-{last}"


def _small(values: np.ndarray) -> np.ndarray:
    return np.clip(values, 0, _SMALL_BINS - 1).astype(np.int64)


def _probability(needs: str) -> Grouping:
    edges = _PROBABILITY_EDGES
    title = "probability of the token under the old policy"
    return Grouping("probability", title, needs, len(edges) + 1, _probability_bin, _between(edges))


def groupings(columns: Iterable[str]) -> list[Grouping]:
    """Groupings for a study with these columns.

    Args:
        columns: Names of all columns that every file has.
    """
    have = set(columns)
    every = [
        Grouping("position", "position in the response", "position", _POSITION_BINS, _position_bin, _position_label),
        _probability("rollout_log_prob" if "rollout_log_prob" in have else "old_log_prob"),
        Grouping(
            "entropy",
            "entropy of the trainer's policy, nats",
            "entropy",
            len(_ENTROPY_EDGES) + 1,
            _entropy_bin,
            _between(_ENTROPY_EDGES),
        ),
        Grouping("turn", "turn", "turn", _SMALL_BINS, _small, str),
        Grouping("age", "age of the mini-batch, optimizer updates", "age", _SMALL_BINS, _small, str),
    ]
    return [grouping for grouping in every if grouping.needs in have]

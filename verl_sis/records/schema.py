"""The per-token table of a study: columns, types, meaning and version. ``docs/study.md`` carries the same table.

One row per response token that bears loss; the rows of a response stand together, by position. A file holds only the
columns that were measured. Facts that hold for all rows (the grid of K, the layers, where the data come from) stand in
the footer of each parquet file, so that a file explains itself.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pyarrow

FORMAT = "verl_sis.tokens"
"""Name of the format in the footer."""

VERSION = 2
"""Version of the schema that is written. Older ones are read; newer ones are refused. 2 added the columns by which a
report tells a wrong temperature and a filtering sampler."""

FOOTER_KEY = b"verl_sis"
"""Key of the footer's metadata under which the header stands, as JSON."""

Shape = Literal["token", "by_k", "by_layer", "moments"]
"""Values per row: one, one for each K of the grid, one for each mixture-of-experts layer, or three second moments."""

MOMENTS = 3
"""Second moments of two quantities: square of the first, product, square of the second."""

PAIRS = ("engine", "replay", "floor", "update")
"""Pairs of an old and a current policy that SIS is tried on. ``engine``: rollout engine, then trainer; ``replay``: the
same with the engine's routes replayed; ``floor``: two passes of the trainer over the same weights; ``update``: the
trainer's old policy, then the policy in training."""

OLD_POLICY = {"engine": "rollout", "replay": "rollout", "floor": "native", "update": "old"}
"""Old policy of each pair; ``{old}_rank`` is the sampled token's rank in its top-K."""

LOG_PROBS = {
    "engine": ("rollout_log_prob", "native_log_prob"),
    "replay": ("rollout_log_prob", "replay_log_prob"),
    "floor": ("native_log_prob", "again_log_prob"),
    "update": ("old_log_prob", "log_prob"),
}
"""Columns with the sampled token's log-prob under the old and the current policy of each pair."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: In the file.
        type: Of one value.
        meaning: One sentence, with the unit.
        shape: Values per row.
        required: Every file has it.
        since: Version of the schema that introduced it.
    """

    name: str
    type: pyarrow.DataType
    meaning: str
    shape: Shape = "token"
    required: bool = False
    since: int = 1


def _pair_columns(pair: str, what: str) -> tuple[Column, ...]:
    return (
        Column(f"{pair}_log_envelope", pyarrow.float32(), f"log M^_K, {what}, nats", "by_k"),
        Column(f"{pair}_residual_mass", pyarrow.float32(), f"xi_K, {what}", "by_k"),
        Column(f"{pair}_acceptance", pyarrow.float32(), f"acceptance probability a_K, {what}", "by_k"),
    )


COLUMNS: tuple[Column, ...] = (
    Column("sequence", pyarrow.int64(), "number of the response, unique in its file", required=True),
    Column("position", pyarrow.int32(), "index of the token in its response, from 0", required=True),
    Column("turn", pyarrow.int16(), "turn of the conversation that it was sampled in, from 0", required=True),
    Column("token", pyarrow.int32(), "token id", required=True),
    Column("prompt", pyarrow.int32(), "number of the prompt among those of the study"),
    Column("sample_key", pyarrow.int64(), "hash of prompt and response; equal for equal sequences"),
    Column("step", pyarrow.int32(), "optimizer updates before this rollout was trained on"),
    Column("age", pyarrow.int16(), "optimizer updates of this rollout before the one that used the token"),
    Column("advantage", pyarrow.float32(), "advantage"),
    Column("entropy", pyarrow.float32(), "entropy of the trainer's policy at this token, nats"),
    Column("rollout_log_prob", pyarrow.float32(), "log-prob of the token, rollout engine, nats"),
    Column("old_log_prob", pyarrow.float32(), "trainer, old-log-prob pass, as verl computes it, nats"),
    Column("native_log_prob", pyarrow.float32(), "trainer, the same pass, float32 log-softmax of its logits, nats"),
    Column("again_log_prob", pyarrow.float32(), "trainer, a second pass with other micro-batches, nats"),
    Column("replay_log_prob", pyarrow.float32(), "trainer, with the rollout engine's routes replayed, nats"),
    Column("precise_log_prob", pyarrow.float32(), "trainer, all in float32, nats"),
    Column("anchor_log_prob", pyarrow.float32(), "trainer in train mode, before the first update of the rollout, nats"),
    Column("log_prob", pyarrow.float32(), "policy in training, at this age, nats"),
    Column("accepted", pyarrow.bool_(), "z, the acceptance test that was drawn"),
    Column("rollout_rank", pyarrow.int16(), "rank of the token in the rollout engine's top-K, from 0; -1 outside"),
    Column("native_rank", pyarrow.int16(), "the same in the trainer's top-K"),
    Column("old_rank", pyarrow.int16(), "the same in the top-K of the old policy of an update"),
    *_pair_columns("engine", "rollout engine against trainer"),
    *_pair_columns("replay", "rollout engine against trainer with replay"),
    *_pair_columns("floor", "trainer against itself"),
    *_pair_columns("update", "old policy against the policy in training"),
    Column("layer_overlap", pyarrow.uint8(), "experts that rollout engine and trainer both chose", "by_layer"),
    Column("rollout_mass", pyarrow.float32(), "probability of the rollout engine's first K entries", "by_k", since=2),
    Column(
        "rollout_mass_before",
        pyarrow.float32(),
        "probability of the rollout engine's entries ranked above the token; of all of them if it is outside",
        since=2,
    ),
    Column("rollout_filtered", pyarrow.int16(), "entries of its top-K that the rollout engine had filtered", since=2),
    Column(
        "engine_moments",
        pyarrow.float32(),
        "sums over the rollout engine's usable top-K of log-probs less their mean: trainer squared, product, engine"
        " squared, nats squared",
        "moments",
        since=2,
    ),
)
"""All columns, in the order of the file."""

BY_NAME = {column.name: column for column in COLUMNS}


@dataclass(frozen=True)
class Header:
    """What holds for all rows of a file.

    Attributes:
        kind: ``collect`` (``verl-sis study collect``) or ``dump`` (``sis.dump`` in training).
        ks: The grid of K, increasing.
        source: Where the data come from: model, dtypes, temperature, versions; free, for reports.
        layers: Absolute decoder layers with experts.
        experts_per_token: K of the router; 0 for a dense model.
        version: Of the schema.
    """

    kind: str
    ks: tuple[int, ...]
    source: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    experts_per_token: int = 0
    version: int = VERSION

    def to_bytes(self) -> bytes:
        """The header as it stands in the footer."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True).encode()


def arrow_type(column: Column, header: Header) -> pyarrow.DataType:
    """Type of a column in a file with this header."""
    width = width_of(column, header)
    return column.type if width is None else pyarrow.list_(column.type, width)


def width_of(column: Column, header: Header) -> int | None:
    """Number of values per row of a column in a file with this header; None for a plain column."""
    return {"token": None, "by_k": len(header.ks), "by_layer": len(header.layers), "moments": MOMENTS}[column.shape]

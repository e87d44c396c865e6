"""``sis.dump``: per-token tables of every n-th rollout that is trained on, in the schema of ``verl_sis.records``.

Three log-probs of each token set staleness apart from mismatch: the rollout engine's, the trainer's old pass (eval
mode), and the trainer's in train mode before the first update (the anchor). Each rank writes its own files,

    DIRECTORY/tokens/update-00000040-rank-00003.parquet      per-token table
    DIRECTORY/contexts/...                                   whole top-K at a sample of its tokens
    DIRECTORY/counts/...                                     accepted and rejected tokens of each id, of all responses

named by the update counter at the start of the rollout, which a checkpoint carries: a resumed run overwrites what it
repeats. A file appears complete or not at all.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_sis import __version__, verl_compat
from verl_sis.config import SisConfig
from verl_sis.core.by_k import grid_up_to
from verl_sis.errors import SisConfigError
from verl_sis.integration.dump_rows import RolloutRows
from verl_sis.integration.dump_selection import Selection
from verl_sis.records.contexts import write_contexts
from verl_sis.records.counts import write_counts
from verl_sis.records.schema import Header
from verl_sis.records.write import write_tokens

logger = logging.getLogger("verl_sis")

_SETTINGS = "actor_rollout_ref.actor.policy_loss.sis.dump"
_MB = 10**6


class TokenDump:
    """The dump of one worker: when it is due, and where it is written.

    A rank that cannot go on (its files have reached ``max_mb``, or a write failed) says so once, and the dump of all
    ranks ends for the rest of the run: a pooled study needs all of them. Training goes on.
    """

    def __init__(self, worker: Any, config: SisConfig) -> None:
        """Check that this rank can write.

        Args:
            worker: verl's ``TrainingWorker``.
            config: Settings of SIS, with ``dump.every`` above 0.

        Raises:
            SisConfigError: If it cannot.
        """
        self.rollouts = 0
        """Rollouts trained on so far; kept in checkpoints, so that a resumed run dumps the same ones."""
        self._config = config
        self._engine = worker.engine
        self._vocab_size = verl_compat.vocab_size(worker.model_config)
        self._rank = worker.rank
        self._writes = worker.engine.is_mp_src_rank_with_outputs()
        self._directory = Path(config.dump.directory).expanduser().absolute()
        self._ended = self._cannot_go_on = self._warned = False
        self._header = Header(kind="dump", ks=grid_up_to(config.top_k), source=_source(worker, config))
        self._sizes: dict[str, int] = {}
        """Bytes of each token file of this rank, those of the run that is resumed included."""
        if self._writes:
            self._prepare_directory()

    def due(self) -> bool:
        """Whether the rollout that comes is dumped. Counts it; collective, so every rank must ask once a rollout."""
        number, self.rollouts = self.rollouts, self.rollouts + 1
        if self._ended or number % self._config.dump.every:
            return False
        self._check_size()
        self._ended = not verl_compat.true_on_all_ranks(not self._cannot_go_on)
        return not self._ended

    def begin(self, data: TensorDict, update: int) -> RolloutRows:
        """Choose what is kept of a rollout.

        Args:
            data: Its samples on this rank, with sample keys.
            update: Update counter before its first update.
        """
        epochs: int = tu.get(data, "epochs", default=1)
        selection = Selection.of(data, self._config, epochs=epochs, update=update)
        if self._writes and not len(selection.keys) and not self._warned:
            self._warned = True
            logger.warning(
                "sis.dump: the first response chosen has more tokens, over %d epochs, than max_tokens=%d, so the table "
                "of rank %d has no rows. Type %s.max_tokens=%d or more",
                *(epochs, self._config.dump.max_tokens, self._rank, _SETTINGS, 2 * self._config.dump.max_tokens),
            )
        return RolloutRows(selection, self._config, self._vocab_size, keeps=self._writes)

    def write(self, rows: RolloutRows) -> None:
        """Write the files of a rollout; a failure of the file system ends the dump, not the training.

        Args:
            rows: What was kept of it.
        """
        if not self._writes:
            return
        update = rows.selection.update
        columns, contexts = _numbered(rows)
        columns["step"] = np.full(len(columns["sequence"]), update)
        try:
            target = self._path("tokens", update)
            self._sizes[target.name] = write_tokens(target, columns, self._header)
            write_contexts(self._path("contexts", update), "update", contexts)
            write_counts(self._path("counts", update), rows.counts)
        except OSError as error:
            self._cannot_go_on = True
            logger.error(
                "sis.dump: rank %d could not write update %d to %s (%s). Training goes on without further dumps. Free "
                "or mount space there, or type %s.directory=/another/path, and resume from a checkpoint",
                *(self._rank, update, self._directory, error, _SETTINGS),
            )

    def _path(self, kind: str, update: int) -> Path:
        return self._directory / kind / f"update-{update:08d}-rank-{self._rank:05d}.parquet"

    def _prepare_directory(self) -> None:
        try:
            for kind in ("tokens", "contexts", "counts"):
                (self._directory / kind).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._directory / "tokens") as probe:
                probe.write(b"verl_sis")
            files = self._directory.glob(f"tokens/update-*-rank-{self._rank:05d}.parquet")
            self._sizes = {file.name: file.stat().st_size for file in files}
        except OSError as error:
            raise SisConfigError(
                f"policy_loss.sis.dump.directory={str(self._directory)!r} cannot be written to by rank {self._rank} "
                f"({error}). Type {_SETTINGS}.directory=/a/writable/path, or {_SETTINGS}.every=0 for no dump"
            ) from error

    def _check_size(self) -> None:
        if not self._writes or self._cannot_go_on:
            return
        most, written = self._config.dump.max_mb, sum(self._sizes.values())
        if written < most * _MB:
            return
        self._cannot_go_on = True
        logger.warning(
            "sis.dump: the token files of rank %d hold %d MB, and max_mb is %d. Training goes on without further dumps."
            " For more, type %s.max_mb=%d, or a larger %s.every",
            *(self._rank, written // _MB, most, _SETTINGS, 2 * most, _SETTINGS),
        )


def _source(worker: Any, config: SisConfig) -> dict[str, Any]:
    from torch.distributed import get_world_size

    return {
        "model": str(worker.model_config.path),
        "strategy": worker.engine_config.strategy,
        "dtype": verl_compat.forward_dtype(worker.engine),
        **{name: getattr(config, name) for name in ("base_loss", "top_k", "estimator", "outside_top_k", "seed")},
        "temperature": config.run.temperature,
        "rank": worker.rank,
        "world_size": get_world_size(),
        "versions": {"verl": verl_compat.installed_verl(), "verl-sis": __version__},
    }


def _numbered(rows: RolloutRows) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Columns of the two tables, in an order that micro-batches have no part in: by age, sample key and position."""
    columns, contexts = _joined(rows.columns), _joined(rows.contexts)
    sequence = columns["sequence"]
    first = np.r_[True, sequence[1:] != sequence[:-1]][: len(sequence)]
    number = np.zeros(rows.samples, dtype=np.int64)
    number[sequence[first]] = np.arange(first.sum())
    contexts.pop("sample_key")
    for table in (columns, contexts):
        table["sequence"] = number[table["sequence"]]
    return columns, contexts


def _joined(tables: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    joined = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    order = np.lexsort([joined[name] for name in ("position", "sequence", "sample_key", "age")])
    return {name: values[order] for name, values in joined.items()}

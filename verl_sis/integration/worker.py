"""The actor's worker under SIS: captures the top-K in the old pass, tests in the update, pools the statistics."""

import functools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_sis import __version__, verl_compat
from verl_sis.config import SisConfig, SisPolicyLossConfig
from verl_sis.core.metrics import mismatch_metrics, sis_metrics
from verl_sis.core.statistics import PooledStatistics
from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.integration.base_loss import check_uses_ratio, resolve_base_loss
from verl_sis.integration.dump_rows import AnchorPass
from verl_sis.integration.live_logits import Look, look_at_fsdp
from verl_sis.integration.passes import STATISTICS, OldPass, UpdatePass
from verl_sis.integration.store import TopKStore
from verl_sis.verl_compat import is_old_pass

if TYPE_CHECKING:
    from verl_sis.integration.dump import TokenDump

logger = logging.getLogger("verl_sis")
logger.setLevel(os.getenv("VERL_SIS_LOGGING_LEVEL", "INFO"))

_STATE_FILE = "verl_sis_rank_{rank}.json"
_STATE_FORMAT = 1

ALIGNMENT_TOLERANCE = 0.05
"""Mean |stored - trainer's| old log-prob, in nats, above which the stored top-K belongs to other tokens. Aligned rows
differ only where one sequence occurs twice in a batch and its two forward passes round differently."""


class SisTrainingWorker(TrainingWorker):
    """verl's ``TrainingWorker`` with SIS around its loss function, configured by that function's own config."""

    _update_pass: UpdatePass | None = None
    _dump: "TokenDump | None" = None
    _in_mini_batch_loop = False
    _looks_inside_forward = False

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Wrap the loss function that verl gives its actor.

        Args:
            loss_fn: ``partial(ppo_loss, config=actor_config)``.

        Raises:
            SisConfigError: If the configuration asks for what this worker cannot do.
            VerlContractError: If the loss function is not verl's PPO loss.
        """
        actor_config = verl_compat.actor_config_of(loss_fn)
        policy_loss = actor_config.policy_loss
        if not isinstance(policy_loss, SisPolicyLossConfig):
            self._update_pass = self._dump = None
            super().set_loss_fn(loss_fn)
            return
        config = policy_loss.sis
        vocab_size = verl_compat.vocab_size(self.model_config)
        if config.top_k > vocab_size:
            raise SisConfigError(
                f"policy_loss.sis.top_k={config.top_k} is larger than the vocabulary of {vocab_size} tokens. Type "
                f"actor_rollout_ref.actor.policy_loss.sis.top_k={vocab_size} for the exact envelope, or a smaller K"
            )
        verl_compat.check_registered_loss()
        verl_compat.check_engine(self.engine)
        if self.engine_config.use_fused_kernels and not self._looks_inside_forward:
            verl_compat.look_inside_forward(self.engine)
            self._looks_inside_forward = True
        base_loss = resolve_base_loss(config)
        check_uses_ratio(config.base_loss, base_loss, actor_config)
        self._store = TopKStore()
        look = self._look()
        self._old_pass = OldPass(config, self._store, look)
        self._update_pass = UpdatePass(config, self._store, base_loss, loss_fn, look)
        self._dump = self._open_dump(config)
        super().set_loss_fn(self._update_pass)
        if self.rank == 0:
            logger.info(
                "SIS active: verl_sis %s, verl %s, base loss %s, K=%d of %d, estimator %s, outside top-K: %s, seed %d",
                *(__version__, verl_compat.installed_verl(), config.base_loss, config.top_k, vocab_size),
                *(config.estimator, config.outside_top_k, config.seed),
            )

    @functools.wraps(TrainingWorker.infer_batch)
    def infer_batch(self, data: TensorDict) -> Any:
        """Run the old pass and keep the top-K of its samples; any other forward pass is verl's alone."""
        if self._update_pass is None or not is_old_pass(data):
            return super().infer_batch(data)
        self._store.clear()
        verl_compat.attach_sample_keys(data)
        tu.assign_non_tensor(data, compute_loss=True, **{verl_compat.LOGITS_HOOK_FLAG: True})
        with self._loss_function(self._old_pass):
            return super().infer_batch(data)

    @functools.wraps(TrainingWorker.train_mini_batch)
    def train_mini_batch(self, data: TensorDict) -> Any:
        """Run all mini-batches of an update, pool their statistics, and free the top-K."""
        if self._update_pass is None:
            return super().train_mini_batch(data)
        self._in_mini_batch_loop = True
        try:
            with self._dumped(data):
                output = super().train_mini_batch(data)
        finally:
            self._in_mini_batch_loop = False
            self._store.clear()
        return verl_compat.with_metrics(output, _by_age)

    @functools.wraps(TrainingWorker.train_batch)
    def train_batch(self, data: TensorDict) -> Any:
        """Run one optimizer update with acceptance tests."""
        if self._update_pass is None:
            return super().train_batch(data)
        verl_compat.attach_sample_keys(data)
        tu.assign_non_tensor(data, **{verl_compat.LOGITS_HOOK_FLAG: True})
        output = super().train_batch(data)
        self._update_pass.update += 1
        return verl_compat.with_metrics(output, _pool if self._in_mini_batch_loop else _pool_and_report)

    @functools.wraps(TrainingWorker.save_checkpoint)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> Any:
        """Save verl's checkpoint and the update counter beside it."""
        result = super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)
        if self._update_pass is not None:
            target = Path(local_path) / _STATE_FILE.format(rank=self.rank)
            temporary = target.with_suffix(".tmp")
            state = {"format": _STATE_FORMAT, "updates": self._update_pass.update}
            if self._dump is not None:
                state["rollouts"] = self._dump.rollouts
            temporary.write_text(json.dumps(state))
            temporary.replace(target)
        return result

    @functools.wraps(TrainingWorker.load_checkpoint)
    def load_checkpoint(self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False) -> Any:
        """Load verl's checkpoint and the update counter, so that z continues instead of repeating."""
        state_file = Path(local_path) / _STATE_FILE.format(rank=self.rank)
        state = json.loads(state_file.read_text()) if state_file.exists() else None
        result = super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
        if self._update_pass is not None:
            self._restore(state, state_file)
        return result

    def _restore(self, state: dict[str, int] | None, state_file: Path) -> None:
        assert self._update_pass is not None
        if state is None:
            logger.warning(
                "%s is not in the checkpoint: it was written without SIS. The update counter starts at 0", state_file
            )
            self._update_pass.update = 0
            return
        if state.get("format") != _STATE_FORMAT:
            raise SisStateError(
                f"{state_file} has format {state.get('format')!r}, but this verl_sis reads format {_STATE_FORMAT}. "
                "Resume with the verl_sis version that wrote the checkpoint"
            )
        self._update_pass.update = state["updates"]
        if self._dump is not None:
            self._dump.rollouts = state.get("rollouts", 0)

    def extra_pass(self, data: TensorDict) -> AbstractContextManager[None]:
        """What an extra forward pass over the samples of an update runs in: nothing, but for routing replay.

        Args:
            data: The samples.
        """
        return nullcontext()

    def _look(self) -> Look:
        """How the logits of this worker's engine are read."""
        if not verl_compat.is_megatron_engine(self.engine):
            return look_at_fsdp
        from verl_sis.integration.megatron import MegatronLook

        return MegatronLook(self.engine)

    def _open_dump(self, config: SisConfig) -> "TokenDump | None":
        if not config.dump.every:
            return None
        from verl_sis.integration.dump import TokenDump  # reads and writes parquet, which a run without dumps does not

        return TokenDump(self, config)

    @contextmanager
    def _dumped(self, data: TensorDict) -> Iterator[None]:
        """Keep the tokens of a rollout while it is trained on, and write them, where ``sis.dump`` says so."""
        update_pass, dump = self._update_pass, self._dump
        assert update_pass is not None
        if dump is None or not dump.due():
            yield
            return
        verl_compat.attach_sample_keys(data)
        rows = dump.begin(data, update_pass.update)
        # Around verl's own train mode, whose weights then stay where they are between this pass and the updates.
        with self.engine.train_mode(disable_auto_offload=tu.get(data, "disable_auto_offload", default=False)):
            batch = data.copy()
            with self.extra_pass(batch):
                verl_compat.forward_as_in_update(self, batch, AnchorPass(rows))
            tu.assign_non_tensor(data, disable_auto_offload=True)
            update_pass.rows = rows
            try:
                yield
            finally:
                update_pass.rows = None
        dump.write(rows)

    @contextmanager
    def _loss_function(self, loss_fn: Any) -> Iterator[None]:
        previous = self.loss_fn
        self.loss_fn = loss_fn
        try:
            yield
        finally:
            self.loss_fn = previous


def _pool(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the statistics of all ranks and micro-batches of one update by their merger, and check alignment."""
    pooled = verl_compat.merge_exchanged(PooledStatistics(), metrics.pop(STATISTICS))
    tokens = pooled.sums["tokens"]
    gap = pooled.sums["stored_gap"] / tokens if tokens else 0.0
    if not gap <= ALIGNMENT_TOLERANCE:
        raise SisStateError(
            f"the stored old log-probs differ from the trainer's by {gap:.3g} nats a token on average (tolerance "
            f"{ALIGNMENT_TOLERANCE}): the top-K columns belong to other tokens, or old_log_probs does not come from "
            "this actor's compute_log_prob"
        )
    return {**metrics, STATISTICS: pooled}


def _report(pooled: PooledStatistics) -> dict[str, list[float]]:
    values = sis_metrics(pooled)
    if pooled.sums["mismatch_tokens"] or pooled.sums["mismatch_non_finite"]:
        values |= mismatch_metrics(pooled)
    return {name: [value] for name, value in values.items()}


def _pool_and_report(metrics: dict[str, Any]) -> dict[str, Any]:
    metrics = _pool(metrics)
    return {**metrics, **_report(metrics.pop(STATISTICS))}


def _by_age(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics over all mini-batches of an update, and two rates of each by its age in optimizer steps."""
    updates = metrics.pop(STATISTICS)
    metrics.update(_report(verl_compat.merge_exchanged(PooledStatistics(), updates)))
    for age, pooled in enumerate(updates):
        values = sis_metrics(pooled)
        for rate in ("accept_rate", "in_topk_rate"):
            metrics[f"sis/{rate}_by_age/{age}"] = [values[f"sis/{rate}"]]
    return metrics

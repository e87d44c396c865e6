"""The actor's worker under routing replay, on verl's FSDP engines."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import TrainingWorker

from verl_sis import verl_compat
from verl_sis.core.statistics import mismatch_statistics
from verl_sis.errors import SisConfigError
from verl_sis.routing_replay.config import RoutingReplayConfig
from verl_sis.routing_replay.controller import RoutingReplay
from verl_sis.routing_replay.passes import PASS, RECORD, REPLAY_RECORDED, REPLAY_ROLLOUT, RoutingPasses, check_agreement
from verl_sis.routing_replay.report import REPORT, RoutingReport, report_metrics
from verl_sis.routing_replay.routers import find_routers

logger = logging.getLogger("verl_sis")


class RoutingReplayWorker(TrainingWorker):
    """verl's ``TrainingWorker`` with routing replay, configured by its engine's ``router_replay`` section."""

    _passes: RoutingPasses | None = None
    _replay_config: RoutingReplayConfig
    _in_update = False
    _age = 0
    _old_passes = 0

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Install routing replay if the configuration chose it, then wrap the loss function.

        Args:
            loss_fn: ``partial(ppo_loss, config=actor_config)``.

        Raises:
            SisConfigError: If the model or the engine cannot be replayed.
        """
        super().set_loss_fn(loss_fn)
        config = self.engine_config.router_replay
        if config.mode == "disabled" or not verl_compat.is_fsdp_engine(self.engine):
            return
        if not isinstance(config, RoutingReplayConfig):
            raise SisConfigError(
                f"router_replay.mode={config.mode!r} was set by hand; verl's FSDP engine ignores it. Type "
                f"+routing_replay@_global_={config.mode.lower()}"
            )
        if self._passes is None:
            self._replay_config = config
            self._passes = self._install(config)
        self._pending = RoutingReport()
        self.loss_fn = _ReportingLoss(self.loss_fn, self._report_of_micro_batch)

    def _install(self, config: RoutingReplayConfig) -> RoutingPasses:
        """Hook the routers of this worker's model, once."""
        model_config = verl_compat.text_config(self.engine)
        routers = find_routers(verl_compat.model_of(self.engine), model_config, verl_compat.current_device())
        first = routers[0]
        if config.mode == "R3" and first.experts_per_token == 1:
            raise SisConfigError(
                "R3 cannot replay a model with one expert per token: verl carries a missing route as expert 0, which "
                "is then a possible choice. Type +routing_replay@_global_=r2, or train without routing replay"
            )
        if self.rank == 0:
            logger.info(
                "routing replay %s active: %s, %d of %d decoder layers, %d of %d experts per token",
                *(config.mode, first.family.name, len(routers)),
                *(model_config.num_hidden_layers, first.experts_per_token, first.experts),
            )
        return RoutingPasses(self.engine, RoutingReplay(routers))

    def reports_mismatch(self) -> bool:
        """Whether ``mismatch/*`` is this worker's to report."""
        return True

    @functools.wraps(TrainingWorker.infer_batch)
    def infer_batch(self, data: TensorDict) -> Any:
        """Run the old pass under replay, or record it; any other forward pass routes natively."""
        if self._passes is None or not verl_compat.is_old_pass(data):
            return super().infer_batch(data)
        config, passes = self._replay_config, self._passes
        self._pending = RoutingReport()
        passes.store.clear()
        untouched = data.copy()
        what = REPLAY_ROLLOUT if config.mode == "R3" else RECORD
        with self._pass(data, what, count=True):
            output = super().infer_batch(data)
        if config.mode == "R3":
            self._pending.equal_weights = passes.take()
            check_agreement(self._pending.equal_weights, config.min_agreement)
        if config.native_pass_every and self._old_passes % config.native_pass_every == 0:
            self._compare_natively(untouched)
        self._old_passes += 1
        return output

    @functools.wraps(TrainingWorker.train_mini_batch)
    def train_mini_batch(self, data: TensorDict) -> Any:
        """Run all mini-batches of an update under replay, pool their statistics, and free the recorded routes."""
        if self._passes is None:
            return super().train_mini_batch(data)
        self._in_update, self._age = True, 0
        try:
            output = super().train_mini_batch(data)
        finally:
            self._in_update, self._age = False, 0
            self._passes.store.clear()
        return verl_compat.with_metrics(output, _report_by_age)

    @functools.wraps(TrainingWorker.train_batch)
    def train_batch(self, data: TensorDict) -> Any:
        """Run one optimizer update under replay."""
        if self._passes is None:
            return super().train_batch(data)
        what = REPLAY_ROLLOUT if self._replay_config.mode == "R3" else REPLAY_RECORDED
        with self._pass(data, what, count=self._replay_config.run.bypass_mode and self._age == 0):
            output = super().train_batch(data)
        self._age += 1
        return verl_compat.with_metrics(output, _pool if self._in_update else _pool_and_report)

    @contextmanager
    def extra_pass(self, data: TensorDict) -> Iterator[None]:
        """Have one more forward pass over the samples of an update route as the update does, and count nothing.

        Args:
            data: The samples.
        """
        if self._passes is None:
            yield
            return
        statistics = self._passes.take()
        what = REPLAY_ROLLOUT if self._replay_config.mode == "R3" else REPLAY_RECORDED
        with self._pass(data, what, count=False):
            yield
        self._passes.statistics = statistics

    @contextmanager
    def _pass(self, data: TensorDict, what: str, *, count: bool) -> Iterator[None]:
        """Have the forward passes of a batch do ``what``, and leave nothing behind, not even after an exception."""
        assert self._passes is not None
        if what != REPLAY_ROLLOUT:
            verl_compat.attach_sample_keys(data)
        tu.assign_non_tensor(data, **{PASS: what})
        self._passes.count = count
        try:
            yield
        except BaseException:
            self._passes.take()
            raise
        finally:
            self._passes.replay.disarm()

    def _report_of_micro_batch(self, data: TensorDict, model_output: dict[str, Any]) -> RoutingReport:
        """What one micro-batch of the update has to report, and what the old pass has left, once."""
        assert self._passes is not None
        report, self._pending = self._pending, RoutingReport()
        report.update = self._passes.take()
        if self._replay_config.run.bypass_mode and self._age == 0:
            check_agreement(report.update, self._replay_config.min_agreement)
        trainer = self._trainer_log_probs(data, model_output)
        if trainer is not None:
            report.mismatch = mismatch_statistics(
                mask=verl_compat.padded(data, "response_mask").bool(),
                old_log_prob=trainer.float(),
                rollout_log_prob=verl_compat.padded(data, "rollout_log_probs").float(),
            )
        return report

    def _trainer_log_probs(self, data: TensorDict, model_output: dict[str, Any]) -> torch.Tensor | None:
        """The trainer's log-probs ``[B, T]`` at the weights of the rollout, where ``mismatch/*`` is ours to report."""
        if not self.reports_mismatch() or "rollout_log_probs" not in data:
            return None
        if not self._replay_config.run.bypass_mode:
            return verl_compat.padded(data, "old_log_probs")
        # In bypass mode old_log_probs are the rollout engine's own; the trainer's are at hand in the update, and are
        # those of equal weights in its first mini-batch.
        return verl_compat.response_columns(model_output["log_probs"].detach(), data) if self._age == 0 else None

    def _compare_natively(self, data: TensorDict) -> None:
        """Score the samples twice without replay, and compare with the rollout engine and with each other."""
        first = self._native_log_probs(data)
        backwards = list(reversed(range(data.shape[0])))
        second = self._native_log_probs(tu.index_select_tensor_dict(data, backwards))
        if first is None or second is None:
            return  # a rank that verl takes no outputs from
        mask = verl_compat.padded(data, "response_mask").bool()
        if "rollout_log_probs" in data:
            rollout = verl_compat.padded(data, "rollout_log_probs").float()
            self._pending.native = mismatch_statistics(mask=mask, old_log_prob=first, rollout_log_prob=rollout)
        self._pending.floor = mismatch_statistics(mask=mask, old_log_prob=second.flip(0), rollout_log_prob=first)

    def _native_log_probs(self, data: TensorDict) -> torch.Tensor | None:
        """Float32 ``[B, T]``: the trainer's log-probs under native routing."""
        batch = data.copy()
        tu.assign_non_tensor(batch, compute_loss=False, calculate_entropy=False)
        output = TrainingWorker.infer_batch(self, batch)
        return None if output is None else verl_compat.response_columns(output["log_probs"], data).float()


class _ReportingLoss:
    """The loss function of the update, with the routing report of each micro-batch among its metrics.

    Called twice per micro-batch where verl's logits hook is on; the first call is passed through.
    """

    def __init__(self, loss_fn: Callable[..., Any], report: Callable[[TensorDict, dict[str, Any]], RoutingReport]):
        self._loss_fn, self._report = loss_fn, report

    def __call__(self, **arguments: Any) -> Any:
        result = self._loss_fn(**arguments)
        if arguments.get("student_logits") is not None:
            return result
        loss, metrics = result
        return loss, {**metrics, REPORT: self._report(arguments["data"], arguments["model_output"])}


def _pool(metrics: dict[str, Any]) -> dict[str, Any]:
    """Replace the reports of all ranks and micro-batches of one update by their merger."""
    return {**metrics, REPORT: verl_compat.merge_exchanged(RoutingReport(), metrics.pop(REPORT))}


def _as_lists(values: dict[str, float]) -> dict[str, list[float]]:
    return {name: [value] for name, value in values.items()}


def _pool_and_report(metrics: dict[str, Any]) -> dict[str, Any]:
    total = verl_compat.merge_exchanged(RoutingReport(), metrics.pop(REPORT))
    return {**metrics, **_as_lists(report_metrics(total, [total]))}


def _report_by_age(metrics: dict[str, Any]) -> dict[str, Any]:
    updates = [verl_compat.merge_exchanged(RoutingReport(), update) for update in metrics.pop(REPORT)]
    return {**metrics, **_as_lists(report_metrics(verl_compat.merge_exchanged(RoutingReport(), updates), updates))}

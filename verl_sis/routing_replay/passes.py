"""The passes of an actor under routing replay: what each micro-batch arms before the model runs, and collects after."""

from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_sis import verl_compat
from verl_sis.core.routing import REGIONS, RoutingObserver, RoutingStatistics
from verl_sis.errors import SisStateError
from verl_sis.routing_replay.controller import RoutingReplay
from verl_sis.routing_replay.store import RouteStore
from verl_sis.routing_replay.targets import Rows, Targets, checked_presence, routes_of
from verl_sis.verl_compat import SAMPLE_KEY

PASS = "verl_sis_routing_pass"
"""Non-tensor entry of a batch that says what its forward passes do; without it they route natively."""

REPLAY_ROLLOUT, RECORD, REPLAY_RECORDED = "replay_rollout", "record", "replay_recorded"


class RoutingPasses:
    """Arms the replay of one engine, micro-batch by micro-batch, as the batch's ``PASS`` says."""

    def __init__(self, engine: Any, replay: RoutingReplay) -> None:
        """Frame the engine's forward passes.

        Args:
            engine: verl's FSDP engine.
            replay: Replay in that engine's model.
        """
        self.replay = replay
        self.store = RouteStore()
        self.statistics = RoutingStatistics()
        """Of the micro-batches since the last ``take``."""
        self.count = False
        """Count experts, for the chance-corrected agreement."""
        self._engine = engine
        self._layers: int = verl_compat.text_config(engine).num_hidden_layers
        self._rows: Rows | None = None
        verl_compat.around_forward(engine, self._before, self._after)

    def take(self) -> RoutingStatistics:
        """The statistics since the last call, and start over."""
        taken, self.statistics = self.statistics, RoutingStatistics()
        return taken

    def _before(self, data: TensorDict, model_inputs: dict[str, Any]) -> None:
        what: Any = tu.get_non_tensor_data(data, PASS, None)
        if what is None:
            self.replay.disarm()
            self._rows = None
            return
        packed_index = verl_compat.model_rows(self._engine, data)
        verl_compat.check_model_rows(packed_index, data, model_inputs)
        self._rows = rows = Rows.of(packed_index, data)
        if what == RECORD:
            self.replay.record(rows)
            return
        self.replay.arm(self._targets(what, rows, data), count=self.count)

    def _targets(self, what: str, rows: Rows, data: TensorDict) -> Targets:
        replay = self.replay
        if what == REPLAY_ROLLOUT:
            routes = routes_of(data, self._layers, replay.experts_per_token)
            columns = {layer: layer for layer in replay.layers}
            present = checked_presence(routes, columns, replay.experts, data)
            return Targets.of(routes, present, columns, rows)
        routes = self.store.get(data[SAMPLE_KEY].tolist(), rows.packed_index.device)
        columns = {layer: column for column, layer in enumerate(replay.layers)}
        return Targets.of(routes, torch.ones_like(routes[:, 0, 0], dtype=torch.bool), columns, rows)

    def _after(self, data: TensorDict) -> None:
        if self._rows is None:
            return
        observer = self.replay.finish_forward()
        if observer is None:
            self._keep_recording(self._rows, data)
        else:
            self.statistics.merge(self._pooled(observer, self._rows))

    def _keep_recording(self, rows: Rows, data: TensorDict) -> None:
        tokens, ends = verl_compat.packed(data, "input_ids")
        recording = verl_compat.gather_packed_integers(self.replay.recording())
        index = verl_compat.gather_packed_integers(rows.packed_index)
        real = index != verl_compat.NO_TOKEN
        if int(real.sum()) != len(tokens):
            raise SisStateError(f"recorded the routes of {int(real.sum())} tokens, expected {len(tokens)}")
        routes = recording.new_empty((len(tokens), *recording.shape[1:]))
        routes[index[real]] = recording[real]
        self.store.put(data[SAMPLE_KEY].tolist(), ends, routes)

    def _pooled(self, observer: RoutingObserver, rows: Rows) -> RoutingStatistics:
        """Statistics of a micro-batch, added up over the ranks of its sequence-parallel group."""
        targets = self.replay.targets
        native = rows.real & ~targets.valid
        routes = targets.ids
        counts = [rows.real.sum(), native.sum(), (native & ~rows.last).sum()]
        counts.append(torch.full_like(counts[0], routes.numel() * routes.element_size()))
        extra = torch.stack(counts)
        packed = verl_compat.sum_over_sequence_parallel(torch.cat([extra, observer.packed()]))
        pooled = observer.statistics(packed[len(extra) :])
        named = zip(("rows", "native_rows", "missing_rows", "route_bytes"), packed[: len(extra)].tolist(), strict=True)
        pooled.sums.update((name, float(value)) for name, value in named)
        return pooled


def check_agreement(pooled: RoutingStatistics, least: float) -> None:
    """Stop a run whose routes belong to other tokens or layers: shapes never tell.

    Args:
        pooled: Statistics of a replay at equal weights, experts counted.
        least: Least chance-corrected agreement of any layer and region; 0 switches the alarm off.

    Raises:
        SisStateError: If any is lower.
    """
    if not least:
        return
    agreement = pooled.agreement()
    for region, by_layer in zip(REGIONS, agreement.tolist(), strict=True):
        for layer, value in zip(pooled.layers, by_layer, strict=True):
            if value < least:
                raise SisStateError(
                    f"the rollout engine's routes agree with the trainer's own by {value:.2f} on {region} tokens of "
                    f"decoder layer {layer} (chance-corrected; expected at least {least}, equality is 1, shuffled rows "
                    "give 0). They belong to other tokens or layers, or the two engines hold other weights. If the "
                    "rollouts are from much older weights, lower router_replay.min_agreement"
                )

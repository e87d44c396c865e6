"""Two steps of one rollout in several layouts of VeOmni's ranks; jobs for ``tests.worker.ranks.TwoRanks``."""

from pathlib import Path
from typing import Any

import torch

from tests.veomni import harness as veomni
from tests.veomni.harness import Settings
from tests.worker import harness, recorder
from tests.worker.ranks import EPOCHS


def two_steps_of_each(
    rank: int, model: Path, layouts: dict[str, Settings], rollout: harness.Rollout
) -> dict[str, dict[str, Any]]:
    """Two steps of each layout on a rank."""
    return {name: two_steps(model, settings, rollout, rank) for name, settings in layouts.items()}


def two_steps(model: Path, settings: Settings, rollout: harness.Rollout, rank: int) -> dict[str, Any]:
    """Two steps (old pass, update) of this rank on its share of the rollout, each of ``EPOCHS``.

    Returns:
        Its decisions, the metrics of its updates (empty where verl returns none), and the first old log-probs.
    """
    worker = veomni.build_worker(model, settings)
    return steps_of(worker, settings, rollout, rank)


def steps_of(worker: Any, settings: Settings, rollout: harness.Rollout, rank: int) -> dict[str, Any]:
    """The two steps of a worker that is built."""
    world_size, size = torch.distributed.get_world_size(), settings.ulysses
    replay = {"enable_routing_replay": settings.replay != "disabled"}
    count = len(rollout.responses) * size // world_size
    first = (rank // size) * count
    own = rollout.select(list(range(first, first + count)))
    if settings.replay != "R3":
        own.routes = []
    decisions = recorder.record(worker)
    metrics, old_log_probs = [], None
    for _ in range(2):
        output = harness.old_pass(worker, own, **replay)
        columns = of_group(output, rank - rank % size)
        old = harness.response_log_probs({"log_probs": columns.pop("log_probs")}, own)
        old_log_probs = torch.cat(old.unbind()) if old_log_probs is None else old_log_probs
        columns["rollout_log_probs"] = old
        extent = {"mini_batch_size": len(rollout.responses), "epochs": EPOCHS}
        metrics.append(harness.update(worker, own, old, columns=columns, **extent, **replay))
    return {"decisions": decisions, "metrics": metrics, "old_log_probs": old_log_probs}


def resumed(
    rank: int, model: Path, settings: Settings, rollout: harness.Rollout, folder: Path
) -> tuple[recorder.Decisions, recorder.Decisions]:
    """Decisions of steps 2 and 3 of a worker, and of another that starts from its checkpoint after steps 0 and 1."""
    worker = veomni.build_worker(model, settings)
    steps_of(worker, settings, rollout, rank)
    worker.save_checkpoint(str(folder), global_step=2)
    went_on = steps_of(worker, settings, rollout, rank)["decisions"]
    other = veomni.build_worker(model, settings)
    other.load_checkpoint(str(folder))
    return went_on, steps_of(other, settings, rollout, rank)["decisions"]


def of_group(output: Any, source: int) -> dict[str, torch.Tensor]:
    """The columns of an old pass that its update gets, from the rank of the sequence-parallel group that has them."""
    columns = {}
    if output is not None:
        names = [name for name in ("log_probs", "routed_experts") if name in output]
        columns = {name: [row.clone() for row in output[name].unbind()] for name in names}
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, columns)
    return {name: harness.nested(rows) for name, rows in found[source].items()}

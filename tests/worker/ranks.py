"""Real process groups: the same rollout on two gloo ranks of one machine, in several layouts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import tests.subprocesses  # noqa: F401  (tells the server what to have at hand)
from tests.worker import harness, recorder, ulysses_on_cpu

WORLD_SIZE = 2


@dataclass
class Layout:
    """How the ranks share the work: data parallel, or Ulysses sequence parallel of size 2."""

    settings: harness.Settings
    sequence_parallel: int = 1


def run_on_ranks(folder: Path, layouts: dict[str, Layout], rollout: harness.Rollout) -> dict[str, list[dict[str, Any]]]:
    """Run two steps of each layout on one pair of fresh processes.

    Returns:
        By layout, of each rank: its decisions, and the metrics of its updates (empty where verl returns none).
    """
    mp.start_processes(
        _rank_main,
        args=(harness.free_port(), folder, layouts, rollout),
        nprocs=WORLD_SIZE,
        start_method="forkserver",
    )
    results = [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]
    return {name: [result[name] for result in results] for name in layouts}


def _rank_main(rank: int, port: int, folder: Path, layouts: dict[str, Layout], rollout: harness.Rollout) -> None:
    harness.prepare_environment(rank, WORLD_SIZE, port)
    torch.set_num_threads(1)
    ulysses_on_cpu.install()
    try:
        results = {name: two_steps(layout, rollout, rank) for name, layout in layouts.items()}
        torch.save(results, folder / f"rank_{rank}.pt")
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def two_steps(layout: Layout, rollout: harness.Rollout, rank: int = 0, world_size: int = WORLD_SIZE) -> dict[str, Any]:
    """Two steps (old pass, update) of one rank on its share of the rollout."""
    size = layout.sequence_parallel
    worker = harness.build_worker(layout.settings)
    count = len(rollout.responses) * size // world_size
    first = (rank // size) * count
    own = rollout.select(list(range(first, first + count)))
    decisions = recorder.record(worker)
    metrics = []
    for _ in range(2):
        output = harness.old_pass(worker, own)
        # Ranks that verl takes no output from still score and update; the trainer sends them the same rows.
        outputs: list[Any] = [None] * world_size
        log_probs = None if output is None else [row.clone() for row in output["log_probs"].unbind()]
        torch.distributed.all_gather_object(outputs, log_probs)
        old = harness.response_log_probs({"log_probs": harness.nested(outputs[rank - rank % size])}, own)
        columns = {"rollout_log_probs": old}
        metrics.append(harness.update(worker, own, old, mini_batch_size=len(rollout.responses), columns=columns))
    return {"decisions": decisions, "metrics": metrics}

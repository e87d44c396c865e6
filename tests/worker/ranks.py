"""Two real ranks of one gloo group, and the same rollout in several layouts on them."""

import gc
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import tests.subprocesses  # noqa: F401  (tells the server what to have at hand)
from tests.worker import fused, harness, recorder, ulysses_on_cpu

WORLD_SIZE = 2
EPOCHS = 2


class TwoRanks:
    """Two processes that import verl once and then run one job after another."""

    def __init__(self, world_size: int = WORLD_SIZE) -> None:
        """Start them; another number of them if asked."""
        self._jobs: list[SimpleQueue] = [get_context("forkserver").SimpleQueue() for _ in range(world_size)]
        self._processes = mp.start_processes(
            _rank_main,
            args=(harness.free_port(), self._jobs),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )

    def run(self, folder: Path, job: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what ``job(rank, *args)`` returns on each rank; raise what it raises on one of them."""
        files = [folder / f"rank_{rank}.pt" for rank in range(len(self._jobs))]
        for jobs, file in zip(self._jobs, files, strict=True):
            jobs.put(pickle.dumps((job, args, file)))
        while not all(file.exists() for file in files):
            assert not self._processes.join(timeout=0.1), "the ranks ended without a result"
        return [torch.load(file, weights_only=False) for file in files]

    def stop(self) -> None:
        """End them."""
        for jobs in self._jobs:
            jobs.put(None)
        for process in self._processes.processes:
            process.join(30)
            process.kill()


def _rank_main(rank: int, port: int, queues: list[SimpleQueue]) -> None:
    # What the server imported is never garbage here; a search through all of it takes half a second.
    gc.freeze()
    harness.prepare_environment(rank, len(queues), port)
    torch.set_num_threads(1)
    ulysses_on_cpu.install()
    try:
        while message := queues[rank].get():
            job, args, file = pickle.loads(message)
            unfinished = file.with_suffix(".unfinished")
            torch.save(job(rank, *args), unfinished)
            unfinished.rename(file)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@dataclass
class Layout:
    """How the ranks share the work: data parallel, or Ulysses sequence parallel of size 2."""

    settings: harness.Settings
    sequence_parallel: int = 1
    epochs: int = EPOCHS


def two_steps_of_each(rank: int, layouts: dict[str, Layout], rollout: harness.Rollout) -> dict[str, dict[str, Any]]:
    """Two steps of each layout; by layout, the rank's decisions and the metrics of its updates."""
    results = {}
    for name, layout in layouts.items():
        with fused.forward_restored():
            results[name] = two_steps(layout, rollout, rank)
    return results


def two_steps(layout: Layout, rollout: harness.Rollout, rank: int = 0, world_size: int = WORLD_SIZE) -> dict[str, Any]:
    """Two steps (old pass, update) of one rank on its share of the rollout; all epochs but the first are off-policy.

    Returns:
        Its decisions, and the metrics of its updates (empty where verl returns none).
    """
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
        extent = {"mini_batch_size": len(rollout.responses), "epochs": layout.epochs}
        metrics.append(harness.update(worker, own, old, columns=columns, **extent))
    return {"decisions": decisions, "metrics": metrics}

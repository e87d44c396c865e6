"""Ray processes of a collection: rollout engines side by side, then one trainer over all accelerators."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from ray.util import ActorPool, get_node_ip_address

from verl_sis.cpu.environment import cpu_environment
from verl_sis.errors import SisError
from verl_sis.records.contexts import write_contexts
from verl_sis.records.schema import Header
from verl_sis.records.write import write_tokens
from verl_sis.study.collect.rollouts import RolloutEngine, read_responses, write_responses
from verl_sis.study.collect.rows import context_columns, token_columns
from verl_sis.study.collect.run import Collection
from verl_sis.study.collect.settings import CollectSettings, ModelFacts
from verl_sis.study.collect.trainer import Rank, Trainer

CPU_ENGINE_ARGUMENTS = {"enforce_eager": True, "enable_chunked_prefill": False, "gpu_memory_utilization": 0.1}
"""On a CPU: no graphs to capture; a request's own seed does not survive a chunked prefill; vLLM asks for a share of
memory that only GPUs have."""


def has_accelerator() -> bool:
    """Whether the two engines run on GPUs here; ``VERL_PLATFORM=cpu`` says no even where there are some."""
    return torch.cuda.is_available() and os.environ.get("VERL_PLATFORM") != "cpu"


@contextmanager
def ray_session(workers: int) -> Iterator[None]:
    """Join the Ray cluster of ``RAY_ADDRESS``, or start one on this machine and end it afterwards.

    Args:
        workers: Processes that will run at a time.
    """
    variables = {} if has_accelerator() else cpu_environment({})
    options: dict[str, Any] = {"runtime_env": {"env_vars": variables}, "log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        options |= {"include_dashboard": False, "num_cpus": max(workers, os.cpu_count() or 1)}
    ray.init(**options)
    try:
        yield
    except RayTaskError as error:
        # Ray's own wrapper prints the whole remote traceback; an error of ours says all there is to say.
        if isinstance(error.cause, SisError):
            raise error.cause from error
        raise
    finally:
        ray.shutdown()


class _RolloutProcess:
    """A rollout engine in a process of its own."""

    def __init__(self, settings: CollectSettings, facts: ModelFacts, tensor_parallel: int) -> None:
        if not has_accelerator():
            settings = replace(settings, engine={**CPU_ENGINE_ARGUMENTS, **settings.engine})
        self._engine = RolloutEngine(settings, facts, tensor_parallel)

    def run(self, prompts: list[tuple[int, list[int]]], path: Path) -> None:
        write_responses(path, self._engine.respond(prompts))


class _TrainerProcess:
    """One rank of the trainer."""

    def place(self) -> tuple[str, int]:
        """Address and a free port of this process's machine."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return get_node_ip_address(), probe.getsockname()[1]

    def build(self, collection: Collection, facts: ModelFacts, place: Rank) -> None:
        settings = collection.settings
        if settings.attention is None and not has_accelerator():
            settings = replace(settings, attention="sdpa")
        self._collection, self._settings = collection, settings
        self._trainer = Trainer(settings, facts, place)

    def score(self, shard: int) -> None:
        """Score a shard; rank 0 writes its files, the token table last, by which the shard counts as done."""
        collection, settings, trainer = self._collection, self._settings, self._trainer
        scored = trainer.score(read_responses(collection.rollout_file(shard)))
        if scored is None:
            return
        header = Header(
            kind="collect",
            ks=settings.ks,
            source=collection.source(),
            layers=trainer.layers,
            experts_per_token=trainer.experts_per_token,
        )
        for pair, columns in context_columns(scored, settings, seed=shard).items():
            write_contexts(collection.context_file(shard, pair), pair, columns)
        write_tokens(collection.token_file(shard), token_columns(scored, settings), header)


def roll_out(
    collection: Collection, facts: ModelFacts, shards: list[int], engines: int, tensor_parallel: int
) -> Iterator[int]:
    """Sample the responses of some shards; yields each shard when its file stands."""
    if not shards:
        return
    process: Any = ray.remote(_RolloutProcess)
    options = {"num_cpus": 1, "num_gpus": tensor_parallel if has_accelerator() else 0}
    actors = [
        process.options(**options).remote(collection.settings, facts, tensor_parallel)
        for _ in range(min(engines, len(shards)))
    ]

    def run(actor: Any, shard: int) -> Any:
        return actor.run.remote(collection.shards[shard], collection.rollout_file(shard))

    try:
        for done, _ in enumerate(ActorPool(actors).map_unordered(run, shards)):
            yield done
    finally:
        for actor in actors:
            ray.kill(actor)


def score(collection: Collection, facts: ModelFacts, shards: list[int], workers: int) -> Iterator[int]:
    """Score some shards; yields each shard when its files stand."""
    process: Any = ray.remote(_TrainerProcess)
    options = {"num_cpus": 1, "num_gpus": 1 if has_accelerator() else 0}
    actors = [process.options(**options).remote() for _ in range(workers)]
    try:
        address, port = ray.get(actors[0].place.remote())
        places = [Rank(rank, workers, address, port) for rank in range(workers)]
        ray.get([a.build.remote(collection, facts, place) for a, place in zip(actors, places, strict=True)])
        for shard in shards:
            ray.get([actor.score.remote(shard) for actor in actors])
            yield shard
    finally:
        for actor in actors:
            ray.kill(actor)

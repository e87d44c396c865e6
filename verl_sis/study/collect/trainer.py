"""Second stage: the trainer's own forward passes over the responses, by verl's engine, on any number of ranks."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_sis import verl_compat
from verl_sis.routing_replay.controller import RoutingReplay
from verl_sis.routing_replay.passes import PASS, RECORD, REPLAY_ROLLOUT, RoutingPasses
from verl_sis.routing_replay.routers import find_routers
from verl_sis.study.collect.rollouts import Response
from verl_sis.study.collect.scoring import Scores, ScoringPass, batch_of, hooked
from verl_sis.study.collect.settings import CollectSettings, ModelFacts


@dataclass(frozen=True)
class Rank:
    """Place of a process among those that share the model."""

    rank: int
    world_size: int
    address: str
    port: int

    def export(self) -> None:
        """Set what verl and torch.distributed read."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world_size),
            # Ray shows each process its own accelerators only.
            LOCAL_RANK="0",
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )


@dataclass(frozen=True)
class ScoredResponse:
    """One response with everything the trainer says of it.

    Attributes:
        response: The rollout engine's.
        native: Scores of the native pass, at the engine's top-K, with its own top-K.
        again: A second native pass, at the first one's top-K.
        replay: With the engine's routes; None of a dense model.
        precise: In float32; None if not wanted.
        layer_overlap: uint8 ``[R, C]``, experts in common of engine and native pass; None of a dense model.
    """

    response: Response
    native: Scores
    again: Scores
    replay: Scores | None
    precise: Scores | None
    layer_overlap: np.ndarray | None


class Trainer:
    """verl's training worker with one model, used for forward passes only."""

    def __init__(self, settings: CollectSettings, facts: ModelFacts, place: Rank) -> None:
        """Build the model, sharded over all ranks by FSDP2.

        Args:
            settings: Of the study.
            facts: Of the model.
            place: Of this process.
        """
        place.export()
        self._settings = settings
        self._place = place
        tokens = max(settings.micro_batch_tokens, settings.longest)
        attention = settings.attention or "flash_attention_2"
        self._worker = verl_compat.build_scoring_worker(
            settings.model, dtype=settings.dtype, attention=attention, max_tokens=tokens
        )
        self._passes: RoutingPasses | None = None
        if facts.sparse:
            engine = self._worker.engine
            routers = find_routers(
                verl_compat.model_of(engine), verl_compat.text_config(engine), verl_compat.current_device()
            )
            self._passes = RoutingPasses(engine, RoutingReplay(routers))
        # No flash-attention takes float32.
        self._precise = settings.precise and verl_compat.build_scoring_worker(
            settings.model, dtype="float32", attention="sdpa", max_tokens=tokens
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Absolute decoder layers with experts."""
        return self._passes.replay.layers if self._passes else ()

    @property
    def experts_per_token(self) -> int:
        """K of the router; 0 of a dense model."""
        return self._passes.replay.experts_per_token if self._passes else 0

    def score(self, responses: list[Response]) -> list[ScoredResponse] | None:
        """Score the responses of a shard. Every rank calls it with all of them, and scores its share.

        Args:
            responses: Of one shard, none empty.

        Returns:
            All of them, in order, on rank 0; None elsewhere.
        """
        rank, world = self._place.rank, self._place.world_size
        # Ranks run equally many passes: the collectives of FSDP wait for each other. Extra ones are dropped below.
        share = -(-len(responses) // world)
        own = [(share * rank + i) % len(responses) for i in range(share)]
        scored = self._score(own, [responses[i] for i in own])
        if world == 1:
            return [scored[i] for i in range(len(responses))]
        gathered: list[Any] | None = [None] * world if rank == 0 else None
        torch.distributed.gather_object(scored, gathered)
        if gathered is None:
            return None
        merged: dict[int, ScoredResponse] = {}
        for part in gathered:
            merged |= part
        return [merged[i] for i in range(len(responses))]

    def _score(self, numbers: list[int], responses: list[Response]) -> dict[int, ScoredResponse]:
        top_k = self._settings.top_k
        columns = batch_of(responses, numbers)
        engine_ids = {n: r.top_ids for n, r in zip(numbers, responses, strict=True)}
        native = self._pass(self._worker, columns, engine_ids, own_top_k=top_k, what=RECORD)
        overlap = self._overlap(columns, numbers, responses)
        own_ids: dict[int, Any] = {n: scores.top_ids for n, scores in native.items()}
        again = self._pass(self._worker, _reversed(columns), own_ids, budget=self._settings.micro_batch_tokens // 2)
        replay = self._pass(self._worker, columns, engine_ids, what=REPLAY_ROLLOUT) if self._passes else {}
        precise = self._pass(self._precise, columns, engine_ids) if self._precise else {}
        return {
            n: ScoredResponse(r, native[n], again[n], replay.get(n), precise.get(n), overlap.get(n))
            for n, r in zip(numbers, responses, strict=True)
        }

    def _pass(
        self,
        worker: Any,
        columns: dict[str, torch.Tensor],
        queries: dict[int, np.ndarray],
        *,
        own_top_k: int = 0,
        what: str | None = None,
        budget: int | None = None,
    ) -> dict[int, Scores]:
        """One forward pass over a batch; ``what`` its routers do, ``budget`` tokens in a micro-batch."""
        tokens = max(budget or self._settings.micro_batch_tokens, self._settings.longest)
        entries: dict[str, Any] = {"max_token_len_per_gpu": tokens, "temperature": self._settings.temperature}
        batch = hooked(columns, **entries, **({PASS: what} if what and self._passes else {}))
        verl_compat.attach_sample_keys(batch)
        scoring = ScoringPass(queries, own_top_k)
        verl_compat.score_with(worker, scoring, batch)
        if self._passes:
            self._passes.take()
            self._passes.replay.disarm()
        return scoring.found

    def _overlap(
        self, columns: dict[str, torch.Tensor], numbers: list[int], responses: list[Response]
    ) -> dict[int, np.ndarray]:
        """Experts that engine and native pass both chose, at the rows that predict response tokens."""
        if self._passes is None:
            return {}
        batch = hooked(columns)
        verl_compat.attach_sample_keys(batch)
        layers = list(self._passes.replay.layers)
        common = {}
        for number, key, response in zip(numbers, batch[verl_compat.SAMPLE_KEY].tolist(), responses, strict=True):
            assert response.routes is not None
            rows = slice(len(response.prompt_ids) - 1, len(response.routes))
            native = self._passes.store.get([key], torch.device("cpu")).numpy()[rows]
            engine = response.routes[rows][:, layers]
            same = (native[..., :, None] == engine[..., None, :]).any(axis=-1)
            common[number] = same.sum(axis=-1).astype(np.uint8)
        self._passes.store.clear()
        return common


def _reversed(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The samples in reverse order, so that they meet other neighbours in their micro-batches."""
    flipped = {}
    for name, column in columns.items():
        if column.is_nested:
            flipped[name] = torch.nested.as_nested_tensor(list(reversed(column.unbind())), layout=torch.jagged)
        else:
            flipped[name] = column.flip(0)
    return flipped

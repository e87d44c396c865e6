"""What two ranks compute of logits whose columns they share, for ``test_vocab_shards``. Runs on a rank."""

from dataclasses import dataclass
from typing import Any

import torch

from verl_sis.core import envelope
from verl_sis.core.vocab_parallel import VocabShard, local_columns


@dataclass(frozen=True)
class Case:
    """One way to share a vocabulary.

    Attributes:
        vocab_size: Token ids.
        width: Columns of a rank, padding included.
        k: K.
        scale: Of the logits; 0 makes all of them equal.
        pad_logit: What stands in padded columns.
        dtype: Of the logits.
        spoiled: ``(row, id, value)`` of logits of the current policy to overwrite.
        filtered: Ids that the sampler removed: -inf in the logits of the old policy.
    """

    vocab_size: int
    width: int
    k: int
    scale: float = 3.0
    pad_logit: float = 1e4
    dtype: torch.dtype = torch.float32
    spoiled: tuple[tuple[int, int, float], ...] = ()
    filtered: tuple[int, ...] = ()


TOKENS = 11
ROWS = [9, 3, 4, 10, 0, 7]
"""Rows of the logits that predict the tokens, as a layout picks them: not all, in no order."""


def policies(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits ``[N, V]`` of the old and the current policy, and the sampled ids of the picked rows."""
    generator = torch.Generator().manual_seed(case.vocab_size + case.k)
    old, noise = torch.randn(2, TOKENS, case.vocab_size, generator=generator) * case.scale
    sampled = torch.multinomial(torch.softmax(old, -1), 1, generator=generator).squeeze(1)[ROWS]
    current = old + 0.3 * noise
    old[:, list(case.filtered)] = -torch.inf
    for row, token, value in case.spoiled:
        current[row, token] = value
    return old.to(case.dtype), current.to(case.dtype), sampled


def everything(
    shard: VocabShard, old: torch.Tensor, current: torch.Tensor, sampled: torch.Tensor, k: int
) -> dict[str, torch.Tensor]:
    """All that SIS asks of a vocabulary, of the rows ``ROWS``."""
    rows = torch.tensor(ROWS)
    values, ids = shard.top_k_logits(old, k, chunk_tokens=2, ranges=[(row, row + 1) for row in ROWS])
    sampled_logit = shard.gather_logits(old, sampled, rows)
    old_log_prob = sampled_logit - shard.log_normalizer(old, rows, chunk_tokens=2)
    top_k = envelope.top_k_from_logits(values, ids, sampled_logit, sampled, old_log_prob)
    terms = shard.envelope_terms(current, top_k, sampled, rows)
    normalizer = shard.log_normalizer(current, rows, chunk_tokens=3)
    final = envelope.normalize_envelope(terms, normalizer)
    at_top_k = shard.gather_logits(current, ids, rows)
    return {**vars(top_k), **vars(terms), **vars(final), "normalizer": normalizer, "at_top_k": at_top_k}


def on_rank(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """What this rank gets of its shard, and once more, where nothing is padded, of a DTensor."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    results = []
    for case in cases:
        old, current, sampled = policies(case)
        shard = VocabShard.split(case.vocab_size, case.width, rank=rank, size=2, group=torch.distributed.group.WORLD)
        padding = (0, 2 * case.width - case.vocab_size)
        columns = slice(rank * case.width, (rank + 1) * case.width)
        local = [torch.nn.functional.pad(x, padding, value=case.pad_logit)[:, columns] for x in (old, current)]
        results.append({"shard": everything(shard, *local, sampled, case.k)})
        if case.width == -(-case.vocab_size // 2):
            results[-1]["dtensor"] = of_dtensor(old, current, sampled, case.k)
    return results


def of_dtensor(old: torch.Tensor, current: torch.Tensor, sampled: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    """The same from logits as torch's own tensor parallelism shards them; gathering them would raise."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    rank, width = mesh.get_local_rank(), -(-old.shape[1] // 2)
    columns = slice(rank * width, (rank + 1) * width)

    def sharded(logits: torch.Tensor) -> DTensor:
        local = logits[:, columns].contiguous()
        return DTensor.from_local(local, mesh, [Shard(1)], shape=logits.shape, stride=logits.stride())

    gather, redistribute = DTensor.full_tensor, DTensor.redistribute
    DTensor.full_tensor = DTensor.redistribute = None
    try:
        old_columns, shard = local_columns(sharded(old))
        current_columns, again = local_columns(sharded(current))
        assert (shard.counts, shard.rank) == (again.counts, again.rank)
        whole, all_of_it = local_columns(DTensor.from_local(current, mesh, [Replicate()]))
        assert all_of_it.counts == (whole.shape[1],)
        return everything(shard, old_columns, current_columns, sampled, k)
    finally:
        DTensor.full_tensor, DTensor.redistribute = gather, redistribute

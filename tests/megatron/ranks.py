"""Two steps of one rollout in several layouts of Megatron's ranks; jobs for ``tests.worker.ranks.TwoRanks``."""

from pathlib import Path
from typing import Any

import torch

from tests.megatron import cuda_on_cpu
from tests.megatron import harness as megatron
from tests.megatron.harness import Parallel
from tests.worker import harness, recorder

TEMPERATURE = 0.8


def two_steps_of_each(
    rank: int, model: Path, layouts: dict[str, Parallel], rollout: harness.Rollout
) -> dict[str, dict[str, Any]]:
    """Two steps of each layout on a rank."""
    return {name: two_steps(model, layout, rollout) for name, layout in layouts.items()}


def two_steps(model: Path, parallel: Parallel, rollout: harness.Rollout) -> dict[str, Any]:
    """Two steps (old pass, update of two epochs, the second off-policy) of this rank on its share of the rollout.

    Returns:
        Its decisions, the metrics of its updates (empty where verl returns none), and the first old log-probs.
    """
    from megatron.core import parallel_state

    worker = megatron.build_worker(model, parallel)
    replay = {"enable_routing_replay": parallel.replay != "disabled"}
    count = len(rollout.responses) // parallel_state.get_data_parallel_world_size()
    first = parallel_state.get_data_parallel_rank() * count
    own = rollout.select(list(range(first, first + count)))
    if parallel.replay != "R3":
        own.routes = []
    decisions = recorder.record(worker)
    metrics, old_log_probs = [], None
    for _ in range(2):
        output = harness.old_pass(worker, own, temperature=TEMPERATURE, **replay)
        old = harness.response_log_probs({"log_probs": of_group(output, "log_probs")}, own)
        columns = {"rollout_log_probs": old}
        if parallel.replay == "R2":
            columns["routed_experts"] = of_group(output, "routed_experts")
        old_log_probs = torch.cat(old.unbind()) if old_log_probs is None else old_log_probs
        settings = {"mini_batch_size": len(rollout.responses), "epochs": 2, "temperature": TEMPERATURE, **replay}
        metrics.append(harness.update(worker, own, old, columns=columns, **settings))
    return {"decisions": decisions, "metrics": metrics, "old_log_probs": old_log_probs}


def of_group(output: Any, name: str) -> torch.Tensor:
    """A nested output for this rank's samples, from the rank of its model-parallel group that verl takes it from."""
    from megatron.core import parallel_state

    found: list[Any] = [None] * torch.distributed.get_world_size()
    place = parallel_state.get_data_parallel_rank()
    rows = [] if output is None else [row.clone() for row in output[name].unbind()]
    torch.distributed.all_gather_object(found, (place, rows))
    return harness.nested(next(theirs for other, theirs in found if other == place and theirs))


def log_probs_of_shards(rank: int, logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Verl's own log-probs of logits whose columns two ranks share, and those by the normaliser of SIS.

    Args:
        rank: Of two.
        logits: ``[n, V]``.
        labels: ``[n]``.
    """
    from megatron.core import parallel_state
    from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_from_logits

    from verl_sis.core.vocab_parallel import VocabShard

    cuda_on_cpu.install()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group = parallel_state.get_tensor_model_parallel_group()
    local = logits.chunk(2, dim=1)[rank].contiguous()
    shard = VocabShard.split(logits.shape[1], local.shape[1], rank=rank, size=2, group=group)
    ours = shard.gather_logits(local, labels) - shard.log_normalizer(local, chunk_tokens=8)
    # Last, because it overwrites the logits.
    return vocab_parallel_log_probs_from_logits(local[None], labels[None]).squeeze(0), ours

"""What moves where in one training step of the math recipes on 1, 8 and 64 nodes: arithmetic, no measurement.

    python scripts/scale_on_paper.py [--nodes 1 --nodes 8 --nodes 64] [--k 10]

Sizes of single items (bytes per token and column, per parameter, per message) are checked against the code that moves
them by ``tests/scripts/test_scale_on_paper.py``. How often each moves is read from verl 0.9.1 and written down here.
Every response counts at its longest, so bytes per token are exact and totals are upper bounds.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

GPUS_PER_NODE = 8

PROMPT_TOKEN = {"prompts": 8, "input_ids": 8, "position_ids": 8}
"""Bytes per prompt token of what a rollout writes to TransferQueue."""

RESPONSE_TOKEN = {
    **{"responses": 8, "response_mask": 8, "loss_mask": 8, "input_ids": 8, "position_ids": 8},
    **{"rollout_log_probs": 4, "rm_scores": 4},
}
"""The same per response token."""

ROUTE_CHOICE = 2
"""Bytes of one expert id of a route, int16, for each token of prompt and response, layer, and expert chosen."""

STATISTICS = 10_000
"""Bytes of a micro-batch's pooled SIS statistics in verl's exchange of metrics, rounded up; independent of K."""

TOP_K_ENTRY = 8
"""Bytes of one of the K entries per response token that a worker keeps for itself: int32 id and float32 log-prob."""

RELEASED_TOP_K_ENTRY = 12
"""The same where the authors' release sends it through the driver: int64 and float32."""

GATHERED_WEIGHT = 2
"""Bytes per parameter of an all-gather before a forward or backward pass, bfloat16."""

REDUCED_GRADIENT = 4
"""Bytes per parameter of a reduced gradient, float32."""

SYNCED_WEIGHT = 4
"""Bytes per parameter on the way to the rollout engine: verl sends the float32 master weights as they are."""


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3 model.

    Attributes:
        name: As in the recipe.
        layers: Decoder layers.
        hidden: Width.
        heads: Query heads of 128 dimensions.
        kv_heads: Key-value heads.
        intermediate: Width of an MLP, or of one expert.
        experts: Experts per layer; 0 for a dense model.
        chosen: Experts per token.
        vocab: Vocabulary; input and output embeddings are separate.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    experts: int = 0
    chosen: int = 0
    vocab: int = 151_936
    head_dim: int = 128

    @property
    def parameters(self) -> int:
        """All parameters, norms included."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim + 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate * max(1, self.experts) + self.hidden * self.experts
        return self.layers * (attention + mlp + 2 * self.hidden) + (2 * self.vocab + 1) * self.hidden

    @property
    def route_bytes(self) -> int:
        """Bytes of a token's route."""
        return ROUTE_CHOICE * self.layers * self.chosen


DENSE = Model("Qwen3-8B-Base", layers=36, hidden=4096, heads=32, kv_heads=8, intermediate=12_288)
MOE = Model("Qwen3-30B-A3B-Base", layers=48, hidden=2048, heads=32, kv_heads=4, intermediate=768, experts=128, chosen=8)


@dataclass(frozen=True)
class Step:
    """One rollout of the math recipes at N = 8, and what is done with it.

    Attributes:
        prompts: Of a rollout.
        responses: Per prompt.
        prompt: Tokens of a prompt.
        response: Tokens of a response.
        updates: N, mini-batches of a rollout.
        micro_batch: Tokens of a micro-batch, ``ppo_max_token_len_per_gpu``.
    """

    prompts: int = 2048
    responses: int = 8
    prompt: int = 1024
    response: int = 3072
    updates: int = 8
    micro_batch: int = 16_384

    @property
    def sequences(self) -> int:
        """Responses of a rollout."""
        return self.prompts * self.responses

    def micro_batches(self, gpus: int) -> int:
        """Micro-batches of one update on one GPU."""
        each = math.ceil(self.sequences / self.updates / gpus) * (self.prompt + self.response)
        return math.ceil(each / self.micro_batch)


def written_by_rollout(step: Step, model: Model, replay: bool) -> int:
    """Bytes that agent loops write to TransferQueue."""
    routes = model.route_bytes * (step.prompt + step.response) if replay else 0
    columns = step.prompt * sum(PROMPT_TOKEN.values()) + step.response * sum(RESPONSE_TOKEN.values())
    return step.sequences * (columns + routes)


@dataclass(frozen=True)
class Pass:
    """Bytes per sequence of one pass over a rollout that lies in TransferQueue.

    Attributes:
        workers_read: Whether workers read all columns that are stored by then.
        workers_write: What workers add.
        driver_reads: What the trainer process fetches.
        driver_writes: What it puts back.
        stored: Net growth: a column that is written again replaces the old one.
    """

    workers_read: bool
    workers_write: int
    driver_reads: int
    driver_writes: int
    stored: int


def passes(step: Step) -> dict[str, Pass]:
    """The passes of verl's ``PPOTrainer.step``, in order; float32 values, int64 masks."""
    full, response = step.prompt + step.response, step.response
    return {
        # Log-probs and entropy of whole sequences; the driver cuts the responses out of both.
        "old": Pass(True, 8 * full, 8 * full + 20 * response, 8 * response, 4 * full + 8 * response),
        # Log-probs in place of those of the old pass.
        "reference": Pass(True, 4 * full, 4 * full + 8 * response, 4 * response, 4 * response),
        # Mask, scores and three log-probs; advantages and returns, and the mask again.
        "advantages": Pass(False, 0, 24 * response, 16 * response, 8 * response),
        "update": Pass(True, 0, 0, 0, 0),
        "metrics": Pass(False, 0, 8 * step.prompt + 28 * response, 0, 0),
    }


def through_transfer_queue(step: Step, model: Model, replay: bool) -> dict[str, int]:
    """Bytes per step through TransferQueue, over all processes.

    Returns:
        ``rollout``: written by agent loops; ``workers``, ``driver``: read and written by them.
    """
    rollout = stored = written_by_rollout(step, model, replay)
    workers = driver = 0
    for one in passes(step).values():
        workers += stored * one.workers_read + step.sequences * one.workers_write
        driver += step.sequences * (one.driver_reads + one.driver_writes)
        stored += step.sequences * one.stored
    return {"rollout": rollout, "workers": workers, "driver": driver}


def through_nccl(step: Step, model: Model, nodes: int) -> dict[str, float]:
    """Bytes that one GPU receives per step under FSDP2, sharded in a node and replicated across nodes.

    Returns:
        ``gather``: weights, within the node: one forward for old log-probs and one for the reference, forward and
        backward for the update, for every micro-batch. ``reduce``: gradients within the node. ``replicas``: gradients
        across nodes, by rings.
    """
    micro_batches = step.updates * step.micro_batches(nodes * GPUS_PER_NODE)
    others = (GPUS_PER_NODE - 1) / GPUS_PER_NODE
    return {
        "gather": 4 * micro_batches * GATHERED_WEIGHT * model.parameters * others,
        "reduce": micro_batches * REDUCED_GRADIENT * model.parameters * others,
        "replicas": micro_batches * REDUCED_GRADIENT * model.parameters / GPUS_PER_NODE * 2 * (nodes - 1) / nodes,
    }


def weight_sync(model: Model) -> dict[str, float]:
    """Bytes per step and GPU from trainer to rollout engine: gathered within the node, then copied by CUDA IPC."""
    size = SYNCED_WEIGHT * model.parameters
    return {"gather": size * (GPUS_PER_NODE - 1) / GPUS_PER_NODE, "ipc": size}


def sis(step: Step, nodes: int, k: int) -> dict[str, int]:
    """Bytes per step of SIS: received by one GPU's process, kept by it, and what the release would send in all."""
    gpus = nodes * GPUS_PER_NODE
    tokens = step.sequences * step.response
    return {
        "per token": 0,
        "received": (gpus - 1) * step.updates * step.micro_batches(gpus) * STATISTICS,
        "kept": math.ceil(step.sequences / gpus) * step.response * k * TOP_K_ENTRY,
        "release": tokens * k * RELEASED_TOP_K_ENTRY,
    }


def rows(step: Step, model: Model, nodes: int, k: int) -> list[tuple[str, str, str, float]]:
    """What moves, by which transport, between whom, and bytes per step."""
    queue = through_transfer_queue(step, model, replay=False)
    nccl, sync, ours = through_nccl(step, model, nodes), weight_sync(model), sis(step, nodes, k)
    table = [
        ("rollout", "TransferQueue", "agent loops to storage, all", queue["rollout"]),
        ("columns of three passes", "TransferQueue", "storage and workers, all", queue["workers"]),
        ("log-probs, advantages, metrics", "TransferQueue", "storage and driver, all", queue["driver"]),
        ("weights before each pass", "NCCL in a node", "one GPU receives", nccl["gather"]),
        ("gradients", "NCCL in a node", "one GPU receives", nccl["reduce"]),
        ("gradients", "NCCL across nodes", "one GPU receives", nccl["replicas"]),
        ("weights to the rollout engine", "NCCL in a node", "one GPU receives", sync["gather"]),
        ("weights to the rollout engine", "CUDA IPC", "one GPU copies", sync["ipc"]),
        ("SIS, per-token data", "none", "stays on its GPU", ours["per token"]),
        ("SIS, statistics", "verl's exchange of metrics", "one process receives", ours["received"]),
        (f"SIS, top {k} of the old policy", "none", "one GPU keeps", ours["kept"]),
    ]
    if model.experts:
        replay = through_transfer_queue(step, model, replay=True)
        added = {name: replay[name] - queue[name] for name in queue}
        table += [
            ("R3, routes", "TransferQueue", "agent loops to storage, all", added["rollout"]),
            ("R3, routes of three passes", "TransferQueue", "storage to workers, all", added["workers"]),
        ]
    return table


def written(size: float) -> str:
    """A size for people, in units of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} PB"


def main(
    nodes: Annotated[list[int], typer.Option(min=1, help="Nodes of 8 GPUs; repeat for several.")] = [1, 8, 64],  # noqa: B006
    k: Annotated[int, typer.Option(min=1, help="K of SIS.")] = 10,
) -> None:
    """Print bytes per step by transport for both models of the math recipes."""
    console = Console(width=150)
    step = Step()
    for model in (DENSE, MOE):
        table = Table(title=f"{model.name}, {model.parameters / 1e9:.2f} x 10^9 parameters: bytes per step, at most")
        for header in ("what", "transport", "who"):
            table.add_column(header)
        for count in nodes:
            table.add_column(f"{count} node{'s' * (count > 1)}", justify="right")
        columns = [rows(step, model, count, k) for count in nodes]
        for cells in zip(*columns, strict=True):
            table.add_row(*cells[0][:3], *(written(cell[3]) for cell in cells))
        console.print(table)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()

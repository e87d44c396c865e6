"""What routing replay costs: forward and backward with replay over without, peak memory, bytes per token.

    python scripts/bench_routing_replay.py [--tokens 1024] [--layers 1] [--dtype float32] [--json FILE]

The model is a Qwen3-MoE with the sizes of Qwen3-30B-A3B, cut to a few layers and a small vocabulary so that it fits a
small machine; replay costs the same in each layer. Timed is everything that a micro-batch pays: the routes are checked
and laid out, each router's choice is replaced and compared, the statistics are pooled. Both ways compute the same
numbers, since the replayed choice is the model's own.
"""

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_timing import environment, peak_bytes, time_in_turn, write_json
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

from verl_sis.core.routing import RESPONSE
from verl_sis.routing_replay.controller import RoutingReplay
from verl_sis.routing_replay.routers import find_routers
from verl_sis.routing_replay.targets import Rows, Targets, checked_presence, routes_of

QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
"""Source: the configuration published with Qwen/Qwen3-30B-A3B, which has 48 such layers."""

LAYERS_OF_30B = 48
TARGETS = {"forward and backward": 1.03, "bytes per token": 768}


class MicroBatch:
    """One micro-batch of a model, with and without replay of the model's own choice."""

    def __init__(self, tokens: int, layers: int, experts: str, dtype: torch.dtype, device: str) -> None:
        """Build the model and record its choice."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        torch.manual_seed(0)
        config: Any = Qwen3MoeConfig(vocab_size=1024, num_hidden_layers=layers, **QWEN3_30B_A3B)
        config._experts_implementation = experts
        with torch.device(device):
            self._model: Any = Qwen3MoeForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype)
        self._ids = torch.randint(0, 1024, (1, tokens), device=device)
        self._replay = RoutingReplay(find_routers(self._model, config, torch.device(device)))
        self._rows = Rows(
            torch.arange(tokens, device=device),
            torch.full((tokens,), RESPONSE, device=device),
            torch.zeros(tokens, dtype=torch.bool, device=device),
        )
        with torch.no_grad():
            self._replay.record(self._rows)
            self._model(input_ids=self._ids, use_cache=False)
            self._replay.finish_forward()
            routes = self._replay.recording()
            self._replay.disarm()
        self._data = self._batch(routes)

    def _batch(self, routes: torch.Tensor) -> TensorDict:
        def nested(row: torch.Tensor) -> torch.Tensor:
            return torch.nested.as_nested_tensor([row], layout=torch.jagged)

        response = self._ids[0, 1:]
        columns = {
            "input_ids": nested(self._ids[0]),
            "responses": nested(response),
            "response_mask": nested(torch.ones_like(response)),
            "routed_experts": nested(routes),
        }
        return TensorDict(columns, batch_size=1)

    def _step(self) -> None:
        self._model.zero_grad(set_to_none=True)
        self._model(input_ids=self._ids, use_cache=False).logits.float().square().mean().backward()

    def forget_gradients(self) -> None:
        """Free what the last backward pass has left, so that each way starts from the same memory."""
        self._model.zero_grad(set_to_none=True)

    def without(self) -> None:
        """Forward and backward, natively routed."""
        self._step()

    def arm(self) -> None:
        """Check and lay out the routes."""
        layers = len(self._replay.layers)
        routes = routes_of(self._data, layers, self._replay.experts_per_token)
        columns = {layer: layer for layer in range(layers)}
        present = checked_presence(routes, columns, self._replay.experts, self._data)
        self._replay.arm(Targets.of(routes, present, columns, self._rows), count=False)

    def replayed(self) -> None:
        """Forward and backward under replay."""
        self.arm()
        self._model.zero_grad(set_to_none=True)
        loss = self._model(input_ids=self._ids, use_cache=False).logits.float().square().mean()
        observer = self._replay.finish_forward()
        assert observer is not None
        observer.statistics(observer.packed())
        loss.backward()
        self._replay.disarm()


def bytes_per_token() -> dict[str, int]:
    """Bytes of the routes of one token of Qwen3-30B-A3B, as verl carries them and as they lie on the device."""
    shape = (LAYERS_OF_30B, QWEN3_30B_A3B["num_experts_per_tok"])
    tokens = 64
    routes = torch.stack([torch.randperm(128)[: shape[1]] for _ in range(tokens * shape[0])])
    routes = routes.view(tokens, *shape).to(torch.int16)
    rows = Rows(torch.arange(tokens), torch.full((tokens,), RESPONSE), torch.zeros(tokens, dtype=torch.bool))
    targets = Targets.of(routes, torch.ones(tokens, dtype=torch.bool), {layer: layer for layer in range(48)}, rows)

    def size(tensor: torch.Tensor) -> int:
        return tensor.numel() * tensor.element_size() // tokens

    widened = targets.ids[:, 0].long()
    return {"in transit": size(routes), "on the device": size(targets.ids), "one layer, while in use": size(widened)}


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Packed tokens of the micro-batch.")] = 1024,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 1,
    experts_implementation: Annotated[str, typer.Option(help="eager, batched_mm or grouped_mm.")] = "grouped_mm",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 9,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Measure what routing replay costs, as ratios in one run."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    batch = MicroBatch(tokens, layers, experts_implementation, getattr(torch, dtype), device)
    seconds = time_in_turn(
        {"without": batch.without, "with": batch.replayed, "laying out alone": batch.arm}, rounds, device
    )
    peaks = {}
    for name, job in (("without", batch.without), ("with", batch.replayed)):
        batch.forget_gradients()
        peaks[name] = peak_bytes(job, device)
    pairs = [with_ / without for with_, without in zip(seconds["with"], seconds["without"], strict=True)]
    record = {
        "environment": environment(),
        "shape": {"tokens": tokens, "layers": layers, "experts": experts_implementation, "dtype": dtype},
        "targets": TARGETS,
        "seconds": seconds,
        "ratio_min": min(seconds["with"]) / min(seconds["without"]),
        "ratio_median": statistics.median(seconds["with"]) / statistics.median(seconds["without"]),
        "ratio_of_rounds": pairs,
        "ratio_median_of_rounds": statistics.median(pairs),
        "layout_share": min(seconds["laying out alone"]) / min(seconds["without"]),
        "peak_bytes": peaks,
        "peak_ratio": peaks["with"] / peaks["without"],
        "bytes_per_token": bytes_per_token(),
    }
    table = Table(
        title=f"routing replay: {tokens} tokens, {layers} layers, {experts_implementation}, {dtype}, {device}"
    )
    for header in ("what", "value", "target"):
        table.add_column(header, justify="left" if header == "what" else "right")
    target = f"{TARGETS['forward and backward']:.2f}"
    table.add_row("forward + backward, with over without, minima", f"{record['ratio_min']:.3f}", target)
    table.add_row("the same, medians", f"{record['ratio_median']:.3f}", target)
    table.add_row("the same, median of the ratios of single rounds", f"{record['ratio_median_of_rounds']:.3f}", target)
    table.add_row("checking and laying out the routes, over without", f"{record['layout_share']:.4f}", "")
    table.add_row("peak memory, with over without", f"{record['peak_ratio']:.3f}", "")
    for name, value in record["bytes_per_token"].items():
        table.add_row(f"bytes per token of Qwen3-30B-A3B, {name}", str(value), str(TARGETS["bytes per token"]))
    console.print(table)
    if json_file is not None:
        write_json(record, json_file)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()

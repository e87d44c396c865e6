"""Memory and time of SIS with verl's fused kernels (torch backend): the LM head of one micro-batch, both passes.

    python scripts/bench_fused.py [--tokens 1024] [--hidden 512] [--vocab 151936] [--k 10] [--json FILE]

A job is all that happens from the final hidden states on: log-probs of the sampled tokens, in the update the gradients
of hidden states and weight too, and what SIS adds. Unfused means that the logits of all tokens exist. Peak memory is
the allocator's, beyond what was there before the job; times are minima over rounds in one process, all jobs in turn.
"""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench_jobs import Shape, SisJobs, Tokens
from bench_timing import Job, environment, peak_bytes, time_in_turn, write_json
from rich.console import Console
from rich.table import Table
from verl.utils.experimental.torch_functional import FusedLinearForPPO
from verl.utils.torch_functional import logprobs_from_logits

from verl_sis.core.linear_head import LinearHead

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAYS = ("fused", "fused + SIS", "unfused", "unfused + SIS")


class HeadBatch(Tokens):
    """Hidden states of a micro-batch before and after some drift of the policy, and the weight of the LM head."""

    def __init__(self, shape: Shape, hidden_size: int, dtype: torch.dtype) -> None:
        """Draw hidden states and a weight whose logits spread by 3, and tokens from them."""
        generator = torch.Generator(shape.device).manual_seed(0)

        def draw(rows: int) -> torch.Tensor:
            return torch.randn(rows, hidden_size, generator=generator, device=shape.device)

        hidden, drift, weight = draw(shape.tokens), draw(shape.tokens), draw(shape.vocab) * (3.0 * hidden_size**-0.5)
        rows = [torch.multinomial((part @ weight.T).softmax(-1), 1, generator=generator) for part in hidden.split(64)]
        super().__init__(shape, torch.cat(rows).squeeze(1))
        self.kernel = FusedLinearForPPO()
        self.weight = weight.to(dtype).requires_grad_()
        self.old_hidden = hidden.to(dtype)
        self.hidden = hidden.add_(drift, alpha=0.02).to(dtype).requires_grad_()
        self.old_logits, self.logits = self.head(self.old_hidden), self.head(self.hidden)
        with torch.no_grad():
            self.old_log_probs, self.log_probs = self.fused(self.old_hidden), self.fused(self.hidden)

    def head(self, hidden: torch.Tensor) -> LinearHead:
        """The head as SIS sees it inside the model's forward."""
        return LinearHead(hidden.detach(), self.weight.detach(), 1.0, self.kernel.chunk_size)

    def fused(self, hidden: torch.Tensor) -> torch.Tensor:
        """Log-probs as verl takes them, without whole logits."""
        return self.kernel(hidden, self.weight, self.labels, 1.0)[0]


class HeadJobs:
    """Both passes over one LM head, fused or not, with SIS or without."""

    def __init__(self, batch: HeadBatch, k: int) -> None:
        """Bind SIS and have the old policy's top-K ready."""
        self._batch = batch
        self._sis = SisJobs(batch, k)

    @torch.no_grad()
    def old_pass(self, way: str) -> None:
        """Log-probs of the old policy."""
        log_probs, logits = self._forward(self._batch.old_hidden, way)
        if "SIS" in way:
            self._sis.old_pass_on(logits, log_probs)

    def update_pass(self, way: str) -> Any:
        """Log-probs of the current policy with their gradients."""
        batch = self._batch
        log_probs, logits = self._forward(batch.hidden, way)
        if "SIS" in way:
            self._sis.update_pass_on(logits, log_probs.detach())
        del logits
        return torch.autograd.grad(log_probs, (batch.hidden, batch.weight), torch.ones_like(log_probs))

    def _forward(self, hidden: torch.Tensor, way: str) -> tuple[torch.Tensor, Any]:
        batch = self._batch
        if way.startswith("fused"):
            return batch.fused(hidden), batch.head(hidden)
        logits = hidden @ batch.weight.t()
        return logprobs_from_logits(logits, batch.labels, inplace_backward=False), logits


def measure(shape: Shape, hidden_size: int, name: str, k: int, rounds: int) -> list[dict[str, Any]]:
    """Peak memory and time of every way, one record per pass and way."""
    jobs = HeadJobs(HeadBatch(shape, hidden_size, DTYPES[name]), k)
    passes = {"old pass": jobs.old_pass, "update pass": jobs.update_pass}
    work: dict[Any, Job] = {
        (which, way): (lambda run=run, way=way: run(way)) for which, run in passes.items() for way in WAYS
    }
    seconds = time_in_turn(work, rounds, shape.device)
    records = []
    for (which, way), job in work.items():
        peak = peak_bytes(job, shape.device)
        records.append({"pass": which, "dtype": name, "way": way, "peak_bytes": peak, "s": seconds[which, way]})
    return records


def print_records(records: list[dict[str, Any]], console: Console, title: str) -> None:
    """Print peak memory and time, as ratios to fused kernels without SIS and, for memory, to SIS without them."""
    table = Table(title=title)
    for header in ("pass", "dtype", "way", "peak MB", "over fused", "over unfused + SIS", "time over fused"):
        table.add_column(header, justify="left" if header in ("pass", "dtype", "way") else "right")
    of = {(record["pass"], record["dtype"], record["way"]): record for record in records}
    for (which, name, way), record in of.items():
        fused, unfused = of[which, name, "fused"], of[which, name, "unfused + SIS"]
        table.add_row(
            *(which, name, way, f"{record['peak_bytes'] / 1e6:.0f}"),
            *(f"{record['peak_bytes'] / other['peak_bytes']:.3f}" for other in (fused, unfused)),
            f"{min(record['s']) / min(fused['s']):.3f}",
        )
    console.print(table)


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Packed tokens of the micro-batch.")] = 1024,
    hidden: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 512,
    vocab: Annotated[int, typer.Option(min=8, help="Vocabulary size V.")] = 151_936,
    k: Annotated[int, typer.Option(help="K.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 3,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences that the tokens are cut into.")] = 4,
    chunk: Annotated[int, typer.Option(min=1, help="sis.chunk_tokens.")] = 256,
    dtype: Annotated[list[str], typer.Option(help="fp32 or bf16; repeat for both.")] = ["fp32"],  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything measured to this file.")] = None,
) -> None:
    """Measure what SIS costs beside fused kernels, and what both cost without them."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    shape = Shape(tokens, vocab, sequences, chunk, device)
    records = [row for name in dtype for row in measure(shape, hidden, name, k, rounds)]
    print_records(records, console, f"LM head of {tokens} tokens, width {hidden}, V = {vocab}, K = {k}")
    if json_file is not None:
        record = {"environment": environment(), "shape": asdict(shape), "hidden": hidden, "k": k, "rounds": rounds}
        write_json({**record, "records": records}, json_file)


app = typer.Typer(add_completion=False)
app.command()(main)

if __name__ == "__main__":
    app()

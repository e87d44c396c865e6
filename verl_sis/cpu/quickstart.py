"""The quickstart: build the tiny world, train in it with verl, show what happened.

    python -m verl_sis.cpu.quickstart [--base] [--output DIR] [HYDRA OVERRIDE ...]

runs 30 GRPO steps with four mini-batch updates per rollout, with SIS (or, with ``--base``, without it), and writes to
the output directory ``metrics.jsonl`` (one object a step, verl's names), ``curves.png`` and ``verl.log``.

With ``+routing_replay@_global_=r3`` it does so in bfloat16, with a model of more experts and layers, and every step
also measures the mismatch that there would be without replay.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_sis.cpu import curves, tiny_world
from verl_sis.cpu.launch import RunResult, run_verl
from verl_sis.cpu.run_metrics import HELD_OUT, format_step, print_table, read_verl_log, write_jsonl

# Seventeen columns of figures need more than the 80 that a pipe is given.
_TABLE_WIDTH = 160

SIS_OVERRIDES = ("+sis@_global_=grpo",)

OVERRIDES = (
    "+cpu@_global_=tiny",
    "trainer.total_training_steps=30",
    "trainer.val_before_train=true",
    "trainer.test_freq=30",
    "trainer.logger=[console,file]",
    # 32 prompts x 4 samples per rollout, and N = 4 mini-batch updates on each.
    "data.train_batch_size=32",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.optim.lr=2e-4",
    # Validation samples as training does, twice a problem: the held-out reward is that of the same policy.
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
)
"""What the quickstart changes of verl's defaults; a user's own overrides come after these and win."""


_REPLAY = "+routing_replay@_global_="

ROUTING_OVERRIDES = (
    "actor_rollout_ref.rollout.dtype=bfloat16",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: bf16, reduce_dtype: fp32, buffer_dtype: fp32}",
    "actor_rollout_ref.actor.fsdp_config.router_replay.native_pass_every=1",
)
"""What the quickstart changes further under routing replay."""


class _Progress:
    """Prints each step once, as soon as verl has logged it."""

    def __init__(self, log: Path, console: Console) -> None:
        self._log, self._console, self._printed = log, console, 0

    def __call__(self) -> None:
        rows = read_verl_log(self._log)
        for row in rows[self._printed :]:
            self._console.print(format_step(row), soft_wrap=True, highlight=False)
        self._printed = len(rows)


def run(output: Path, overrides: list[str], base: bool, console: Console) -> int:
    """Train and report.

    Args:
        output: Directory for the results; files of an earlier run are replaced.
        overrides: Hydra overrides of the user.
        base: Leave SIS out, for comparison.
        console: For progress and the table.

    Returns:
        Exit code of verl.
    """
    output = output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    replay = any(override.startswith(_REPLAY) for override in overrides)
    world = tiny_world.build(output.parent / "tiny_world", tiny_world.ROUTING_WORLD if replay else None)
    raw, log = output / "verl_metrics.jsonl", output / "verl.log"
    raw.unlink(missing_ok=True)
    chosen = [
        *OVERRIDES,
        *(() if base else SIS_OVERRIDES),
        f"trainer.default_local_dir={output / 'checkpoints'}",
        f"hydra.run.dir={output / 'hydra'}",
        *(ROUTING_OVERRIDES if replay else ()),
        *overrides,
    ]
    console.print(f"tiny world: {world}\nlog: {log}\nverl starts in about a minute:", soft_wrap=True)
    console.print(
        "  python -m verl.trainer.main_ppo " + shlex.join(chosen), soft_wrap=True, highlight=False, markup=False
    )
    variables = {"VERL_SIS_TINY_WORLD": str(world), "VERL_FILE_LOGGER_PATH": str(raw)}
    result = run_verl(chosen, log=log, variables=variables, on_poll=_Progress(raw, console))
    _report(output, raw, result, console)
    if result.returncode != 0:
        console.print(f"verl failed with exit code {result.returncode}; the end of {log} says why:", soft_wrap=True)
        console.print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-20:]), markup=False)
    return result.returncode


def _report(output: Path, raw: Path, result: RunResult, console: Console) -> None:
    rows = read_verl_log(raw)
    if not rows:
        return
    write_jsonl(rows, output / "metrics.jsonl")
    curves.plot(rows, output / "curves.png")
    print_table(rows, console)
    held_out = [row[HELD_OUT] for row in rows if HELD_OUT in row]
    if held_out:
        console.print(f"held-out reward: {held_out[0]:.3f} before, {held_out[-1]:.3f} after")
    console.print(
        f"{result.seconds:.0f} s, peak memory {result.peak_bytes / 2**30:.1f} GiB\n"
        f"{output / 'metrics.jsonl'}\n{output / 'curves.png'}",
        soft_wrap=True,
    )


def main() -> None:
    """Command line; see the module's docstring."""
    app = typer.Typer(add_completion=False)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command(
        context: typer.Context,
        base: Annotated[bool, typer.Option("--base", help="The base loss alone, without SIS.")] = False,
        output: Annotated[Path, typer.Option(help="Directory for the results.")] = Path("runs/quickstart"),
    ) -> None:
        """Train a tiny mixture-of-experts model with verl and SIS on this machine's CPU, and show what happened."""
        console = Console()
        if not console.is_terminal:
            console = Console(width=_TABLE_WIDTH)
        raise typer.Exit(abs(run(output, context.args, base, console)))

    app()


if __name__ == "__main__":
    main()

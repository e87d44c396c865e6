"""Build the tiny world: model, tokenizer and data of a task that a reinforcement-learning run can improve in minutes.

    python -m verl_sis.cpu.tiny_world --out DIR

prints the directory to hand to verl (``VERL_SIS_TINY_WORLD``, see ``conf/cpu/tiny.yaml``). It holds ``model/`` (a
warm-started Qwen3-MoE with its tokenizer), ``train.parquet`` and ``validation.parquet`` (no problem is in both), and
``settings.json``. Building takes about two minutes on two cores; a second call with the same settings takes a second.
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from verl_sis.cpu.arithmetic import LEVELS, MAX_PROMPT_CHARACTERS, MAX_SOLUTION_CHARACTERS, Problem, distinct
from verl_sis.cpu.tiny_model import ModelShape, build_model, build_tokenizer
from verl_sis.cpu.warm_start import WarmStart, train
from verl_sis.errors import SisConfigError

MAX_PROMPT_TOKENS = MAX_PROMPT_CHARACTERS + len(("<|user|>", "<|assistant|>"))
MAX_RESPONSE_TOKENS = MAX_SOLUTION_CHARACTERS + len(("<eos>",))

FORMAT = 1
"""Raised when the code changes what equal settings build; part of the cache key."""


@dataclass(frozen=True)
class TinyWorld:
    """Everything that determines the files; equal settings give equal files on the same machine and torch."""

    shape: ModelShape = field(default_factory=ModelShape)
    """Sizes of the model."""

    warm_start: WarmStart = field(default_factory=WarmStart)
    """The supervised loop."""

    train_problems: tuple[int, ...] = (80, 240, 320, 320)
    """Training problems of each level. Level 1 has only 135 problems in all."""

    validation_problems: tuple[int, ...] = (48, 48, 48, 48)
    """Held-out problems of each level; equal, so that the mean over prompts is the mean over levels."""

    seed: int = 0
    """Of the weights and of the data."""

    @property
    def key(self) -> str:
        """Name of the directory that holds this world: twelve hexadecimal digits over all settings."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


ROUTING_WORLD = TinyWorld(
    shape=ModelShape(layers=4, experts=32, experts_per_token=4, expert_size=32), warm_start=WarmStart(steps=400)
)
"""The world under routing replay. With 8 experts the router of a trained model is too sure for engines to differ."""


def data_source(level: int) -> str:
    """Name under which verl reports the reward of a level."""
    return f"tiny_arithmetic_level{level}"


def split_problems(world: TinyWorld) -> tuple[list[Problem], list[Problem]]:
    """Draw the two data sets.

    Args:
        world: Settings.

    Returns:
        Training and held-out problems; no problem is in both, none occurs twice.

    Raises:
        SisConfigError: If a level has fewer different problems than asked for.
    """
    rng = random.Random(world.seed)
    training: list[Problem] = []
    held_out: list[Problem] = []
    for level, n_train, n_validation in zip(LEVELS, world.train_problems, world.validation_problems, strict=True):
        problems = list(islice(distinct(level, rng), n_validation + n_train))
        if len(problems) < n_validation + n_train:
            raise SisConfigError(
                f"expected {n_validation + n_train} different problems of level {level}, found only {len(problems)}. "
                "Lower train_problems or validation_problems."
            )
        held_out += problems[:n_validation]
        training += problems[n_validation:]
    rng.shuffle(training)
    return training, held_out


def to_rows(problems: list[Problem], split: str) -> list[dict[str, Any]]:
    """Put problems into the columns that verl's data set reads.

    Args:
        problems: One row each.
        split: "train" or "validation"; only for reports.
    """
    return [
        {
            "data_source": data_source(problem.level),
            "prompt": [{"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"split": split, "index": index, "level": problem.level},
        }
        for index, problem in enumerate(problems)
    ]


def build(root: Path, world: TinyWorld | None = None, quiet: bool = False) -> Path:
    """Build the world below ``root``, or find it there.

    Args:
        root: Directory for all worlds; made if missing.
        world: Settings; the defaults if None.
        quiet: Print nothing.

    Returns:
        ``root / world.key``. It appears in one step, complete, even if two processes build it at once.
    """
    world = world or TinyWorld()
    return build_once(root, world.key, lambda directory: _write(directory, world, quiet))


def build_once(root: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Make a directory that its key determines, or find it.

    Args:
        root: Directory for all of them; made if missing.
        key: Its name.
        write: Fills an empty directory.

    Returns:
        ``root / key``. It appears in one step, complete, even if two processes make it at once.
    """
    target = root / key
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{key}-", dir=root))
    try:
        write(scratch)
        scratch.chmod(0o755)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError:
        # Another process was faster; its directory is complete and, by the key, the same.
        if not target.is_dir():
            raise


def _write(directory: Path, world: TinyWorld, quiet: bool) -> None:
    import pandas
    import torch

    # The sums of the warm start depend on how many threads share them; one is safe on a busy machine too.
    torch.set_num_threads(1)
    training, held_out = split_problems(world)
    pandas.DataFrame(to_rows(training, "train")).to_parquet(directory / "train.parquet")
    pandas.DataFrame(to_rows(held_out, "validation")).to_parquet(directory / "validation.parquet")

    tokenizer = build_tokenizer()
    # Room for a prompt and a response of twice the longest that is needed.
    length = 2 * (MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS)
    model = build_model(world.shape, tokenizer, length, world.seed)

    def report(step: int, loss: float) -> None:
        if not quiet and step % 50 == 0:
            print(f"warm start {step}/{world.warm_start.steps}: loss {loss:.3f} nats per token", flush=True)

    train(model, tokenizer, world.warm_start, frozenset(held_out), world.seed, report)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "settings.json").write_text(json.dumps({"format": FORMAT, **asdict(world)}, indent=2) + "\n")


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    def command(
        out: Annotated[Path, typer.Option(help="Directory for all worlds; each has a sub-directory named by its key.")],
        seed: Annotated[int, typer.Option(help="Of the weights and of the data.")] = 0,
        steps: Annotated[
            int | None, typer.Option(help="Steps of the warm start; 0 for random weights.", show_default=False)
        ] = None,
        routing: Annotated[
            bool, typer.Option("--routing", help="More experts and layers, for routing replay.")
        ] = False,
    ) -> None:
        """Build the tiny world, or find it, and print its directory on the last line."""
        world = replace(ROUTING_WORLD if routing else TinyWorld(), seed=seed)
        if steps is not None:
            world = replace(world, warm_start=replace(world.warm_start, steps=steps))
        print(build(out.resolve(), world))

    typer.run(command)


if __name__ == "__main__":
    main()

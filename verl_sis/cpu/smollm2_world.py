"""SmolLM2 with worded arithmetic: a real, if small, language model for a reinforcement-learning run on a CPU.

    python -m verl_sis.cpu.smollm2_world --out DIR

prints the directory to hand to verl. It holds ``model/``, ``train.parquet``, ``validation.parquet`` (no question is in
both) and ``settings.json``. The model has had a short supervised start: as it comes, a model of 135 million parameters
in 4 bits that is sampled at temperature 1 hardly ever ends with an answer, and nearly every group of samples would
have the same reward.
"""

import hashlib
import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from verl_sis.cpu.smollm2 import load_dense
from verl_sis.cpu.tiny_world import build_once
from verl_sis.cpu.warm_start import WarmStart, fit, pad, response_only
from verl_sis.cpu.word_problems import WordProblem, draw, to_rows

FORMAT = 2
"""Raised when the code changes what equal settings build; part of the cache key."""


@dataclass(frozen=True)
class SmolLM2World:
    """Everything that determines the files; equal settings give equal files on the same machine and torch."""

    warm_start: WarmStart = field(
        default_factory=lambda: WarmStart(steps=10, batch_size=8, mistakes=0.0, learning_rate=1e-4, warmup_steps=2)
    )
    """The supervised loop, in bfloat16 with float32 weights: the form of an answer, which may be wrong."""

    train_problems: int = 2000
    """Training problems; the supervised start draws from them, too."""

    validation_problems: int = 128
    """Held-out problems, equally many of each operation."""

    seed: int = 0
    """Of the data."""

    @property
    def key(self) -> str:
        """Name of the directory that holds this world."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        return f"smollm2-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def build(root: Path, world: SmolLM2World | None = None, quiet: bool = False) -> Path:
    """Build the world below ``root``, or find it there.

    Args:
        root: Directory for all worlds; made if missing.
        world: Settings; the defaults if None.
        quiet: Print nothing.

    Returns:
        ``root / world.key``, complete.

    Raises:
        SisConfigError: If the package with the weights is not installed, or a number of problems is out of range.
    """
    world = world or SmolLM2World()
    return build_once(root, world.key, lambda directory: _write(directory, world, quiet))


def _write(directory: Path, world: SmolLM2World, quiet: bool) -> None:
    import pandas

    problems = draw(world.validation_problems + world.train_problems, world.seed)
    held_out, training = problems[: world.validation_problems], problems[world.validation_problems :]
    for name, part in (("validation", held_out), ("train", training)):
        pandas.DataFrame(to_rows(part, name)).to_parquet(directory / f"{name}.parquet")
    model, tokenizer = load_dense()
    rng = random.Random(world.seed)

    def batch() -> dict[str, Any]:
        chosen = rng.sample(training, world.warm_start.batch_size)
        return pad([response_only(*encode(tokenizer, problem)) for problem in chosen], tokenizer.pad_token_id)

    def report(step: int, loss: float) -> None:
        if not quiet and step % 10 == 0:
            print(f"warm start {step}/{world.warm_start.steps}: loss {loss:.3f} nats per token", flush=True)

    fit(model, batch, world.warm_start, report, bfloat16=True)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "settings.json").write_text(json.dumps({"format": FORMAT, **asdict(world)}, indent=2) + "\n")


def encode(tokenizer: Any, problem: WordProblem) -> tuple[list[int], list[int]]:
    """Tokenize a problem and its solution as the chat template would.

    Returns:
        Token ids of the prompt, and of the response with the token that ends a turn.
    """
    prompt = tokenizer.apply_chat_template(problem.chat, add_generation_prompt=True, return_dict=False)
    return list(prompt), [*tokenizer.encode(problem.solution, add_special_tokens=False), tokenizer.eos_token_id]


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    def command(
        out: Annotated[Path, typer.Option(help="Directory for all worlds; each has a sub-directory named by its key.")],
    ) -> None:
        """Build the world, or find it, and print its directory on the last line."""
        print(build(out.resolve()))

    typer.run(command)


if __name__ == "__main__":
    main()

"""Worded arithmetic with verified answers, for reinforcement learning of a small language model.

    python -m verl_sis.cpu.word_problems --out DIR

writes ``train.parquet`` and ``validation.parquet`` with verl's columns. No question is in both. A problem has one or
two steps (its level), small whole numbers, and a whole number as its answer.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from verl_sis.errors import SisConfigError

LEVELS = (1, 2)

INSTRUCTION = "Think briefly and end with: The answer is"
"""Follows each question. The model knows such endings; the reward reads the last number, however it is introduced."""

_NAMES = (
    "Ana",
    "Ben",
    "Chloe",
    "David",
    "Elif",
    "Femi",
    "Grace",
    "Hiro",
    "Ines",
    "Jonas",
    "Kavya",
    "Liam",
    "Mei",
    "Omar",
)
_THINGS = (
    "apples",
    "books",
    "candles",
    "coins",
    "eggs",
    "flowers",
    "letters",
    "marbles",
    "pencils",
    "stamps",
    "tickets",
)


@dataclass(frozen=True)
class WordProblem:
    """One question and its answer."""

    level: int
    """Number of arithmetic steps, one of `LEVELS`."""

    question: str
    """Text of the question, without the instruction."""

    answer: int
    """The one right answer."""


def _gives_away(rng: random.Random) -> WordProblem:
    name, other = rng.sample(_NAMES, 2)
    thing, many, few = rng.choice(_THINGS), rng.randint(11, 30), rng.randint(2, 10)
    return WordProblem(
        1, f"{name} has {many} {thing} and gives {few} of them to {other}. How many {thing} are left?", many - few
    )


def _finds_more(rng: random.Random) -> WordProblem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    many, more = rng.randint(5, 30), rng.randint(2, 20)
    return WordProblem(
        1, f"{name} has {many} {thing} and finds {more} more. How many {thing} does {name} have now?", many + more
    )


def _buys_boxes(rng: random.Random) -> WordProblem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    boxes, each = rng.randint(2, 9), rng.randint(2, 9)
    return WordProblem(
        1, f"{name} buys {boxes} boxes with {each} {thing} each. How many {thing} are that in all?", boxes * each
    )


def _shares(rng: random.Random) -> WordProblem:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    friends, each = rng.randint(2, 9), rng.randint(2, 9)
    question = f"{name} shares {friends * each} {thing} equally among {friends} friends. How many does each friend get?"
    return WordProblem(1, question, each)


def _buys_and_gives(rng: random.Random) -> WordProblem:
    name, other = rng.sample(_NAMES, 2)
    thing, boxes, each, few = rng.choice(_THINGS), rng.randint(3, 9), rng.randint(3, 9), rng.randint(2, 8)
    question = (
        f"{name} buys {boxes} boxes with {each} {thing} each and gives {few} {thing} to {other}. "
        f"How many {thing} does {name} keep?"
    )
    return WordProblem(2, question, boxes * each - few)


def _both_together(rng: random.Random) -> WordProblem:
    name, other = rng.sample(_NAMES, 2)
    thing, many, more = rng.choice(_THINGS), rng.randint(5, 20), rng.randint(2, 10)
    question = (
        f"{name} has {many} {thing}, and {other} has {more} more than {name}. How many {thing} do they have together?"
    )
    return WordProblem(2, question, 2 * many + more)


_KINDS: tuple[Callable[[random.Random], WordProblem], ...] = (
    _gives_away,
    _finds_more,
    _buys_boxes,
    _shares,
    _buys_and_gives,
    _both_together,
)


def draw(count: int, seed: int) -> list[WordProblem]:
    """Draw different problems in random order, each kind equally likely.

    Args:
        count: How many. Fewer problems of the same seed are the first ones of more.
        seed: Of the draw; equal seeds give equal problems on every machine.

    Raises:
        SisConfigError: If ``count`` is negative or above 10,000, where some kinds would run out.
    """
    if not 0 <= count <= 10_000:
        raise SisConfigError(f"expected 0 to 10000 problems, found {count}. Lower --train or --validation.")
    rng = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    while len(problems) < count:
        problem = rng.choice(_KINDS)(rng)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def to_rows(problems: list[WordProblem], split: str) -> list[dict[str, Any]]:
    """Put problems into the columns that verl's data set reads.

    Args:
        problems: One row each.
        split: "train" or "validation"; only for reports.
    """
    return [
        {
            "data_source": f"word_problems_level{problem.level}",
            "prompt": [{"role": "user", "content": f"{problem.question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index, "level": problem.level},
        }
        for index, problem in enumerate(problems)
    ]


def write(folder: Path, train: int, validation: int, seed: int) -> None:
    """Write both files, each complete or not at all.

    Args:
        folder: Directory; made if missing.
        train: Number of training problems.
        validation: Number of held-out problems.
        seed: As in `draw`.

    Raises:
        SisConfigError: As `draw`.
    """
    import pandas

    problems = draw(validation + train, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("validation", problems[:validation]), ("train", problems[validation:])):
        scratch = folder / f".{name}.{os.getpid()}"
        try:
            pandas.DataFrame(to_rows(part, name)).to_parquet(scratch)
            os.replace(scratch, folder / f"{name}.parquet")
        finally:
            scratch.unlink(missing_ok=True)


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    def command(
        out: Annotated[Path, typer.Option(help="Directory for the two files.")],
        train: Annotated[int, typer.Option(help="Training problems.")] = 2000,
        validation: Annotated[int, typer.Option(help="Held-out problems.")] = 128,
        seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    ) -> None:
        """Write worded arithmetic with verified answers for verl."""
        try:
            write(out, train, validation, seed)
        except SisConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error

    typer.run(command)


if __name__ == "__main__":
    main()

"""Worded arithmetic with verified answers, for reinforcement learning of a small language model.

    python -m verl_sis.cpu.word_problems --out DIR

writes ``train.parquet`` and ``validation.parquet`` with verl's columns. No question is in both. A problem is one
operation on small whole numbers; three solved examples stand before it in the prompt, since a model of 135 million
parameters does not end with an answer otherwise. verl loads the reward through
``reward.custom_reward_function.path=pkg://verl_sis.cpu.word_problems``.
"""

import itertools
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from verl_sis.errors import SisConfigError

OPERATIONS = ("add", "subtract", "multiply", "divide")

MAX_PROBLEMS = 8000
"""Of more, some operation would run out of new questions."""

EXAMPLES = (
    ("Paula has 12 cups and gives 5 of them to Tom. How many cups are left?", "12 - 5 = 7. The answer is 7."),
    ("Tom buys 3 boxes with 4 cups each. How many cups are that in all?", "3 * 4 = 12. The answer is 12."),
    ("Paula has 6 cups and finds 9 more. How many cups are that in all?", "6 + 9 = 15. The answer is 15."),
)
"""Questions and answers before each problem. Their names and things are in no problem."""

_NAMES = ("Ana", "Ben", "Chloe", "David", "Elif", "Femi", "Grace", "Hiro", "Ines", "Jonas", "Kavya", "Liam")
_THINGS = ("apples", "books", "candles", "coins", "eggs", "flowers", "letters", "marbles", "pencils", "tickets")

_ANSWER = re.compile(r"[Tt]he answer is (-?\d+)")


@dataclass(frozen=True)
class WordProblem:
    """One question and its answer."""

    operation: str
    """One of `OPERATIONS`."""

    question: str
    """Text of the question."""

    answer: int
    """The one right answer."""


def _draw_one(operation: str, rng: random.Random) -> WordProblem:
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    if operation == "add":
        many, more = rng.randint(5, 30), rng.randint(2, 20)
        question = f"{name} has {many} {thing} and finds {more} more. How many {thing} are that in all?"
        return WordProblem(operation, question, many + more)
    if operation == "subtract":
        many, few = rng.randint(11, 30), rng.randint(2, 10)
        question = f"{name} has {many} {thing} and gives {few} of them to {other}. How many {thing} are left?"
        return WordProblem(operation, question, many - few)
    count, each = rng.randint(2, 9), rng.randint(2, 9)
    if operation == "multiply":
        question = f"{name} buys {count} boxes with {each} {thing} each. How many {thing} are that in all?"
        return WordProblem(operation, question, count * each)
    question = f"{name} shares {count * each} {thing} among {count} friends. How many does each friend get?"
    return WordProblem(operation, question, each)


def draw(count: int, seed: int) -> list[WordProblem]:
    """Draw different problems; operations take turns.

    Args:
        count: How many. Fewer problems of the same seed are the first ones of more.
        seed: Of the draw; equal seeds give equal problems on every machine.

    Raises:
        SisConfigError: If ``count`` is negative or above `MAX_PROBLEMS`.
    """
    if not 0 <= count <= MAX_PROBLEMS:
        raise SisConfigError(f"expected 0 to {MAX_PROBLEMS} problems, found {count}. Lower --train or --validation.")
    rng = random.Random(seed)
    problems: dict[str, WordProblem] = {}
    for operation in itertools.islice(itertools.cycle(OPERATIONS), count):
        problem = _draw_one(operation, rng)
        while problem.question in problems:
            problem = _draw_one(operation, rng)
        problems[problem.question] = problem
    return list(problems.values())


def to_rows(problems: list[WordProblem], split: str) -> list[dict[str, Any]]:
    """Put problems into the columns that verl's data set reads.

    Args:
        problems: One row each.
        split: "train" or "validation"; only for reports.
    """
    examples = [
        {"role": role, "content": text}
        for example in EXAMPLES
        for role, text in zip(("user", "assistant"), example, strict=True)
    ]
    return [
        {
            "data_source": f"word_problems_{problem.operation}",
            "prompt": [*examples, {"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
            "extra_info": {"split": split, "index": index},
        }
        for index, problem in enumerate(problems)
    ]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Score one response by the last "The answer is N" in it; the signature is verl's.

    Args:
        data_source: Not used.
        solution_str: The response as text, without special tokens.
        ground_truth: The right answer, in decimal digits.
        extra_info: Not used.

    Returns:
        ``score`` and ``acc``: 1.0 if N is the right answer, else 0.0; ``answer_missing``: 1.0 if nothing like it is
        said.
    """
    answers = _ANSWER.findall(solution_str)
    right = float(bool(answers) and int(answers[-1]) == int(ground_truth))
    return {"score": right, "acc": right, "answer_missing": float(not answers)}


def write(folder: Path, train: int, validation: int, seed: int) -> None:
    """Write both files, each complete or not at all.

    Args:
        folder: Directory; made if missing.
        train: Number of training problems.
        validation: Number of held-out problems; a multiple of four has equally many of each operation.
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

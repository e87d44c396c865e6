"""Worded arithmetic with verified answers, for reinforcement learning of a small language model.

A problem is one operation on small whole numbers. verl loads the reward through
``reward.custom_reward_function.path=pkg://verl_sis.cpu.word_problems``.
"""

import itertools
import random
import re
from dataclasses import dataclass
from typing import Any

from verl_sis.errors import SisConfigError

OPERATIONS = ("add", "subtract", "multiply", "divide")

MAX_PROBLEMS = 8000
"""Of more, some operation would run out of new questions."""

SYSTEM_PROMPT = "Solve the problem."
"""Shorter than the one that the model's chat template puts in otherwise."""

_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}

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

    numbers: tuple[int, int]
    """What the operation is on."""

    answer: int
    """The one right answer."""

    @property
    def chat(self) -> list[dict[str, str]]:
        """The prompt's messages."""
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": self.question}]

    @property
    def solution(self) -> str:
        """A response that is rewarded."""
        first, second = self.numbers
        return f"{first} {_SIGNS[self.operation]} {second} = {self.answer}. The answer is {self.answer}."


def _draw_one(operation: str, rng: random.Random) -> WordProblem:
    name, other = rng.sample(_NAMES, 2)
    thing = rng.choice(_THINGS)
    if operation == "add":
        many, more = rng.randint(5, 30), rng.randint(2, 20)
        question = f"{name} has {many} {thing} and finds {more} more. How many {thing} are that in all?"
        return WordProblem(operation, question, (many, more), many + more)
    if operation == "subtract":
        many, few = rng.randint(11, 30), rng.randint(2, 10)
        question = f"{name} has {many} {thing} and gives {few} of them to {other}. How many {thing} are left?"
        return WordProblem(operation, question, (many, few), many - few)
    count, each = rng.randint(2, 9), rng.randint(2, 9)
    if operation == "multiply":
        question = f"{name} buys {count} boxes with {each} {thing} each. How many {thing} are that in all?"
        return WordProblem(operation, question, (count, each), count * each)
    question = f"{name} shares {count * each} {thing} among {count} friends. How many does each friend get?"
    return WordProblem(operation, question, (count * each, count), each)


def draw(count: int, seed: int) -> list[WordProblem]:
    """Draw different problems; operations take turns.

    Args:
        count: How many. Fewer problems of the same seed are the first ones of more.
        seed: Of the draw; equal seeds give equal problems on every machine.

    Raises:
        SisConfigError: If ``count`` is negative or above `MAX_PROBLEMS`.
    """
    if not 0 <= count <= MAX_PROBLEMS:
        raise SisConfigError(f"expected 0 to {MAX_PROBLEMS} problems, found {count}. Ask for fewer.")
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
    return [
        {
            "data_source": f"word_problems_{problem.operation}",
            "prompt": problem.chat,
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

"""The problems of DAPO-Math-17k, MATH-500, AMC 2023, AIME 2024 and AIME 2025: where they are and how they are read.

Revisions, checksums and numbers of rows are those that public users of the data sets state; ``docs/data.md`` says more.
"""

import re
from dataclasses import dataclass
from typing import Any

from verl_sis.data.sources import Input, Row, Source, read_rows
from verl_sis.data.texts import spaced
from verl_sis.errors import DataSetError

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'
"""Instructions around each problem of the public file. They ask for another form of answer than the recipe does."""

DAPO_PROBLEMS = 17_917
"""Different ids in the public file; also the figure of the paper's release."""

_EXAMPLES = 5
"""Rows that an error names."""


@dataclass(frozen=True)
class Evaluation:
    """A public set of problems for evaluation.

    Attributes:
        source: Where it is.
        problem: Column of the problem.
        problems: Their number.
        samples: Rows that each problem gets: the k of Avg@k.
        integers: Whether every answer is a whole number, as in AMC and AIME.
    """

    source: Source
    problem: str
    problems: int
    samples: int
    integers: bool


DAPO = Source(
    "dapo_math_17k",
    "BytedTsinghua-SIA/DAPO-Math-17k",
    "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
    "data/dapo-math-17k.parquet",
)
EVALUATIONS = (
    Evaluation(
        Source(
            "math500",
            "HuggingFaceH4/MATH-500",
            "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
            "test.jsonl",
            "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        ),
        problem="problem",
        problems=500,
        samples=1,
        integers=False,
    ),
    Evaluation(
        Source(
            "amc23",
            "math-ai/amc23",
            "80815d37005feb82cd7f8fbc6901d5d3eff43057",
            "test-00000-of-00001.parquet",
            "b696e87ba47be4e879a60fd4ef1d4aa522ba78c5ae013c6aff5cc9788a397c5e",
        ),
        problem="question",
        problems=40,
        samples=32,
        integers=True,
    ),
    Evaluation(
        Source(
            "aime24",
            "HuggingFaceH4/aime_2024",
            "2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
            "data/train-00000-of-00001.parquet",
            "26139847601a5037c237d5928b195e7260ca8074cf4f264b794af42847f79ccf",
        ),
        problem="problem",
        problems=30,
        samples=32,
        integers=True,
    ),
    Evaluation(
        Source(
            "aime25",
            "math-ai/aime25",
            "563bb8404243c5f09de6ec262f2db674fe5bce9b",
            "test.jsonl",
            "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        ),
        problem="problem",
        problems=30,
        samples=32,
        integers=True,
    ),
)


@dataclass(frozen=True)
class Problem:
    """A problem as it is written.

    Attributes:
        id: In its source.
        text: The bare problem.
        answer: The bare answer.
    """

    id: str
    text: str
    answer: str


def read_dapo(found: Input) -> list[Problem]:
    """Read DAPO-Math-17k, each id once, in the order of the file, without the instructions around the problem.

    Args:
        found: The public file, with copies or without.

    Raises:
        DataSetError: A row is not of the schema, lacks the instructions, the answer or the id, or copies of one id
            differ.
    """
    problems: dict[str, Problem] = {}
    faults: list[str] = []
    for number, row in enumerate(read_rows(found, ("prompt", "reward_model", "extra_info")), start=1):
        problem, fault = _dapo_problem(row)
        if problem is None:
            faults.append(f"row {number}: {fault}")
        elif problems.setdefault(problem.id, problem) != problem:
            other = problems[problem.id]
            what = f"answers {other.answer!r} and {problem.answer!r}" if other.text == problem.text else "texts"
            faults.append(f"row {number}: id {problem.id} has different {what}")
    _raise(found, faults)
    return list(problems.values())


def _dapo_problem(row: Row) -> tuple[Problem | None, str]:
    """The problem, or None and what is wrong."""
    try:
        ((role, content),) = [(message["role"], message["content"]) for message in row["prompt"]]
        answer, id = row["reward_model"]["ground_truth"], row["extra_info"]["index"]
    except (TypeError, KeyError, ValueError):
        return None, "expected one message, reward_model.ground_truth and extra_info.index"
    if role != "user" or not isinstance(content, str):
        return None, f"expected a text of the user, found a message of {role!r}"
    if not content.startswith(DAPO_PREFIX) or not content.endswith(DAPO_SUFFIX):
        return None, f"expected the instructions of DAPO-Math-17k around the problem, found {content[:60]!r}"
    text = content[len(DAPO_PREFIX) : len(content) - len(DAPO_SUFFIX)].strip()
    if not text or not isinstance(answer, str) or not answer.strip() or not isinstance(id, str) or not id:
        return None, f"expected a problem, an answer and an id, found {text[:60]!r}, {answer!r}, {id!r}"
    return Problem(id, text, answer.strip()), ""


def read_evaluation(evaluation: Evaluation, found: Input) -> list[Problem]:
    """Read an evaluation set, in the order of its file.

    Args:
        evaluation: Which.
        found: Its file.

    Raises:
        DataSetError: A column, a problem or an answer is missing, an answer is not of its kind, or a problem is there
            twice.
    """
    problems: dict[str, Problem] = {}
    faults: list[str] = []
    for number, row in enumerate(read_rows(found, (evaluation.problem, "answer"))):
        text, answer = row[evaluation.problem], _answer(row["answer"], integer=evaluation.integers)
        if not isinstance(text, str) or not text.strip():
            faults.append(f"row {number + 1}: no problem")
        elif answer is None:
            kind = "a whole number" if evaluation.integers else "an answer"
            faults.append(f"row {number + 1}: expected {kind}, found {row['answer']!r}")
        elif spaced(text) in problems:
            faults.append(f"row {number + 1}: the problem of row {problems[spaced(text)].id} again")
        else:
            id = row.get("unique_id", row.get("id"))
            problems[spaced(text)] = Problem(str(number + 1 if id is None else id), text.strip(), answer)
    _raise(found, faults)
    return list(problems.values())


def _answer(value: Any, *, integer: bool) -> str | None:
    r"""The answer as text: ``27`` for 27.0, ``33`` for "033" and ``336`` for "336^\circ" where answers are integers."""
    text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not integer:
        return text or None
    match = re.fullmatch(r"(-?\d+)(?:\.0+)?(?:\^\{?\\circ\}?)?", text)
    return str(int(match[1])) if match else None


def _raise(found: Input, faults: list[str]) -> None:
    if faults:
        more = f"; and {len(faults) - _EXAMPLES} more" if len(faults) > _EXAMPLES else ""
        raise DataSetError(
            f"{found.path}: {'; '.join(faults[:_EXAMPLES])}{more}. Expected {found.source.file} of the data set "
            f"{found.source.hub_id}; repair the rows in a copy and name its directory with --source"
        )

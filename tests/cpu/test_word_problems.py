"""Worded arithmetic: each answer is what its question asks for, and the reward reads the answer that was given last."""

import math
import re

import pandas
import pytest

from verl_sis.cpu.word_problems import EXAMPLES, MAX_PROBLEMS, OPERATIONS, compute_score, draw, to_rows, write
from verl_sis.errors import SisConfigError


def score(text, truth="7"):
    return compute_score("word_problems_add", text, truth)


@pytest.mark.parametrize(
    ("text", "right", "missing"),
    [
        ("12 - 5 = 7. The answer is 7.", 1.0, 0.0),
        ("the answer is 7", 1.0, 0.0),
        ("The answer is 6. No, wait. The answer is 7.", 1.0, 0.0),
        ("The answer is 7. The answer is 6.", 0.0, 0.0),
        ("The answer is 70.", 0.0, 0.0),
        ("The answer is -7.", 0.0, 0.0),
        ("12 - 5 = 7", 0.0, 1.0),
        ("The answer is seven.", 0.0, 1.0),
        ("", 0.0, 1.0),
    ],
)
def test_the_reward_is_the_last_answer(text, right, missing):
    assert score(text) == {"score": right, "acc": right, "answer_missing": missing}


def test_the_examples_would_be_rewarded():
    for _, answer in EXAMPLES:
        assert score(answer, re.findall(r"= (\d+)", answer)[0])["score"] == 1.0


def test_answers_are_right():
    results = {"add": sum, "multiply": math.prod, "subtract": lambda n: n[0] - n[1], "divide": lambda n: n[0] / n[1]}
    problems = draw(400, seed=3)
    for problem in problems:
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert len(numbers) == 2
        assert results[problem.operation](numbers) == problem.answer
    assert [problem.operation for problem in problems[:8]] == [*OPERATIONS, *OPERATIONS]


def test_problems_are_different_and_repeatable():
    many = draw(2000, seed=1)
    assert len({problem.question for problem in many}) == 2000
    assert draw(100, seed=1) == many[:100]
    assert draw(100, seed=2) != many[:100]
    assert len(draw(MAX_PROBLEMS, seed=0)) == MAX_PROBLEMS
    for count in (-1, MAX_PROBLEMS + 1):
        with pytest.raises(SisConfigError, match=f"found {count}"):
            draw(count, seed=0)


def test_files_hold_different_questions(tmp_path):
    write(tmp_path / "new", train=40, validation=8, seed=5)
    train, validation = (pandas.read_parquet(tmp_path / "new" / f"{name}.parquet") for name in ("train", "validation"))
    questions = [{prompt[-1]["content"] for prompt in rows["prompt"]} for rows in (train, validation)]
    assert [len(part) for part in questions] == [40, 8]
    assert not questions[0] & questions[1]
    assert validation["data_source"].value_counts().to_dict() == {f"word_problems_{name}": 2 for name in OPERATIONS}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["train.parquet", "validation.parquet"]


def test_a_row_shows_three_solved_examples():
    (problem,) = draw(1, seed=0)
    (row,) = to_rows([problem], "train")
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * 3 + ["user"]
    assert row["prompt"][-1]["content"] == problem.question
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(problem.answer)}

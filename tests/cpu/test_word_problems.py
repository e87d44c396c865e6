"""Worded arithmetic: each answer is what its question asks for, and the reward reads the answer that was given last."""

import math
import re

import pytest
import torch

from verl_sis.cpu.smollm2_world import SmolLM2World, encode
from verl_sis.cpu.tiny_model import build_tokenizer
from verl_sis.cpu.warm_start import IGNORED_LABEL, pad, response_only
from verl_sis.cpu.word_problems import MAX_PROBLEMS, OPERATIONS, SYSTEM_PROMPT, compute_score, draw, to_rows
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


def test_solutions_are_rewarded():
    for problem in draw(40, seed=2):
        assert score(problem.solution, str(problem.answer))["score"] == 1.0
        assert score(problem.solution, str(problem.answer + 1))["score"] == 0.0


def test_answers_are_right():
    results = {"add": sum, "multiply": math.prod, "subtract": lambda n: n[0] - n[1], "divide": lambda n: n[0] / n[1]}
    problems = draw(400, seed=3)
    for problem in problems:
        numbers = [int(number) for number in re.findall(r"\d+", problem.question)]
        assert len(numbers) == 2
        assert sorted(numbers) == sorted(problem.numbers)
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


def test_a_row_is_what_verl_reads():
    problem = draw(3, seed=0)[2]
    (row,) = to_rows([problem], "train")
    assert row["data_source"] == "word_problems_multiply"
    assert [(message["role"], message["content"]) for message in row["prompt"]] == [
        ("system", SYSTEM_PROMPT),
        ("user", problem.question),
    ]
    assert row["reward_model"] == {"style": "rule", "ground_truth": str(problem.answer)}
    assert row["extra_info"] == {"split": "train", "index": 0}


def test_the_supervised_start_learns_the_response_and_where_it_ends():
    tokenizer = build_tokenizer()
    problem = draw(1, seed=0)[0]
    prompt, response = encode(tokenizer, problem)
    assert tokenizer.decode(prompt) == f"<|system|>{SYSTEM_PROMPT}<|user|>{problem.question}<|assistant|>"
    assert tokenizer.decode(response) == f"{problem.solution}<eos>"


def test_padding_that_is_also_a_token():
    batch = pad([response_only([5, 9], [7, 9]), response_only([5], [9])], pad_token_id=9)
    none = IGNORED_LABEL
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 9, 7, 9], [5, 9, 9, 9]]))
    assert torch.equal(batch["labels"], torch.tensor([[none, none, 7, 9], [none, 9, none, none]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))


def test_each_setting_makes_another_world():
    keys = {SmolLM2World().key, SmolLM2World(seed=1).key, SmolLM2World(train_problems=100).key}
    assert len(keys) == 3
    assert SmolLM2World().key == SmolLM2World().key

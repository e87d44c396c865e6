"""The task: questions, chains of steps, answers, and who gets the reward."""

import random
import re

import pytest

from verl_sis.cpu import arithmetic
from verl_sis.cpu.arithmetic import LEVELS, Problem, draw, is_correct
from verl_sis.cpu.reward import compute_score

PROBLEM = Problem(3, (27, 18))


def steps(chain):
    """Split ``27+10=37+8=45`` into (27, 10, 37) and (37, 8, 45)."""
    values = [int(value) for value in re.findall(r"[+-]?\d+", chain)]
    return [(values[i], values[i + 1], values[i + 2]) for i in range(0, len(values) - 2, 2)]


def test_question_and_answer_by_hand():
    assert PROBLEM.question == "27+18=?"
    assert PROBLEM.answer == "45"
    assert Problem(4, (27, -18, 5)).question == "27-18+5=?"
    assert Problem(4, (27, -18, 5)).answer == "14"


def test_both_orders_occur_and_no_other_chain():
    chains = {PROBLEM.solution(random.Random(seed)) for seed in range(20)}
    assert chains == {"27+10=37+8=45", "27+8=35+10=45"}


@pytest.mark.parametrize("level", LEVELS)
def test_solutions_are_right_in_every_step(level):
    rng = random.Random(level)
    for _ in range(300):
        problem = draw(level, rng)
        chain = problem.solution(rng)
        assert all(before + change == after for before, change, after in steps(chain))
        assert is_correct(chain, problem.answer)
        assert len(problem.question) <= arithmetic.MAX_PROMPT_CHARACTERS
        assert len(chain) <= arithmetic.MAX_SOLUTION_CHARACTERS


def test_mistakes_are_as_frequent_as_asked():
    rng = random.Random(0)
    wrong = total = 0
    for _ in range(2000):
        for before, change, after in steps(draw(3, rng).solution(rng, mistakes=0.4)):
            wrong += before + change != after
            total += 1
    # Standard error 0.008; a mistake that crosses zero may, rarely, undo itself.
    assert wrong / total == pytest.approx(0.4, abs=0.03)


def test_levels_grow_in_steps():
    rng = random.Random(0)
    means = [sum(len(steps(draw(level, rng).solution(rng))) for _ in range(300)) / 300 for level in LEVELS]
    assert means[0] == means[1] == 1.0
    assert 1.5 < means[2] < means[3]


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("27+10=37+8=45", 1.0),
        ("=45", 1.0),
        ("27+18=45 ", 1.0),
        ("45", 0.0),
        ("27+10=37+8=", 0.0),
        ("27+10=45+8=37", 0.0),
        ("27+18=045", 0.0),
        ("27+18=45+", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_the_last_result(response, reward):
    assert compute_score("tiny_arithmetic_level3", response, "45", extra_info={"level": 3}) == reward

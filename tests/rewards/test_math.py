"""The three rules of boxed answers on the shared pairs, whose verdicts were decided by hand, and their faults."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.rewards.answers import PAIRS, RULES
from verl_sis.errors import SisConfigError
from verl_sis.rewards import math, symbolic
from verl_sis.rewards.boxed import last_boxed

FAULTS = ("answer_missing", "answer_too_long", "timed_out", "check_failed", "ground_truth_unparsed")


@pytest.fixture(scope="module")
def results():
    """What each rule returns for each pair, in threads, as verl calls rewards."""
    symbolic._checker = symbolic.Checker(children=2)
    calls = [(rule, pair["response"], pair["ground_truth"]) for rule in RULES for pair in PAIRS]
    with ThreadPoolExecutor(4) as threads:
        returned = list(threads.map(lambda call: getattr(math, call[0])("dapo_math_17k", *call[1:]), calls))
    yield {(rule, number): returned.pop(0) for rule in RULES for number in range(len(PAIRS))}
    symbolic._close()
    symbolic._checker = None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=lambda number: f"{PAIRS[number]['kind']}{number}")
def test_pair(results, rule, number):
    result = results[rule, number]
    assert result["score"] == result["acc"] == float(PAIRS[number][rule]), PAIRS[number]
    assert set(result) == {"score", "acc", *FAULTS}
    assert {type(value) for value in result.values()} == {float}
    assert result["timed_out"] == result["check_failed"] == 0


def test_the_pairs_tell_the_rules_apart():
    assert len(PAIRS) >= 80
    kinds = {"number", "fraction", "interval", "set", "unit", "equation", "expression", "text", "braces", "response"}
    assert {pair["kind"] for pair in PAIRS} == kinds | {"empty", "hostile"}
    verdicts = {tuple(pair[rule] for rule in RULES) for pair in PAIRS}
    assert verdicts == {
        (True, True, True),
        (False, True, True),
        (False, False, True),
        (False, True, False),
        (False, False, False),
    }


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        (r"no box", "answer_missing"),
        (r"\boxed{1} then \boxed{2", "answer_missing"),
        (r"\boxed{ }", "answer_missing"),
        (r"\boxed{" + "1" * 1001 + "}", "answer_too_long"),
        (r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}", "answer_too_long"),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_faults_are_counted_apart(rule, response, fault):
    result = getattr(math, rule)("amc23", response, "1")
    assert result == {"score": 0.0, "acc": 0.0, **dict.fromkeys(FAULTS, 0.0), fault: 1.0}


def test_a_thousand_characters_are_looked_at():
    assert math.exact("amc23", r"\boxed{" + "1" * 1000 + "}", "1" * 1000)["score"] == 1


def test_ground_truth_that_math_verify_cannot_read_is_counted(results):
    unread = [pair for number, pair in enumerate(PAIRS) if results["math_verify", number]["ground_truth_unparsed"]]
    assert {pair["ground_truth"] for pair in unread} == {r"50\%"}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ground_truth", [5, None, "", "  ", ["5"]])
def test_ground_truth_must_be_text(rule, ground_truth):
    with pytest.raises(SisConfigError, match=r"expected reward_model\.ground_truth to be the answer as a string"):
        getattr(math, rule)("amc23", r"\boxed{5}", ground_truth)


@pytest.mark.parametrize(
    ("response", "content"),
    [
        (r"\boxed{a{b}{c{d}}}e}", "a{b}{c{d}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{a \\{b}}", r"a \\{b}"),
        (r"\boxed{}", ""),
        ("\\boxed\n{5}", "5"),
        (r"\boxed{1} \boxed", "1"),
        ("\\boxed{1\\", None),
        (r"\boxedfive{1}", None),
        ("", None),
    ],
)
def test_last_boxed(response, content):
    assert last_boxed(response) == content

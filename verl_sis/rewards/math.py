r"""Rewards of mathematics: is the boxed answer the right one? Three rules of different strictness.

    reward.custom_reward_function.path=pkg://verl_sis.rewards.math
    reward.custom_reward_function.name=math_verify      # or: exact, hendrycks

All rules look at the last ``\boxed{...}`` of the response (`verl_sis.rewards.boxed`) and nothing else, and differ in
how they compare it with the ground truth. Each returns the same keys, all floats, 1.0 or 0.0:

    score, acc              the answer is right; verl reports ``acc`` as the core metric of a validation
    answer_missing          no closed box, or nothing in it
    answer_too_long         more than `MAX_ANSWER` characters: wrong, without a look at it
    timed_out               math-verify did not come to an end within `verl_sis.rewards.symbolic.CPU_SECONDS`
    check_failed            math-verify's process died otherwise, e.g. for lack of memory
    ground_truth_unparsed   math-verify cannot read the ground truth: only the same text is right

The ground truth is the bare answer, as a string: ``\frac{1}{2}``, neither ``$\frac{1}{2}$`` nor ``\boxed{...}``.
"""

from typing import Any

from verl_sis.errors import SisConfigError
from verl_sis.rewards.boxed import last_boxed
from verl_sis.rewards.symbolic import Verdict, equivalent

MAX_ANSWER = 1000
"""Characters of an answer that is looked at. The longest ground truths of MATH-500 have about a tenth."""


def exact(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> dict[str, float]:
    """The boxed answer is the ground truth, character by character, white space included.

    Args:
        data_source: Not used.
        solution_str: Text of the response.
        ground_truth: The bare answer.
        extra_info: Not used.

    Returns:
        The keys of the module's description.

    Raises:
        SisConfigError: The ground truth is not a string, or is empty.
    """
    answer, faults = _answer(solution_str, ground_truth)
    return _result(answer is not None and answer == ground_truth, faults)


def hendrycks(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    r"""The boxed answer and the ground truth are the same text once both are normalised as for Hendrycks' MATH.

    The normalisation is verl's (``verl.utils.reward_score.math_reward.is_equiv``): white space, ``\left``, ``\right``,
    ``\!``, degrees, percent and dollar signs and units in a trailing ``\text{ ...}`` go; ``dfrac`` and ``tfrac`` become
    ``frac``; missing braces of ``\frac`` and ``\sqrt`` are added; ``a/b`` of integers, and 0.5, become fractions; the
    ``x=`` of an equation goes. Text only: 0.25 is not ``\frac{1}{4}``.

    Args:
        data_source: Not used.
        solution_str: Text of the response.
        ground_truth: The bare answer.
        extra_info: Not used.

    Returns:
        The keys of the module's description.

    Raises:
        SisConfigError: The ground truth is not a string, or is empty.
    """
    # Importing verl takes seconds; where rewards are computed it is there already.
    from verl.utils.reward_score.math_reward import is_equiv

    answer, faults = _answer(solution_str, ground_truth)
    return _result(answer is not None and is_equiv(answer, ground_truth), faults)


def math_verify(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """The boxed answer and the ground truth are the same mathematics to the library math-verify.

    The comparison happens in another process with a limit on its time (`verl_sis.rewards.symbolic`), since hostile
    answers keep the library busy for ever, and since its own limits do not work in the threads in which verl calls
    rewards. May be called from any thread.

    Args:
        data_source: Not used.
        solution_str: Text of the response.
        ground_truth: The bare answer; put into a box for math-verify, which needs an environment to read LaTeX in.
        extra_info: Not used.

    Returns:
        The keys of the module's description.

    Raises:
        SisConfigError: The ground truth is not a string, or is empty; or math-verify is not installed.
        SisStateError: The process for the comparison does not start.
    """
    answer, faults = _answer(solution_str, ground_truth)
    if answer is None:
        return _result(False, faults)
    verdict = equivalent(ground_truth, answer)
    faults["timed_out"] = float(verdict is Verdict.TIMED_OUT)
    faults["check_failed"] = float(verdict is Verdict.FAILED)
    faults["ground_truth_unparsed"] = float(verdict in (Verdict.SAME_TEXT, Verdict.OTHER_TEXT))
    return _result(verdict in (Verdict.EQUAL, Verdict.SAME_TEXT), faults)


def _answer(response: str, ground_truth: Any) -> tuple[str | None, dict[str, float]]:
    """The answer to compare, None if there is none, and the faults known so far."""
    if not isinstance(ground_truth, str) or not ground_truth.strip():
        raise SisConfigError(
            f"expected reward_model.ground_truth to be the answer as a string, found {ground_truth!r}. "
            "Write the data with: verl-sis data math --out DIR"
        )
    answer = last_boxed(response)
    missing = answer is None or not answer.strip()
    too_long = answer is not None and len(answer) > MAX_ANSWER
    faults = {
        "answer_missing": float(missing),
        "answer_too_long": float(too_long),
        "timed_out": 0.0,
        "check_failed": 0.0,
        "ground_truth_unparsed": 0.0,
    }
    return (None if missing or too_long else answer), faults


def _result(right: bool, faults: dict[str, float]) -> dict[str, float]:
    return {"score": float(right), "acc": float(right), **faults}

"""Reward of question answering with a search tool: exact match, in the manner of Search-R1 (arXiv 2503.09516).

    reward.custom_reward_function.path=pkg://verl_sis.rewards.search
    reward.custom_reward_function.name=exact_match

verl's tool agent hands the reward the decoded response: the turns of the model and, between them, the tools' responses,
which Qwen's chat templates put into ``<tool_response>``. Only the model's last turn can hold the answer: everything up
to the last tool response is left out, so that no passage counts as an answer, whatever tags it contains. Tools for
models whose template has no such tag must put their output into ``<information>`` themselves.

The prompt is never seen: an example of an answer in it cannot count.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from verl_sis.errors import SisConfigError

RETRIEVAL_FAILED = "retrieval failed:"
"""What a search tool's response starts with if there was no retrieval: the service did not answer, or erred."""

TOOL_ERROR = "Error executing tool"
"""What verl's tool agent writes as the tool's response if the tool raised an exception."""

INVALID_CALLS = ("Unknown function", "Invalid JSON in arguments", "Search refused")
"""What verl's tool agent, or the search tool, writes as the response to a call that was none, or one too many."""

_RESPONSE = re.compile(r"<tool_response>\s*(?:<information>\s*)?|<information>\s*")
_RESPONSE_END = re.compile(r"</(?:tool_response|information)>")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """The last ``<answer>`` of the model's last turn is one of the golden answers, both normalised.

    The normalisation is Search-R1's, from verl (``verl.utils.reward_score.search_r1_like_qa_em``): lower case, no
    punctuation, no articles (a, an, the), single spaces.

    Args:
        data_source: Not used.
        solution_str: Text of the response, special tokens left out, with the tools' responses.
        ground_truth: ``{"target": [golden answer, ...]}``, or the list, or one golden answer.
        extra_info: Not used.

    Returns:
        ``score`` and ``acc``: 1.0 if right, else 0.0. ``answer_missing``: 1.0 without a closed ``<answer>`` in the last
        turn, or with nothing in it. Counts of tool responses: ``retrieval_calls``, of which ``retrieval_failures``
        brought nothing back for reasons that are not the model's; and ``invalid_tool_calls`` of the model, malformed
        or one too many, which are no retrieval calls.

    Raises:
        SisConfigError: The ground truth is nothing of this, or holds no golden answer.
    """
    # Importing verl takes seconds; where rewards are computed it is there already.
    from verl.utils.reward_score.search_r1_like_qa_em import em_check

    golden = golden_answers(ground_truth)
    answer = _last_answer(solution_str)
    right = float(bool(answer) and bool(em_check(answer, golden)))
    return {"score": right, "acc": right, "answer_missing": float(not answer), **_tool_calls(solution_str)}


def golden_answers(ground_truth: Any) -> list[str]:
    """The golden answers of a ground truth, in any of its forms.

    Raises:
        SisConfigError: See `exact_match`.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    answers = [target] if isinstance(target, str) else list(target) if isinstance(target, Iterable) else []
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise SisConfigError(
            f'expected reward_model.ground_truth to be {{"target": [golden answer, ...]}}, found {ground_truth!r}. '
            "Write the data with: verl-sis data search --out DIR"
        )
    return answers


def _last_answer(response: str) -> str:
    """What the last turn of the model says; empty if nothing."""
    last_turn = _RESPONSE_END.split(response)[-1]
    # What follows an opening tag would be a tool's, and verl never cuts one off: here the model wrote it.
    own_words = _RESPONSE.split(last_turn)[0]
    answers = _ANSWER.findall(own_words)
    return answers[-1].strip() if answers else ""


def _tool_calls(response: str) -> dict[str, float]:
    openings = [response[match.end() :] for match in _RESPONSE.finditer(response)]
    invalid = sum(text.startswith(INVALID_CALLS) for text in openings)
    failed = sum(text.startswith((RETRIEVAL_FAILED, TOOL_ERROR)) for text in openings)
    return {
        "retrieval_calls": float(len(openings) - invalid),
        "retrieval_failures": float(failed),
        "invalid_tool_calls": float(invalid),
    }

"""The reward of the tiny world: 1 if the response ends in the right answer, else 0.

verl loads it through ``reward.custom_reward_function.path=pkg://verl_sis.cpu.reward``.
"""

from typing import Any

from verl_sis.cpu.arithmetic import is_correct


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> float:
    """Score one response; the signature is verl's.

    Args:
        data_source: Name of the data set the prompt comes from.
        solution_str: The response as text, without special tokens.
        ground_truth: The right answer.
        extra_info: What the data set says beside it; not used.

    Returns:
        1.0 or 0.0.
    """
    return float(is_correct(solution_str, ground_truth))

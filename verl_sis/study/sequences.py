"""Of which quantity a token-level estimator is unbiased: every sequence of a tiny language is enumerated.

A language of V tokens and T positions has a table of conditional probabilities for each prefix. Three gradients of the
current policy's logits, one block per prefix, are compared:

* the policy gradient ``E_{y ~ pi}[R(y) grad log pi(y)]``, which sequence-level importance sampling meets;
* the token-level surrogate: prefixes and continuations from pi_old, the token at hand from pi. Token-level importance
  sampling meets this one, not the policy gradient;
* what an estimator with token-level coefficients (``verl_sis.study.estimators``) has in expectation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_sis.study.estimators import Estimator, Problem, expected_gradient, target_gradient

Tables = list[torch.Tensor]
"""One float64 ``[V^t, V]`` per position t: a row per prefix."""


@dataclass(frozen=True)
class Language:
    """Two policies over all sequences of T tokens, and a reward.

    Attributes:
        old: Conditional probabilities of pi_old.
        current: Conditional probabilities of pi.
        reward: float64 ``[V^T]``.
    """

    old: Tables
    current: Tables
    reward: torch.Tensor


def random_language(vocabulary: int, length: int, drift: float, seed: int) -> Language:
    """Random conditional policies and rewards.

    Args:
        vocabulary: V.
        length: T.
        drift: Standard deviation of the difference of their logits.
        seed: Of everything.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = [1.5 * noise(vocabulary**t, vocabulary) for t in range(length)]
    moved = [rows + drift * noise(*rows.shape) for rows in logits]
    reward = (noise(vocabulary**length) > 1.0).double()
    return Language([rows.softmax(-1) for rows in logits], [rows.softmax(-1) for rows in moved], reward)


def prefix_probabilities(tables: Tables) -> list[torch.Tensor]:
    """Probability of each prefix, float64 ``[V^t]`` for each position."""
    reach = [torch.ones(1, dtype=torch.float64)]
    for rows in tables[:-1]:
        reach.append((reach[-1][:, None] * rows).reshape(-1))
    return reach


def action_values(tables: Tables, reward: torch.Tensor) -> Tables:
    """Expected reward less the overall mean, after a prefix and a token, continuations from ``tables``."""
    values: Tables = []
    after = reward
    for rows in reversed(tables):
        values.insert(0, after.view(rows.shape))
        after = (rows * values[0]).sum(-1)
    return [value - after for value in values]


def policy_gradient(language: Language) -> torch.Tensor:
    """``E_{y ~ pi}[R grad log pi]``, all blocks as one vector."""
    reach = prefix_probabilities(language.current)
    values = action_values(language.current, language.reward)
    return _blocks(language.current, language.current, values, reach, target_gradient)


def surrogate_gradient(language: Language) -> torch.Tensor:
    """Prefixes and continuations from pi_old, the token at hand from pi, all blocks as one vector."""
    return _blocks(
        language.old,
        language.current,
        action_values(language.old, language.reward),
        prefix_probabilities(language.old),
        target_gradient,
    )


def estimated_gradient(language: Language, estimator: Estimator) -> torch.Tensor:
    """Expectation of a token-level estimator over sequences of pi_old, all blocks as one vector."""
    return _blocks(
        language.old,
        language.current,
        action_values(language.old, language.reward),
        prefix_probabilities(language.old),
        lambda problem: expected_gradient(problem, estimator(problem)[0]),
    )


def _blocks(
    old: Tables,
    current: Tables,
    values: Tables,
    reach: list[torch.Tensor],
    gradient: Callable[[Problem], torch.Tensor],
) -> torch.Tensor:
    parts = [
        probability[:, None] * gradient(Problem(q, p, value))
        for q, p, value, probability in zip(old, current, values, reach, strict=True)
    ]
    return torch.cat([part.reshape(-1) for part in parts])

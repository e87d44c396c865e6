"""Bias and variance of policy-gradient weights, exactly: the whole vocabulary is enumerated, nothing is sampled.

A token y is drawn from pi_old, and the gradient of the current policy pi with respect to its logits is estimated by
``c(y) A(y) grad log pi(y)`` with ``grad log pi(y) = onehot(y) - pi``. The estimators differ in the coefficient c, which
may be random (the acceptance z of SIS), so each is given by the first two moments of c given y. The target is the
on-policy gradient ``E_pi[A grad log pi]``; plain importance sampling, c = w, meets it in expectation.

All in float64. Contexts (prefixes) are the first axis, so that many are worked on at once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_sis.errors import SisShapeError

CLIP = 0.2
"""Clip range of PPO; CISPO's upper bound is 1 + CLIP (the SIS release)."""

TIS_BOUND = 2.0
"""Truncation bound of TIS, verl's default."""

ICEPOP_BAND = (0.5, 5.0)
"""Band of ratios that IcePop keeps (NeMo-RL's default)."""


@dataclass(frozen=True)
class Problem:
    """A batch of contexts with an old and a current policy.

    Attributes:
        old: float64 ``[B, V]``, pi_old.
        current: float64 ``[B, V]``, pi.
        advantage: float64 ``[B, V]``, A(y).
        lumped: Whether the last column is many tokens in one, which therefore is never in V_K.
    """

    old: torch.Tensor
    current: torch.Tensor
    advantage: torch.Tensor
    lumped: bool = False

    def __post_init__(self) -> None:
        """Check that the two are policies over the same vocabulary.

        Raises:
            SisShapeError: If they are not.
        """
        if not self.old.shape == self.current.shape == self.advantage.shape or self.old.ndim != 2:
            raise SisShapeError(
                f"expected three [contexts, vocabulary] tensors, found {tuple(self.old.shape)}, "
                f"{tuple(self.current.shape)}, {tuple(self.advantage.shape)}"
            )
        for name, policy in (("old", self.old), ("current", self.current)):
            if policy.dtype != torch.float64 or not bool(((policy.sum(-1) - 1.0).abs() < 1e-9).all()):
                raise SisShapeError(f"expected float64 probabilities that sum to 1 for {name}")

    @property
    def ratio(self) -> torch.Tensor:
        """Ratio w = pi / pi_old, ``[B, V]``."""
        return self.current / self.old

    @property
    def largest_k(self) -> int:
        """Number of columns that can be in V_K."""
        return self.old.shape[1] - self.lumped


@dataclass(frozen=True)
class Envelope:
    """The test of SIS at one K.

    Attributes:
        inside: bool ``[B, V]``, V_K: the K tokens with the highest pi_old.
        maximum: float64 ``[B, 1]``, M^ = max over V_K of w.
        acceptance: float64 ``[B, V]``, a(y).
        residual_mass: float64 ``[B]``, xi_K.
    """

    inside: torch.Tensor
    maximum: torch.Tensor
    acceptance: torch.Tensor
    residual_mass: torch.Tensor


def envelope(problem: Problem, k: int, *, outside_top_k: str = "reject") -> Envelope:
    """Envelope and acceptance probabilities (Proposition 2 of arXiv 2607.04728).

    Args:
        problem: Contexts.
        k: Size of V_K, at most ``problem.largest_k``.
        outside_top_k: ``reject`` tokens outside V_K (the paper), or test them against the ``envelope`` too.

    Raises:
        SisShapeError: If ``k`` lies outside ``[1, problem.largest_k]``.
    """
    if not 1 <= k <= problem.largest_k:
        raise SisShapeError(f"K must lie in [1, {problem.largest_k}], the tokens of the problem, got {k}")
    top = problem.old[:, : problem.largest_k].topk(k, dim=-1).indices
    inside = torch.zeros_like(problem.old, dtype=torch.bool).scatter_(1, top, True)
    maximum = torch.where(inside, problem.ratio, 0.0).max(dim=-1, keepdim=True).values
    acceptance = (problem.ratio / maximum).clamp(max=1.0)
    if outside_top_k == "reject":
        acceptance = torch.where(inside, acceptance, 0.0)
    residual = torch.where(inside, 0.0, problem.current).sum(-1)
    return Envelope(inside, maximum, acceptance, residual)


Moments = tuple[torch.Tensor, torch.Tensor]
"""E[c | y] and E[c^2 | y], each float64 ``[B, V]``."""


def _certain(coefficient: torch.Tensor) -> Moments:
    return coefficient, coefficient.square()


def uncorrected(problem: Problem) -> Moments:
    """No correction, c = 1: as if the samples were on-policy."""
    return _certain(torch.ones_like(problem.old))


def importance_sampling(problem: Problem) -> Moments:
    """Importance sampling, c = w."""
    return _certain(problem.ratio)


def clipped(problem: Problem) -> Moments:
    """PPO's clipped objective: c = w, but 0 where the clip is active for the sign of the advantage."""
    w = problem.ratio
    active = torch.where(problem.advantage >= 0, w > 1 + CLIP, w < 1 - CLIP)
    return _certain(torch.where(active, 0.0, w))


def truncated(problem: Problem) -> Moments:
    """TIS: c = min(w, bound)."""
    return _certain(problem.ratio.clamp(max=TIS_BOUND))


def cispo(problem: Problem) -> Moments:
    """CISPO with the upper side only: c = min(w, 1 + CLIP)."""
    return _certain(problem.ratio.clamp(max=1 + CLIP))


def icepop(problem: Problem) -> Moments:
    """IcePop: c = w inside a band of ratios, else 0."""
    low, high = ICEPOP_BAND
    w = problem.ratio
    return _certain(torch.where((w >= low) & (w <= high), w, 0.0))


def sis(k: int, *, estimator: str = "sampled", outside_top_k: str = "reject", on: str = "ratio") -> "Estimator":
    """SIS: c = z + (1 - z) c0, with z ~ Bernoulli(a) and c0 the coefficient of a base estimator.

    Args:
        k: K.
        estimator: ``sampled``, or ``expected``: c = a + (1 - a) c0.
        outside_top_k: Rule for tokens outside V_K.
        on: Base estimator: ``ratio`` (w), or ``clipped`` (PPO's).
    """
    base = {"ratio": importance_sampling, "clipped": clipped}[on]

    def moments(problem: Problem) -> Moments:
        a = envelope(problem, k, outside_top_k=outside_top_k).acceptance
        c0, square = base(problem)
        mean = a + (1 - a) * c0
        return (mean, mean.square()) if estimator == "expected" else (mean, a + (1 - a) * square)

    return moments


Estimator = Callable[[Problem], Moments]


@dataclass(frozen=True)
class Quality:
    """What an estimator of one context's gradient is worth; each float64 ``[B]``.

    Attributes:
        bias: ``|E[estimate] - target|``, Euclidean norm over the logits.
        variance: Trace of the covariance of one sample.
        target: Norm of the target.
    """

    bias: torch.Tensor
    variance: torch.Tensor
    target: torch.Tensor

    def mean_squared_error(self, samples: int) -> torch.Tensor:
        """Of the mean of ``samples`` independent samples: ``bias^2 + variance / samples``, float64 ``[B]``."""
        return self.bias.square() + self.variance / samples


def expected_gradient(problem: Problem, mean: torch.Tensor) -> torch.Tensor:
    """``E[c A grad log pi]`` over y ~ pi_old, ``[B, V]``, for ``E[c | y]``."""
    scaled = problem.old * mean * problem.advantage
    return scaled - problem.current * scaled.sum(-1, keepdim=True)


def target_gradient(problem: Problem) -> torch.Tensor:
    """``E_pi[A grad log pi]``, ``[B, V]``."""
    scaled = problem.current * problem.advantage
    return scaled - problem.current * scaled.sum(-1, keepdim=True)


def quality(problem: Problem, estimator: Estimator) -> Quality:
    """Bias and variance of an estimator, by enumeration.

    Args:
        problem: Contexts.
        estimator: Moments of its coefficient.
    """
    mean, square = estimator(problem)
    expected, target = expected_gradient(problem, mean), target_gradient(problem)
    # |onehot(y) - pi|^2 = 1 - 2 pi(y) + |pi|^2
    score = 1 - 2 * problem.current + problem.current.square().sum(-1, keepdim=True)
    second = (problem.old * square * problem.advantage.square() * score).sum(-1)
    return Quality(
        bias=(expected - target).norm(dim=-1),
        variance=second - expected.square().sum(-1),
        target=target.norm(dim=-1),
    )


def predicted_bias(problem: Problem, k: int) -> torch.Tensor:
    """Bias of SIS over w under the rule ``reject``, in closed form, as a vector ``[B, V]``.

    With ``E_K`` the part of an expectation over V_K: ``E[w~ g] - E_pi[g] = (E_K,pi[g] - E_K,pi[w g]) / M^``. At K = V
    this is the identity of the whole vocabulary; with xi_K > 0 tokens outside V_K keep w and add nothing.
    """
    found = envelope(problem, k)
    weight = torch.where(found.inside, problem.current * (1 - problem.ratio), 0.0) / found.maximum
    scaled = weight * problem.advantage
    return scaled - problem.current * scaled.sum(-1, keepdim=True)

"""SIS in float64 loops over plain lists, from the equations of arXiv 2607.04728 and of each base loss's own paper.

Nothing here looks at verl_sis. Policies are lists of probabilities over the vocabulary; ids index them.
"""

import math
from collections.abc import Sequence

Policy = Sequence[float]


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of a row of logits."""
    top = max(logits)
    powers = [math.exp(x - top) for x in logits]
    return [power / math.fsum(powers) for power in powers]


def ratios(pi: Policy, pi_old: Policy) -> list[float]:
    """w(v) = pi(v) / pi_old(v)."""
    return [new / old for new, old in zip(pi, pi_old, strict=True)]


def exact_envelope(pi: Policy, pi_old: Policy) -> float:
    """M = max of w over the whole vocabulary."""
    return max(ratios(pi, pi_old))


def top_k_ids(pi_old: Policy, k: int) -> list[int]:
    """V_K: the K ids of highest pi_old, by decreasing probability."""
    return sorted(range(len(pi_old)), key=lambda v: -pi_old[v])[:k]


def top_k_envelope(pi: Policy, pi_old: Policy, ids: Sequence[int]) -> float:
    """M^ = max of w over V_K."""
    w = ratios(pi, pi_old)
    return max(w[v] for v in ids)


def residual_mass(pi: Policy, ids: Sequence[int]) -> float:
    """xi_K = pi's mass outside V_K."""
    return math.fsum(p for v, p in enumerate(pi) if v not in set(ids))


def acceptance_probability(y: int, pi: Policy, pi_old: Policy, ids: Sequence[int]) -> float:
    """Acceptance a = w(y) / M^ if y in V_K, else 0."""
    return ratios(pi, pi_old)[y] / top_k_envelope(pi, pi_old, ids) if y in ids else 0.0


def accepted_token_law(pi: Policy, pi_old: Policy, ids: Sequence[int]) -> list[float]:
    """Law of y ~ pi_old given z = 1, by enumeration: pi_old(y) a(y), normalised."""
    joint = [pi_old[y] * acceptance_probability(y, pi, pi_old, ids) for y in range(len(pi))]
    return [weight / math.fsum(joint) for weight in joint]


def mean_acceptance(pi: Policy, pi_old: Policy, ids: Sequence[int]) -> float:
    """E[z] under y ~ pi_old, by enumeration."""
    return math.fsum(pi_old[y] * acceptance_probability(y, pi, pi_old, ids) for y in range(len(pi)))


def total_variation(p: Policy, q: Policy) -> float:
    """Half the L1 distance."""
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))


def sis_ratio(z: bool, w: float) -> float:
    """w~ = 1 if accepted, else w."""
    return 1.0 if z else w


def expectation_over_z(a: float, at_one: float, at_ratio: float) -> float:
    """E over z of a quantity that is ``at_one`` if accepted and ``at_ratio`` if rejected."""
    return a * at_one + (1.0 - a) * at_ratio


def theorem_1_distance(log_w: Sequence[float]) -> float:
    """D = sum over a response of |log w|."""
    return math.fsum(abs(x) for x in log_w)


def sis_distance(log_w: Sequence[float], z: Sequence[bool]) -> float:
    """D_SIS = sum over a response of (1 - z) |log w|."""
    return math.fsum(abs(x) for x, accepted in zip(log_w, z, strict=True) if not accepted)


def gspo_exponent(log_w: Sequence[float], z: Sequence[bool]) -> float:
    """Eq. 40: mean over the response of log w~; accepted tokens add 0 and still count in |y|."""
    return math.fsum(x for x, accepted in zip(log_w, z, strict=True) if not accepted) / len(log_w)


def clip(x: float, low: float, high: float) -> float:
    """x, limited to [low, high]."""
    return min(max(x, low), high)


def vanilla_token(log_w: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """PPO's clipped loss of one token with dual clip, and its derivative by log pi.

    L = max(-A w, -A clip(w)); for A < 0 it is at most -A c. d w / d log pi = w where the unclipped branch is active.
    """
    w = math.exp(log_w)
    unclipped, clipped = -advantage * w, -advantage * clip(w, 1 - low, 1 + high)
    loss, slope = (unclipped, -advantage * w) if unclipped >= clipped else (clipped, 0.0)
    if advantage < 0 and -advantage * dual < loss:
        return -advantage * dual, 0.0
    return loss, slope


def cispo_token(log_w: float, log_pi: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """CISPO (arXiv 2506.13585): -sg(clip(w)) A log pi, and its derivative by log pi."""
    weight = clip(math.exp(log_w), 1 - low, 1 + high)
    return -weight * advantage * log_pi, -weight * advantage


def gspo_token(exponent: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """GSPO (arXiv 2507.18071) at token level: s = exp(exponent), clipped; d s / d log pi of this token = s."""
    s = math.exp(exponent)
    unclipped, clipped = -advantage * s, -advantage * clip(s, 1 - low, 1 + high)
    return (unclipped, -advantage * s) if unclipped >= clipped else (clipped, 0.0)

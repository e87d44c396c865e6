"""Counter-based uniforms, the acceptance test, and the transformed old log-probabilities.

    a_t  = w_t / M^_t  if y_t in V_K, else 0         (acceptance probability)
    z_t  ~ Bernoulli(a_t)
    w~_t = 1 if z_t = 1 else w_t                     (SIS ratio)

``w~`` needs no loss of its own: with ``old_log_prob' = where(z, stop_gradient(log_prob), old_log_prob)`` any policy
loss that works on ``log_prob - old_log_prob`` sees log-ratio 0 in value and ``grad log pi`` in gradient for an accepted
token. Summed over a response this also gives GSPO's exponent (Eq. 40 of the paper).
"""

from typing import Literal, get_args

import torch

OutsideTopK = Literal["reject", "envelope"]
"""What happens to a sampled token outside V_K: ``reject`` it (the paper, Proposition 2), or test it against the
envelope all the same (the rule of the authors' released code, for comparison)."""

OUTSIDE_TOP_K: tuple[str, ...] = get_args(OutsideTopK)


def _signed(constant: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant: torch has no uint64 arithmetic."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


# SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): the increment, and the two
# multipliers of its finaliser. int64 multiplication wraps modulo 2^64 on every torch backend.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _logical_shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64(x: torch.Tensor) -> torch.Tensor:
    """The SplitMix64 finaliser: a bijection of 64-bit integers in which each input bit changes half the output bits.

    Args:
        x: int64 of any shape.

    Returns:
        int64 of the same shape.
    """
    x = (x ^ _logical_shift_right(x, 30)) * _MIX_1
    x = (x ^ _logical_shift_right(x, 27)) * _MIX_2
    return x ^ _logical_shift_right(x, 31)


def counter_uniforms(sample_key: torch.Tensor, position: torch.Tensor, *, seed: int, update: int) -> torch.Tensor:
    """Uniforms on [0, 1) as a pure function of (seed, update, sample, position).

    Construction: three rounds of "add an odd multiple, then ``mix64``", one for each of the counters,

        h0 = mix64(seed * G + G);  h1 = mix64(h0 + (update + 1) * G);  h2 = mix64(h1 ^ sample_key)
        h  = mix64(h2 + (position + 1) * G);  u = (h >> 40) * 2^-24

    with G the golden-ratio increment of SplitMix64: for a fixed (seed, update, sample) the positions walk one
    SplitMix64 stream. No state is kept, so any rank, layout, micro-batch size or re-run draws the same numbers. 24 bits
    are what float32 holds exactly: ``P(u < a) = a`` to within 2^-24.

    Args:
        sample_key: int64, any shape that broadcasts with ``position``; identifies the token sequence.
        position: int64, index of the token in its response.
        seed: Seed of the run.
        update: Number of optimizer updates before this one.

    Returns:
        float32 of the broadcast shape.
    """
    device = sample_key.device
    golden = torch.tensor(_GOLDEN, dtype=torch.int64, device=device)
    state = mix64((torch.tensor(seed, dtype=torch.int64, device=device) + 1) * golden)
    state = mix64(state + (update + 1) * golden)
    state = mix64(state ^ sample_key)
    state = mix64(state + (position + 1) * golden)
    return _logical_shift_right(state, 40).to(torch.float32) * 2.0**-24


def acceptance_log_prob(
    log_ratio: torch.Tensor,
    log_envelope: torch.Tensor,
    contains_sampled: torch.Tensor,
    *,
    outside_top_k: str = "reject",
) -> torch.Tensor:
    """Log a_t: ``min(log w - log M^, 0)`` for a token of V_K; outside V_K, -inf or the same test by ``outside_top_k``.

    Only the difference of the first two arguments matters: both may carry the same unknown normaliser.

    Args:
        log_ratio: log w of the sampled token, float32.
        log_envelope: log M^, float32; -inf (no usable entry) never accepts.
        contains_sampled: bool, y in V_K.
        outside_top_k: ``"reject"`` or ``"envelope"``.

    Returns:
        float32, at most 0. NaN inputs give -inf: a token with undefined ratio is never accepted.

    Raises:
        ValueError: If ``outside_top_k`` is neither of the two rules.
    """
    if outside_top_k not in OUTSIDE_TOP_K:
        raise ValueError(f"outside_top_k must be one of {OUTSIDE_TOP_K}, got {outside_top_k!r}")
    testable = torch.isfinite(log_ratio) & torch.isfinite(log_envelope)
    if outside_top_k == "reject":
        testable = testable & contains_sampled
    difference = torch.where(testable, log_ratio - log_envelope, -torch.inf)
    return difference.clamp(max=0.0)


def accept(acceptance_log_prob: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The acceptance test z = [u < a].

    Args:
        acceptance_log_prob: log a, float32.
        uniforms: u in [0, 1), float32, of the same shape.

    Returns:
        bool of the same shape. a = 1 always accepts, a = 0 never.
    """
    return uniforms < torch.exp(acceptance_log_prob)


def transformed_old_log_prob(
    accepted: torch.Tensor, log_prob: torch.Tensor, old_log_prob: torch.Tensor
) -> torch.Tensor:
    """``where(z, stop_gradient(log pi), log pi_old)``: what a base loss gets as its old log-probabilities.

    Args:
        accepted: bool ``[B, T]``.
        log_prob: log pi ``[B, T]``; its gradient is stopped here, and only here.
        old_log_prob: log pi_old ``[B, T]``.

    Returns:
        ``[B, T]`` in the dtype of ``old_log_prob`` promoted with that of ``log_prob``, without gradient.
    """
    return torch.where(accepted, log_prob.detach(), old_log_prob)

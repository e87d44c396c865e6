"""The acceptance test at several K at once: V_K are the first K entries of one sorted top-K.

For each K of a grid, with ``w(v) = pi(v) / pi_old(v)`` (arXiv 2607.04728):

    M^_K = max over the first K entries of w(v),   xi_K = 1 - sum over the first K entries of pi(v),
    a_K  = w(y) / M^_K if y is among the first K entries, else 0
"""

from dataclasses import dataclass

import torch

from verl_sis.core.envelope import FILTERED_LOG_PROB, TopK
from verl_sis.errors import SisShapeError

K_GRID = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Sizes of V_K that records speak of."""

OUTSIDE = -1
"""Rank of a sampled token that is not among the top-K entries."""


@dataclass(frozen=True)
class AcceptanceByK:
    """The acceptance test of each token at each K of a grid of C.

    Attributes:
        log_envelope: ``[N, C]`` float32, log M^_K; -inf where no entry is usable.
        residual_mass: ``[N, C]`` float32, xi_K in [0, 1].
        acceptance: ``[N, C]`` float32, a_K in [0, 1].
    """

    log_envelope: torch.Tensor
    residual_mass: torch.Tensor
    acceptance: torch.Tensor


def grid_up_to(top_k: int) -> tuple[int, ...]:
    """The sizes of ``K_GRID`` below ``top_k``, and ``top_k`` itself."""
    return (*(k for k in K_GRID if k < top_k), top_k)


def sampled_rank(top_k: TopK, sampled_ids: torch.Tensor) -> torch.Tensor:
    """Rank of the sampled token among the old policy's top-K, from 0.

    Args:
        top_k: Sorted by decreasing probability.
        sampled_ids: ``[N]`` ids of the sampled tokens.

    Returns:
        ``[N]`` int64; ``OUTSIDE`` where it is not among them, or was filtered.
    """
    matches = (top_k.ids == sampled_ids[:, None].to(top_k.ids.dtype)) & (top_k.log_prob > FILTERED_LOG_PROB)
    return torch.where(matches.any(dim=-1), matches.int().argmax(dim=-1), OUTSIDE)


@torch.no_grad()
def acceptance_by_k(
    ks: tuple[int, ...],
    top_k: TopK,
    rank: torch.Tensor,
    current_log_prob: torch.Tensor,
    current_sampled_log_prob: torch.Tensor,
) -> AcceptanceByK:
    """Envelope, residual mass and acceptance probability at each K.

    Args:
        ks: Increasing, none above the number of entries.
        top_k: Top-K of the old policy, sorted by decreasing probability; filtered entries are not in any V_K.
        rank: ``[N]``, as ``sampled_rank`` returns it.
        current_log_prob: ``[N, K]`` log pi of the current policy at ``top_k.ids``.
        current_sampled_log_prob: ``[N]`` log pi of the sampled tokens, from the same normaliser.

    Returns:
        The test at each K; sums are taken in float64.

    Raises:
        SisShapeError: If ``ks`` do not fit the entries.
    """
    entries = top_k.ids.shape[1]
    if list(ks) != sorted(set(ks)) or not ks or ks[0] < 1 or ks[-1] > entries:
        raise SisShapeError(f"expected increasing ks in [1, {entries}], found {ks}")
    usable = top_k.log_prob > FILTERED_LOG_PROB
    log_ratio = torch.where(usable, current_log_prob.double() - top_k.log_prob.double(), -torch.inf)
    mass = torch.exp(torch.where(usable, current_log_prob.double(), -torch.inf)).cumsum(dim=-1)
    columns = torch.tensor(ks, device=rank.device) - 1
    log_envelope = log_ratio.cummax(dim=-1).values[:, columns]
    log_w = (current_sampled_log_prob.double() - top_k.sampled_log_prob.double())[:, None]
    inside = (rank[:, None] >= 0) & (rank[:, None] <= columns)
    testable = inside & torch.isfinite(log_w) & torch.isfinite(log_envelope)
    log_acceptance = torch.where(testable, log_w - log_envelope, -torch.inf).clamp(max=0.0)
    return AcceptanceByK(
        log_envelope=log_envelope.float(),
        residual_mass=(1.0 - mass[:, columns]).clamp(min=0.0).float(),
        acceptance=torch.exp(log_acceptance).float(),
    )

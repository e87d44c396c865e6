"""Top-K of the old policy, and envelope, membership and residual mass of the current policy.

Equations are those of arXiv 2607.04728. With ``w(v) = pi(v|s) / pi_old(v|s)`` and ``V_K`` the K tokens of highest
``pi_old(.|s)``:

    M^   = max over v in V_K of w(v)              (top-K envelope)
    xi_K = sum over v not in V_K of pi(v|s)       (residual mass)

Nothing here keeps an autograd graph: every function that reads logits runs under ``torch.no_grad``.
"""

from dataclasses import dataclass

import torch

from verl_sis.errors import SisShapeError

FILTERED_LOG_PROB = -1e30
"""Log-probabilities at or below this value mark entries that the sampler removed (some engines write -inf, some a
large negative number). They carry no mass, and a ratio against them means nothing."""

_BLOCKS = 8
"""Number of logits in a block of the top-K tournament."""

_DIRECT_SIZE = 512
"""Up to this many logits a row goes to ``torch.topk`` as it is."""

_CACHED_ELEMENTS = 1 << 18
"""Float32 numbers that a CPU core works on at a time: 1 MB stays in its cache."""

_SAFE_SUM = (1e-20, 1e38)
"""A sum of exponentials in this range lost nothing to overflow, and below 1e-12 of itself to underflow."""


@dataclass(frozen=True)
class TopK:
    """Top-K of the old policy at each token.

    Attributes:
        ids: ``[N, K]`` int32, token ids in order of decreasing probability.
        log_prob: ``[N, K]`` float32, log pi_old of ``ids``.
        sampled_log_prob: ``[N]`` float32, log pi_old of the sampled token, from the same normaliser.
        contains_sampled: ``[N]`` bool, whether the sampled token is among ``ids`` (y in V_K).
    """

    ids: torch.Tensor
    log_prob: torch.Tensor
    sampled_log_prob: torch.Tensor
    contains_sampled: torch.Tensor


@dataclass(frozen=True)
class EnvelopeTerms:
    """What one look at the current logits gives, before they are normalised.

    With ``x`` the current temperature-scaled logits and ``Z`` their log-sum-exp, ``log pi(v) = x_v - Z``. Everything
    that decides acceptance is independent of ``Z``, so it is kept apart (see ``normalize_envelope``).

    Attributes:
        log_envelope: ``[N]`` float32, ``max over V_K of (x_v - log pi_old(v))``, i.e. ``log M^ + Z``; -inf when no
            entry of V_K is usable.
        log_mass: ``[N]`` float32, ``logsumexp over V_K of x_v``, i.e. ``log(1 - xi_K) + Z``.
        sampled_logit: ``[N]`` float32, ``x_y`` of the sampled token.
    """

    log_envelope: torch.Tensor
    log_mass: torch.Tensor
    sampled_logit: torch.Tensor

    @property
    def log_expected_acceptance(self) -> torch.Tensor:
        """``[N]`` float32, ``log((1 - xi_K) / M^)``, which is log E[z] for y ~ pi_old; the normaliser cancels."""
        return self.log_mass - self.log_envelope


@torch.no_grad()
def log_normalizer(logits: torch.Tensor, rows: torch.Tensor | None = None, *, chunk_tokens: int) -> torch.Tensor:
    """Log-sum-exp over the vocabulary in float32.

    Args:
        logits: ``[N, V]`` temperature-scaled logits, any floating dtype.
        rows: ``[R]`` rows of ``logits`` to sum over; all in order if None.
        chunk_tokens: Rows converted to float32 at a time; the extra memory is ``chunk_tokens * V * 4`` bytes, and as
            much again in the dtype of the logits where ``rows`` picks some.

    Returns:
        ``[R]`` float32.
    """
    _require(logits.ndim == 2, f"logits must be [N, V], got {tuple(logits.shape)}")
    vocab_size = logits.shape[1]
    count = logits.shape[0] if rows is None else len(rows)
    if count == 0:
        return logits.new_zeros(0, dtype=torch.float32)
    step = min(chunk_tokens, count)
    if logits.device.type == "cpu":
        step = min(step, max(1, torch.get_num_threads() * _CACHED_ELEMENTS // vocab_size))
    buffer = logits.new_empty((step, vocab_size), dtype=torch.float32)
    total = logits.new_empty(count, dtype=torch.float32)
    for start in range(0, count, step):
        block = logits[start : start + step] if rows is None else logits[rows[start : start + step]]
        total[start : start + step] = buffer[: len(block)].copy_(block).exp_().sum(dim=-1)
    del buffer
    # Without the usual subtraction of the maximum, which costs two passes and few rows need: those take the long way.
    extreme = ~((total > _SAFE_SUM[0]) & (total < _SAFE_SUM[1]))
    result = total.log_()
    for index in extreme.nonzero().squeeze(1).split(max(1, step // 3)):
        result[index] = torch.logsumexp(logits[index if rows is None else rows[index]].float(), dim=-1)
    return result


@torch.no_grad()
def top_k_logits(logits: torch.Tensor, k: int, *, chunk_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The K largest logits of each row and their token ids.

    For K far below V this is an exact tournament: the vocabulary is cut into strided blocks, one vectorised pass finds
    each block's largest logit, and the K blocks of largest maximum, found in the same way, contain the K largest
    logits. For larger K it is ``torch.topk``.

    Args:
        logits: ``[N, V]``, any floating dtype.
        k: ``1 <= k <= V``.
        chunk_tokens: Rows worked on at a time; bounds the extra memory.

    Returns:
        ``(values [N, K] float32, ids [N, K] int32)``, by decreasing value.

    Raises:
        SisShapeError: If ``logits`` is not two-dimensional or ``k`` lies outside ``[1, V]``.
    """
    _require(logits.ndim == 2, f"logits must be [N, V], got {tuple(logits.shape)}")
    vocab_size = logits.shape[1]
    _require(1 <= k <= vocab_size, f"top-K must lie in [1, {vocab_size}], got {k}")
    values = logits.new_empty((logits.shape[0], k), dtype=torch.float32)
    ids = logits.new_empty((logits.shape[0], k), dtype=torch.int32)
    for start in range(0, logits.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        values[rows], ids[rows] = _top_k(logits[rows], k, ordered=True)
    return values, ids


def _top_k(logits: torch.Tensor, k: int, *, ordered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = logits.shape
    if size <= max(_DIRECT_SIZE, 2 * k * _BLOCKS):
        return logits.topk(k, dim=-1, sorted=ordered)
    stride = size // _BLOCKS
    blocked = logits[:, : stride * _BLOCKS].view(rows, _BLOCKS, stride)
    # Element (b, s) of a row is vocabulary id b * stride + s; block s collects the ids that share s.
    block_ids = _top_k(blocked.amax(dim=1), k, ordered=False)[1]
    candidate_ids = block_ids[:, None, :] + stride * torch.arange(_BLOCKS, device=logits.device)[None, :, None]
    # The ids past the last full block are always candidates.
    tail_ids = torch.arange(stride * _BLOCKS, size, device=logits.device).expand(rows, -1)
    candidate_ids = torch.cat([candidate_ids.reshape(rows, -1), tail_ids], dim=1)
    values, positions = logits.gather(1, candidate_ids).topk(k, dim=-1, sorted=ordered)
    return values, candidate_ids.gather(1, positions)


@torch.no_grad()
def select_top_k(
    logits: torch.Tensor,
    sampled_ids: torch.Tensor,
    k: int,
    *,
    chunk_tokens: int,
    sampled_log_prob: torch.Tensor | None = None,
) -> TopK:
    """Top-K of the old policy and the sampled token's own log-probability, from one normaliser.

    Args:
        logits: ``[N, V]`` temperature-scaled logits of the old policy, any floating dtype.
        sampled_ids: ``[N]`` ids of the sampled tokens.
        k: Size of the set; K = V gives the exact envelope of Proposition 1.
        chunk_tokens: Rows worked on at a time.
        sampled_log_prob: ``[N]`` log pi_old of the sampled tokens if the caller has it already, which saves the
            pass over the vocabulary. The normaliser is then ``x_y - sampled_log_prob``, so that the ratio of a sampled
            token and the envelope still share it.

    Returns:
        The top-K of each token.

    Raises:
        SisShapeError: If shapes do not fit or ``k`` lies outside ``[1, V]``.
    """
    _require(sampled_ids.shape == logits.shape[:1], f"sampled_ids must be {logits.shape[:1]}, got {sampled_ids.shape}")
    values, ids = top_k_logits(logits, k, chunk_tokens=chunk_tokens)
    sampled_logit = gather_logits(logits, sampled_ids)
    if sampled_log_prob is None:
        sampled_log_prob = sampled_logit - log_normalizer(logits, chunk_tokens=chunk_tokens)
    return top_k_from_logits(values, ids, sampled_logit, sampled_ids, sampled_log_prob)


def top_k_from_logits(
    values: torch.Tensor,
    ids: torch.Tensor,
    sampled_logit: torch.Tensor,
    sampled_ids: torch.Tensor,
    sampled_log_prob: torch.Tensor,
) -> TopK:
    """Normalise top-K logits with the sampled token's logit and log-probability.

    ``log pi_old(v) = x_v - x_y + log pi_old(y)``: an error of ``log pi_old(y)``, e.g. from a bfloat16 kernel, is then
    common to all entries of a token and cancels in the acceptance probability ``w(y) / M^``.

    Args:
        values: ``[N, K]`` float32 logits of ``ids``.
        ids: ``[N, K]`` int32 token ids.
        sampled_logit: ``[N]`` float32 logit of the sampled token.
        sampled_ids: ``[N]`` ids of the sampled tokens.
        sampled_log_prob: ``[N]`` log pi_old of the sampled tokens.

    Returns:
        The top-K of each token.
    """
    sampled_log_prob = sampled_log_prob.float()
    matches = ids == sampled_ids[:, None].to(ids.dtype)
    log_prob = values + (sampled_log_prob - sampled_logit)[:, None]
    # Written out so that the sampled token's entry is bit-equal to its own log-prob, whatever the rounding above.
    log_prob = torch.where(matches, sampled_log_prob[:, None], log_prob)
    contains_sampled = (matches & (log_prob > FILTERED_LOG_PROB)).any(dim=-1)
    return TopK(ids=ids, log_prob=log_prob, sampled_log_prob=sampled_log_prob, contains_sampled=contains_sampled)


@torch.no_grad()
def gather_logits(logits: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Logits at given ids, in float32.

    Args:
        logits: ``[N, V]``, any floating dtype.
        ids: ``[R]`` or ``[R, K]`` integer ids.
        rows: ``[R]`` row of ``logits`` for each entry of ``ids``; all rows in order if None.

    Returns:
        float32 of the shape of ``ids``.
    """
    if rows is None:
        rows = torch.arange(logits.shape[0], device=logits.device)
    index = rows if ids.ndim == 1 else rows[:, None]
    return logits[index, ids.long()].float()


@torch.no_grad()
def envelope_terms(
    logits: torch.Tensor, top_k: TopK, sampled_ids: torch.Tensor, rows: torch.Tensor | None = None
) -> EnvelopeTerms:
    """Envelope and top-K mass of the current policy at the old policy's top-K, without a pass over the vocabulary.

    Args:
        logits: ``[N, V]`` temperature-scaled logits of the current policy, any floating dtype.
        top_k: Top-K of the old policy at ``R`` tokens.
        sampled_ids: ``[R]`` ids of the sampled tokens.
        rows: ``[R]`` row of ``logits`` that predicts each of the tokens; all rows in order if None.

    Returns:
        The unnormalised terms, ``[R]`` each.
    """
    current = gather_logits(logits, top_k.ids, rows)
    # Entries that the sampler filtered out would give M^ = +inf and reject everything; they are not in V_K.
    usable = top_k.log_prob > FILTERED_LOG_PROB
    log_ratio = torch.where(usable, current - top_k.log_prob, -torch.inf)
    return EnvelopeTerms(
        log_envelope=log_ratio.amax(dim=-1),
        log_mass=torch.logsumexp(torch.where(usable, current, -torch.inf), dim=-1),
        sampled_logit=gather_logits(logits, sampled_ids, rows),
    )


@dataclass(frozen=True)
class Envelope:
    """Envelope of the current policy over the old policy's top-K.

    Attributes:
        log_envelope: log M^, float32.
        residual_mass: xi_K in [0, 1], float32.
    """

    log_envelope: torch.Tensor
    residual_mass: torch.Tensor


def normalize_envelope(terms: EnvelopeTerms, log_normalizer: torch.Tensor) -> Envelope:
    """Turn unnormalised terms into log M^ and xi_K.

    Args:
        terms: As returned by ``envelope_terms``.
        log_normalizer: log-sum-exp of the current logits, of the terms' shape.

    Returns:
        ``log M^ = log_envelope - Z`` and ``xi_K = 1 - exp(log_mass - Z)``. The latter is a difference of float32
        numbers near 1: it is exact to about 1e-7 and floored at 0. NaN stays NaN.
    """
    mass = torch.exp(terms.log_mass - log_normalizer)
    return Envelope(
        log_envelope=terms.log_envelope - log_normalizer,
        residual_mass=(1.0 - mass).clamp(min=0.0),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise SisShapeError(message)

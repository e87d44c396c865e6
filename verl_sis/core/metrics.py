"""From pooled statistics to the numbers that a run logs. Each entry names its denominator.

Names avoid the substrings by which verl picks a reduction (max, min, sum, total), except where the maximum is meant.
"""

import math

import numpy as np

from verl_sis.core.statistics import HISTOGRAM_EDGES, MISMATCH_TAUS, PooledStatistics


def sis_metrics(pooled: PooledStatistics) -> dict[str, float]:
    """Acceptance metrics, prefix ``sis/``.

    Args:
        pooled: Statistics of all tokens to report on.

    Returns:
        ``sis/active`` (1), ``sis/tokens`` (count), ``sis/non_finite`` (count), and

        * per token: ``accept_rate`` mean z, ``accept_rate_expected`` mean (1 - xi) / M^, ``in_topk_rate``,
          ``log_ratio_abs`` mean |log w|;
        * per token of known normaliser, ``residual_mass/tokens`` of them: ``residual_mass/{mean,p95,max}``,
          ``envelope/{mean,max}``;
        * ``kappa`` = accept_rate / accept_rate_expected, which is 1 up to sampling noise if y ~ pi_old, tokens outside
          V_K are rejected, and the samples have not themselves moved the current policy (the first epoch); and
          ``kappa_se``, its standard error under that hypothesis from random groups of sequences. With n sequences
          ``|kappa - 1| / kappa_se`` cannot exceed ``sqrt(min(n, 64))``: judge it over many sequences;
        * per response: ``D`` mean over responses of sum |log w|, ``D_sis`` the same over rejected tokens;
        * ``ess/{before,after}``: (sum w)^2 / (n sum w^2) of w and of w~, a fraction of n tokens.

        Rates over no token are NaN.
    """
    s = pooled.sums
    tokens, responses, normalized = s["tokens"], s["responses"], s["normalized_tokens"]
    expected = s["accept_expected"]
    return {
        "sis/active": 1.0,
        "sis/tokens": tokens,
        "sis/non_finite": s["non_finite"],
        "sis/accept_rate": _ratio(s["accepted"], tokens),
        "sis/accept_rate_expected": _ratio(expected, tokens),
        "sis/kappa": _ratio(s["accepted"], expected),
        "sis/kappa_se": _ratio(math.sqrt(float(np.square(pooled.kappa_groups).sum())), expected),
        "sis/in_topk_rate": _ratio(s["in_top_k"], tokens),
        "sis/residual_mass/tokens": normalized,
        "sis/residual_mass/mean": _ratio(s["residual_mass"], normalized),
        "sis/residual_mass/p95": histogram_quantile(pooled.histograms["residual_mass"], 0.95),
        "sis/residual_mass/max": _finite_or_nan(pooled.maxima["residual_mass"]),
        "sis/envelope/mean": _ratio(s["envelope"], normalized),
        "sis/envelope/max": _finite_or_nan(pooled.maxima["envelope"]),
        "sis/log_ratio_abs": _ratio(s["log_ratio_abs"], tokens),
        "sis/D": _ratio(s["log_ratio_abs"], responses),
        "sis/D_sis": _ratio(s["log_ratio_abs_rejected"], responses),
        "sis/ess/before": _effective_share(s["ratio"], s["ratio_squared"], tokens),
        "sis/ess/after": _effective_share(s["sis_ratio"], s["sis_ratio_squared"], tokens),
    }


def mismatch_metrics(pooled: PooledStatistics, prefix: str = "mismatch") -> dict[str, float]:
    """Train-inference mismatch metrics, prefix ``mismatch/``, per token.

    Args:
        pooled: Statistics of all tokens to report on.
        prefix: Of the names.

    Returns:
        ``mismatch/tokens`` and ``mismatch/non_finite`` (counts), ``mismatch/k1``, ``mismatch/k3``,
        ``mismatch/abs_log_ratio/{mean,p99,max}``, ``mismatch/F_tau{1.05,2,5}`` and ``mismatch/pearson`` (of the
        probabilities). Over no token all but the counts are NaN.
    """
    s = pooled.sums
    tokens = s["mismatch_tokens"]
    values = {
        "mismatch/tokens": tokens,
        "mismatch/non_finite": s["mismatch_non_finite"],
        "mismatch/k1": _ratio(s["mismatch_k1"], tokens),
        "mismatch/k3": _ratio(s["mismatch_k3"], tokens),
        "mismatch/abs_log_ratio/mean": _ratio(s["mismatch_abs"], tokens),
        "mismatch/abs_log_ratio/p99": histogram_quantile(pooled.histograms["mismatch_abs"], 0.99),
        "mismatch/abs_log_ratio/max": _finite_or_nan(pooled.maxima["mismatch_abs"]),
        **{f"mismatch/F_tau{tau:g}": _ratio(s[f"mismatch_outside_{tau:g}"], tokens) for tau in MISMATCH_TAUS},
        "mismatch/pearson": pooled.probabilities.correlation(),
    }
    return {name.replace("mismatch", prefix, 1): value for name, value in values.items()}


def histogram_quantile(counts: np.ndarray, quantile: float) -> float:
    """Upper edge of the bin that holds the quantile: at most one bin width (4.7 %) above the exact value.

    Args:
        counts: Counts of ``HISTOGRAM_EDGES``, with one bin below and one above them.
        quantile: In (0, 1).

    Returns:
        The edge; 0 if the quantile lies below the first edge, inf if above the last, NaN for no counts.
    """
    total = int(counts.sum())
    if total == 0:
        return math.nan
    position = int(np.searchsorted(np.cumsum(counts), math.ceil(quantile * total)))
    if position == 0:
        return 0.0
    return float(HISTOGRAM_EDGES[position]) if position < len(HISTOGRAM_EDGES) else math.inf


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _effective_share(weight_sum: float, square_sum: float, tokens: float) -> float:
    """``(sum w)^2 / (n sum w^2)``, in an order that cannot overflow; NaN once a sum has left float64 (log w > 354)."""
    if not (math.isfinite(weight_sum) and math.isfinite(square_sum)):
        return math.nan
    return _ratio(weight_sum, tokens) * _ratio(weight_sum, square_sum)


def _finite_or_nan(value: float) -> float:
    return value if math.isfinite(value) else math.nan

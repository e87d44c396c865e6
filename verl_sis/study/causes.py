"""Causes of a mismatch that the numbers of a study show. Each leaves a trace of its own.

* temperature: the engine's log-probs are the trainer's times a constant. The regression through the top-K of every
  token has a slope other than 1, and that slope alone removes most of their difference.
* a filtering sampler: entries of the engine's top-K have no probability.
* a sampler that does not draw from the log-probs it reports: tokens are among the first K entries more or less often
  than those entries' probability says.
* routes of other tokens or layers: engine and trainer choose other experts at most tokens of a layer.
* other weights: the engine is further from a float32 trainer than the trainer's own rounding is, by an order of
  magnitude, and none of the above explains it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verl_sis.study.bootstrap import Estimate, Totals
from verl_sis.study.summary import Summary

Level = Literal["fault", "note", "good"]

SLOPE_TOLERANCE = 0.01
"""Distance of the slope from 1 that is called another temperature."""

SLOPE_SHARE = 0.5
"""Least share of the squared differences of log-probs that the slope must remove."""

CALIBRATION_SE = 4.0
"""Standard errors between hits and probability that are called a wrong sampler."""

OTHER_WEIGHTS_FACTOR = 10.0
"""Ratio of the engine's k3 to that of the trainer's rounding that is called other weights."""

ROUNDING_FLOOR = 1e-7
"""k3 that float32 arithmetic itself can show: with float32 engines the trainer's own rounding is 0."""

ROUTES_DISAGREE = 0.5
"""Share of tokens with another expert set in a layer that no rounding explains."""


@dataclass(frozen=True)
class Finding:
    """One sentence of a verdict.

    Attributes:
        name: Of the rule, for machines.
        level: ``fault`` for something to mend, ``note`` for something to know, ``good`` for what is as it should be.
        text: The sentence.
    """

    name: str
    level: Level
    text: str


def temperature(summary: Summary) -> tuple[Estimate, float] | None:
    """Temperature of the engine relative to the trainer's, and the share of squared differences that it explains.

    With x and y the trainer's and the engine's log-probs of the engine's top-K, each less its mean, ``y = x / T``. Both
    carry rounding, so T is the reduced-major-axis slope ``sqrt(sum x x / sum y y)``: either regression would be
    attenuated by the noise of its regressor.

    Args:
        summary: Of the study.

    Returns:
        None where the study lacks the moments (schema 1, training).
    """
    if "moments.product" not in summary.bootstrap:
        return None
    estimate = summary.bootstrap.estimate(lambda t: np.sqrt(t["moments.trainer"] / t["moments.engine"]))

    def explained(t: Totals) -> np.ndarray:
        before = t["moments.engine"] - 2 * t["moments.product"] + t["moments.trainer"]
        after = t["moments.engine"] - t["moments.product"] ** 2 / t["moments.trainer"]
        return 1.0 - after / before

    return estimate, summary.bootstrap.estimate(explained).value


def wrong_temperature(summary: Summary) -> bool:
    """Whether the engine's temperature is another one than the trainer's."""
    found = temperature(summary)
    if found is None or not math.isfinite(found[0].value):
        return False
    return abs(found[0].value - 1.0) > SLOPE_TOLERANCE and found[1] > SLOPE_SHARE


def temperature_finding(summary: Summary) -> Iterator[Finding]:
    """Whether both sides use one temperature."""
    found = temperature(summary)
    if found is None:
        return
    estimate, explained = found
    if wrong_temperature(summary):
        yield Finding(
            "temperature",
            "fault",
            f"The rollout engine samples at another temperature: {estimate:.3f} times the trainer's. That alone "
            f"explains {explained:.0%} of the squared differences of log-probs. Set both sides to one temperature.",
        )
    else:
        yield Finding("temperature", "good", f"No sign of two temperatures (engine / trainer {estimate:.4f}).")


def filter_finding(summary: Summary) -> Iterator[Finding]:
    """Whether the sampler filters, and how."""
    tokens = summary.bootstrap.total("filtered.tokens")
    if not tokens:
        return
    share = summary.bootstrap.ratio("filtered.tokens", "tokens")
    usable, kept = summary.pool.smallest.get("usable", 0.0), summary.pool.smallest.get("kept_mass", math.nan)
    constant = usable == summary.pool.largest.get("usable")
    guess = (
        f"It keeps {usable:.0f} entries of every token: a top-k filter."
        if constant and tokens > 1
        else f"It keeps at least {kept:.3f} of the trainer's probability: a top-p filter of about that value, or min-p."
    )
    yield Finding(
        "filter",
        "fault",
        f"The sampler filters: it removed entries of the engine's top-{summary.pool.layout.ks[-1]} at {share:.1%} of "
        f"tokens. {guess} Ratios are then off by the removed mass; sample with top_p=1, top_k=-1, min_p=0.",
    )


def calibration_finding(summary: Summary) -> Iterator[Finding]:
    """Whether tokens were drawn from the log-probs that the engine reports."""
    worst, worst_k = 0.0, 0
    for k in summary.pool.layout.ks:
        variance = summary.bootstrap.total(f"calibration.variance@{k}")
        if variance < 1.0:  # fewer than about one token is expected outside: nothing to tell
            continue
        excess = summary.bootstrap.total(f"calibration.hits@{k}") - summary.bootstrap.total(f"calibration.mass@{k}")
        if abs(excess) > abs(worst) * math.sqrt(variance):
            worst, worst_k = excess / math.sqrt(variance), k
    if abs(worst) > CALIBRATION_SE:
        seldom = "more often" if worst > 0 else "less often"
        yield Finding(
            "calibration",
            "fault",
            f"Tokens were not drawn from the log-probs that the engine reports: they are among its first {worst_k} "
            f"entries {seldom} than those entries' probability says, by {abs(worst):.0f} standard errors. Look for a "
            "filter or a penalty that the log-probs leave out, or log-probs taken before temperature.",
        )


def routes_finding(summary: Summary) -> Iterator[Finding]:
    """Whether the routes of some layers belong to other tokens."""
    layers = summary.pool.layout.layers if summary.pool.layout.routed else ()
    rates = {layer: summary.bootstrap.ratio(f"routes.differs@{layer}", "tokens").value for layer in layers}
    wrong = [layer for layer, rate in rates.items() if rate > ROUTES_DISAGREE]
    if not wrong:
        return
    which = "all layers" if len(wrong) == len(rates) else f"decoder layer{'s' * (len(wrong) > 1)} {_listed(wrong)}"
    shown = _listed([f"{rates[layer]:.0%}" for layer in wrong[:8]])
    cause = "rows shifted against tokens" if len(wrong) == len(rates) else "an off-by-one of layers, or another capture"
    yield Finding(
        "routes",
        "fault",
        f"The routes of {which} do not belong to these tokens: engine and trainer choose other experts at {shown} of "
        f"them, where rounding changes a few percent. Suspect {cause}; replaying them trains another network.",
    )


def wrong_routes(summary: Summary) -> bool:
    """Whether the engine's routes belong to other tokens or layers."""
    return any(True for _ in routes_finding(summary))


def sampled_otherwise(summary: Summary) -> bool:
    """Whether the engine's log-probs are those of another temperature or of a filtered distribution."""
    return wrong_temperature(summary) or any(True for _ in filter_finding(summary))


def other_weights_finding(summary: Summary) -> Iterator[Finding]:
    """Whether the two engines hold the same weights."""
    engine = summary.comparison("engine_rounding", "k3")
    trainer = summary.comparison("trainer_rounding", "k3")
    if engine is None or trainer is None or sampled_otherwise(summary):
        return
    scale = max(trainer.value, ROUNDING_FLOOR)
    if engine.value > OTHER_WEIGHTS_FACTOR * scale:
        yield Finding(
            "other_weights",
            "fault",
            f"The engine holds other weights than the trainer, or computes another model: its k3 against a float32 "
            f"trainer is {engine:.2g}, {engine.value / scale:.0f} times that of the trainer's own rounding "
            f"({trainer.value:.2g}), and neither temperature nor filters explain it. Suspect a stale checkpoint, a "
            "weight sync that failed in part, or quantised weights.",
        )


def _listed(values: list[Any]) -> str:
    return ", ".join(str(value) for value in values)

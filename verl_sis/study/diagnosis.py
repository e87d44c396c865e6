"""What a study says, in sentences: faults first, then what the mismatch consists of and what SIS would make of it."""

import math
from collections.abc import Callable, Iterator

from verl_sis.study.causes import (
    Finding,
    calibration_finding,
    filter_finding,
    other_weights_finding,
    routes_finding,
    sampled_otherwise,
    temperature_finding,
    wrong_routes,
)
from verl_sis.study.summary import Summary

KAPPA_SE = 4.0
"""Standard errors of kappa from 1 that are put down to chance; a report is read for many K and studies."""

KAPPA_FAULT = 0.05
"""Distance of kappa from 1 that is a fault and no mere note, beyond chance."""

REPLAY_HARMS = 2.0
"""Ratio of k3 with R3 to k3 without, beyond both intervals, that is a fault and no mere note."""

KAPPA_ROUNDING = 1e-5
"""Standard error below which the float error of the expected rate decides."""


def diagnose(summary: Summary) -> list[Finding]:
    """All findings about a study, faults first.

    Args:
        summary: Of the study.
    """
    rules: tuple[Callable[[Summary], Iterator[Finding]], ...] = (
        _non_finite,
        temperature_finding,
        filter_finding,
        calibration_finding,
        routes_finding,
        other_weights_finding,
        _need,
        _floor,
        _replay,
        _rounding,
        _staleness,
        _kappa,
        _certificate,
        _acceptance,
    )
    findings = [finding for rule in rules for finding in rule(summary)]
    order = {"fault": 0, "note": 1, "good": 1}
    return sorted(findings, key=lambda finding: order[finding.level])


def _non_finite(summary: Summary) -> Iterator[Finding]:
    for c in summary.pool.layout.comparisons:
        count = summary.bootstrap.total(f"{c.name}.non_finite")
        if count:
            yield Finding(
                "non_finite",
                "fault",
                f"{count:.0f} tokens have an undefined log-prob in {c.reference} or {c.other}. They are left out of "
                "every number that needs it.",
            )


def _floor(summary: Summary) -> Iterator[Finding]:
    accepted, k3 = summary.pair("floor", "accepted"), summary.comparison("floor", "k3")
    engine = summary.comparison("engine", "k3")
    if accepted is None or k3 is None or engine is None:
        return
    # R3 can get below this floor: it fixes routes, which two native passes choose anew.
    routed = ", each with its own routes," if summary.pool.layout.routed else ""
    share = f" That is {k3.value / engine.value:.0%} of the engine's k3 ({engine:.2g})." if engine.value else ""
    yield Finding(
        "floor",
        "note",
        f"Noise floor: two passes of the trainer over the same weights{routed} differ by k3 {k3:.2g}.{share} SIS at "
        f"K = {summary.headline_k} would accept {accepted:.4f} of tokens between them.",
    )


def _replay(summary: Summary) -> Iterator[Finding]:
    explained, engine = summary.explained_by_routing(), summary.comparison("engine", "k3")
    replay = summary.comparison("replay", "k3")
    if explained is None or engine is None or replay is None or not summary.pool.layout.routed:
        return
    differing = summary.bootstrap.ratio("routes.any", "tokens")
    carried = summary.bootstrap.estimate(lambda t: t["routes.engine_k3"] / t["engine.k3"])
    if wrong_routes(summary) or explained.value < 0:
        yield Finding(
            "replay",
            "fault" if wrong_routes(summary) or replay.low > REPLAY_HARMS * engine.high else "note",
            f"Replaying the engine's routes does not help here: k3 {engine:.2g} without, {replay:.2g} with R3.",
        )
        return
    sizes = f"k3 {engine:.2g} without, {replay:.2g} with R3"
    shares = (
        f"Expert sets differ in some layer at {differing.value:.1%} of tokens, which carry {carried.value:.0%} of k3."
    )
    if not explained.low > 0:
        text = f"Routing explains {explained:.0%} of the engine's k3, which cannot be told from nothing: {sizes}."
        yield Finding("replay", "note", f"{text} {shares}")
    else:
        text = f"Routing explains {explained:.0%} of the engine's k3, and R3 removes that: {sizes}."
        yield Finding("replay", "good", f"{text} {shares}")


def _rounding(summary: Summary) -> Iterator[Finding]:
    trainer, engine = summary.comparison("trainer_rounding", "k3"), summary.comparison("engine_rounding", "k3")
    if trainer is None or engine is None or trainer.value + engine.value == 0.0:
        return
    if sampled_otherwise(summary) or any(True for _ in other_weights_finding(summary)):
        return  # then the engine's distance is not one of rounding
    alike = trainer.low <= engine.high and engine.low <= trainer.high
    larger = "trainer" if trainer.value > engine.value else "engine"
    judged = "their intervals overlap" if alike else f"the {larger} is the less exact of the two"
    yield Finding(
        "rounding",
        "note",
        f"Against the trainer in float32, the trainer's own dtype costs k3 {trainer:.2g} and the engine's "
        f"{engine:.2g}: {judged}.",
    )


def _need(summary: Summary) -> Iterator[Finding]:
    """Theorem 1 of arXiv 2607.04728 bounds what off-policy tokens do to the gradient by ``exp(D) - 1``."""
    pair = "engine" if "engine" in summary.pool.layout.pairs else "update"
    before, after = (summary.divergence(pair, under_sis=under_sis) for under_sis in (False, True))
    if before is None or after is None:
        return
    replay = summary.divergence("replay", under_sis=False)
    with_r3 = f", with R3 {_bound(replay.value)}" if replay and not wrong_routes(summary) else ""
    yield Finding(
        "need",
        "note",
        f"Do you need a correction? Over a response |log w| adds up to D = {before:.3g} nats; Theorem 1 bounds its "
        f"effect on the gradient by exp(D) - 1 = {_bound(before.value)}{with_r3}, with SIS {_bound(after.value)}.",
    )


def _bound(divergence: float) -> str:
    bound = math.expm1(divergence)
    return f"{bound:.2g}" if bound < 10.0 else "above 10 (no bound worth the name)"


def _staleness(summary: Summary) -> Iterator[Finding]:
    verl, stale = summary.comparison("verl", "k3"), summary.comparison("staleness", "k3")
    if verl is None or stale is None:
        return
    yield Finding(
        "staleness",
        "note",
        f"Staleness and mismatch apart: within a rollout the policy moves by k3 {stale:.2g} on average over its "
        f"mini-batches; rollout engine and trainer differ by {verl:.2g} before any update.",
    )


def _kappa(summary: Summary) -> Iterator[Finding]:
    pair = summary.pool.layout.headline_pair
    kappa = summary.kappa(pair) if pair else None
    if kappa is None or math.isnan(kappa.low):
        return
    # Half the width of a 95 % interval is about two standard errors.
    errors = abs(kappa.value - 1.0) / max((kappa.high - kappa.low) / 4.0, KAPPA_ROUNDING)
    if errors <= KAPPA_SE:
        text = f"kappa is {kappa:.4f}, {errors:.1f} standard errors from 1"
        yield Finding("kappa", "good", f"{text}: acceptance is what the policies say it must be.")
    else:
        yield Finding(
            "kappa",
            "fault" if abs(kappa.value - 1.0) > KAPPA_FAULT else "note",
            f"kappa is {kappa:.4f}, {errors:.0f} standard errors from 1: tokens do not come from the policy whose "
            "top-K they are tested against.",
        )


def _certificate(summary: Summary) -> Iterator[Finding]:
    pair = summary.pool.layout.headline_pair
    if pair is None:
        return
    k, mean = summary.headline_k, summary.pair(pair, "residual")
    assert mean is not None
    passed = summary.certified(pair, k)
    smallest = summary.smallest_certified_k(pair)
    advice = (
        f"The smallest K that passes is {smallest}."
        if smallest
        else f"No K up to {summary.pool.layout.ks[-1]} passes: unit weights are not justified at these."
    )
    yield Finding(
        "certificate",
        "good" if passed else "note",
        f"SIS at K = {k} {'passes' if passed else 'does not pass'} the residual-mass certificate (mean at most 0.02, "
        f"95th percentile at most 0.10): mean {mean:.3g}, p95 {summary.residual_p95(pair):.2g}. {advice}",
    )


def _acceptance(summary: Summary) -> Iterator[Finding]:
    pair = summary.pool.layout.headline_pair
    accepted = summary.pair(pair, "accepted") if pair else None
    if pair is None or accepted is None:
        return
    before = summary.bootstrap.ratio(f"{pair}.divergence", f"{pair}.tested")
    after = summary.pair(pair, "divergence_sis")
    assert after is not None
    share = 1.0 - after.value / before.value if before.value else math.nan
    yield Finding(
        "acceptance",
        "note",
        f"SIS at K = {summary.headline_k} would accept {accepted:.4f} of tokens, and take {share:.0%} of the summed "
        "|log w| out of the importance ratios.",
    )

"""The section of a report on metric logs of training runs: curves, and what can be said without token tables."""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas

from verl_sis.study.causes import Finding
from verl_sis.study.report import figures
from verl_sis.study.report.figures import FigureSpec
from verl_sis.study.report.sections import Section
from verl_sis.study.run_logs import RunLog

PANELS: tuple[tuple[str, str, bool, tuple[str, ...]], ...] = (
    ("reward", "Reward", False, ("critic/rewards/mean", "critic/score/mean", "held_out_reward")),
    ("acceptance", "Acceptance", False, ("actor/sis/accept_rate", "actor/sis/accept_rate_expected")),
    ("kappa", "kappa", False, ("actor/sis/kappa",)),
    (
        "mismatch",
        "Train-inference mismatch, k3",
        True,
        ("actor/mismatch/k3", "actor/mismatch/native/k3", "actor/mismatch/floor/k3", "rollout_corr/k3_kl"),
    ),
    (
        "probabilities",
        "Difference of probabilities, as verl logs it",
        True,
        ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
    ),
    ("divergence", "Divergence per response", True, ("actor/sis/D", "actor/sis/D_sis")),
    ("routing", "Routing disagreement", False, ("actor/routing/disagreement", "actor/routing/tokens_any_difference")),
    ("stability", "Stability", True, ("actor/entropy", "actor/grad_norm", "actor/pg_clipfrac")),
)
"""Name, title, whether the axis is logarithmic, and verl's metrics, of each figure."""

WIDENING = 3.0
"""Ratio of the last quarter's mismatch to the first quarter's that is called widening."""


def log_section(logs: Sequence[RunLog]) -> Section:
    """One section on all logs.

    Args:
        logs: At least one.
    """
    findings = [finding for log in logs for finding in log_findings(log)]
    steps = ", ".join(f"{log.name}: {len(log.table)} steps ({log.format})" for log in logs)
    record = {
        "logs": [
            {"name": log.name, "format": log.format, "source": str(log.source), "skipped": log.skipped} for log in logs
        ],
        "findings": [vars(finding) for finding in findings],
    }
    return Section("Training logs", steps, findings, {}, list(_figures(logs)), record=record)


def without_duplicates(logs: Sequence[RunLog]) -> list[RunLog]:
    """Leave out a log that says nothing beyond another of the same directory, e.g. a filtered copy.

    Args:
        logs: Of one search.
    """
    return [
        log
        for index, log in enumerate(logs)
        if not any(
            _repeats(log, other) and (other_index < index or not _repeats(other, log))
            for other_index, other in enumerate(logs)
            if other is not log
        )
    ]


def _repeats(log: RunLog, other: RunLog) -> bool:
    """Whether every number of a log stands in another one of the same directory."""
    if log.source.parent != other.source.parent or not set(log.table.columns) <= set(other.table.columns):
        return False
    if not log.table.index.isin(other.table.index).all():
        return False
    same: Any = other.table.loc[log.table.index, list(log.table.columns)]
    return bool(log.table.equals(same))


def _figures(logs: Sequence[RunLog]) -> Iterator[FigureSpec]:
    for name, title, logarithmic, metrics in PANELS:
        lines, columns = [], {}
        for log in logs:
            known: Any = log.table.dropna(axis="columns", how="all")
            for metric in metrics:
                if metric in known:
                    label = metric if len(logs) == 1 else f"{log.name}: {metric}"
                    columns[label] = known[metric]
                    lines.append((label, label))
        if lines:
            table = pandas.DataFrame(columns).rename_axis("step").reset_index()
            shown = ", ".join(metric for metric in metrics if any(metric in log.table for log in logs))
            yield FigureSpec(
                f"log_{name}", title, f"By training step: {shown}.", table, figures.curves(lines, logarithmic)
            )


def log_findings(log: RunLog) -> Iterator[Finding]:
    """What the metrics of one run say.

    Args:
        log: Of the run.
    """
    table: Any = log.table
    if log.skipped:
        yield Finding("log_skipped", "note", f"{log.name}: {log.skipped} records of the log were not usable.")
    for metric in ("actor/sis/non_finite", "actor/mismatch/non_finite"):
        if metric in table and table[metric].sum() > 0:
            text = f"{log.name}: {metric} counts {table[metric].sum():.0f} tokens with an undefined log-prob."
            yield Finding("log_non_finite", "fault", text)
    yield from _mismatch_findings(log)
    if {"actor/sis/accept_rate", "actor/sis/accept_rate_expected"} <= set(table.columns):
        rate, expected = (table[f"actor/sis/{name}"].mean() for name in ("accept_rate", "accept_rate_expected"))
        text = f"{log.name}: SIS accepted {rate:.3f} of tokens on average over steps, expected {expected:.3f}."
        yield Finding("log_acceptance", "note", text)
    yield from _collapse_findings(log)


def _mismatch_findings(log: RunLog) -> Iterator[Finding]:
    table: Any = log.table
    metric = next((m for m in ("actor/mismatch/k3", "rollout_corr/k3_kl") if m in table), None)
    if metric is None:
        yield Finding(
            "log_no_mismatch",
            "note",
            f"{log.name} logs no train-inference mismatch. Type actor_rollout_ref.rollout.calculate_log_probs=True "
            "(verl then logs it with a rollout correction; verl_sis logs it with SIS or routing replay).",
        )
        return
    first, last = _quarters(table[metric])
    text = f"{log.name}: mismatch k3 went from {first:.2g} (first quarter of steps, median) to {last:.2g} (last)."
    yield Finding("log_mismatch", "fault" if last > WIDENING * first > 0 else "note", text)
    native = "actor/mismatch/native/k3"
    if native in table and metric == "actor/mismatch/k3":
        both = table[[metric, native]].dropna()
        lower = int((both[metric] < both[native]).sum())
        text = (
            f"{log.name}: on the same responses k3 is {both[metric].mean():.2g} with routing replay and "
            f"{both[native].mean():.2g} without; lower in {lower} of {len(both)} steps."
        )
        yield Finding("log_replay", "good" if lower > len(both) / 2 else "note", text)


def _collapse_findings(log: RunLog) -> Iterator[Finding]:
    for metric, word, factor in (("actor/entropy", "fell", 0.1), ("actor/grad_norm", "rose", 10.0)):
        if metric not in log.table:
            continue
        first, last = _quarters(log.table[metric])
        if first > 0 and (last / first < factor if factor < 1 else last / first > factor):
            text = f"{log.name}: {metric} {word} from {first:.3g} to {last:.3g} (medians of first and last quarter)."
            yield Finding("log_collapse", "fault", text)


def _quarters(series: Any) -> tuple[float, float]:
    """Medians of the first and of the last quarter of the steps that have a value."""
    values = series.dropna()
    size = max(len(values) // 4, 1)
    return float(values.iloc[:size].median()), float(values.iloc[-size:].median())

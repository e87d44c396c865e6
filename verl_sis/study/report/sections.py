"""From studies and logs to the sections of a report: verdict, figures, tables, examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas

from verl_sis.study import summary as sums
from verl_sis.study.causes import Finding
from verl_sis.study.diagnosis import diagnose
from verl_sis.study.report import figures
from verl_sis.study.report.examples import ShownResponse, decode, load_tokenizer, shown_responses
from verl_sis.study.report.figures import FigureSpec
from verl_sis.study.summary import Summary

LISTED_TOKENS = 500
"""Rows of the table of tokens; it is sorted by rejections."""


@dataclass(frozen=True)
class Section:
    """One study or one set of logs in the report.

    Attributes:
        name: Heading.
        subtitle: Where the data come from, in a line.
        findings: Its verdict.
        numbers: Headline numbers, text by name.
        figures: In order.
        examples: Responses to show.
        record: What ``report.json`` says of it.
    """

    name: str
    subtitle: str
    findings: list[Finding]
    numbers: dict[str, str]
    figures: list[FigureSpec]
    examples: list[ShownResponse] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)


def study_section(summary: Summary) -> Section:
    """The section of one study.

    Args:
        summary: Of the study.
    """
    findings = diagnose(summary)
    numbers = sums.headline_numbers(summary)
    tokenizer = load_tokenizer(summary.source)
    record = {
        "kind": summary.kind,
        "schema": summary.schema,
        "tokens": summary.pool.rows,
        "responses": summary.pool.responses,
        "source": summary.source,
        "findings": [vars(finding) for finding in findings],
        "numbers": {name: vars(estimate) for name, estimate in numbers.items()},
    }
    return Section(
        name=summary.name,
        subtitle=_subtitle(summary),
        findings=findings,
        numbers={name: f"{estimate:.4g}" for name, estimate in numbers.items()},
        figures=list(_figures(summary, tokenizer)),
        examples=shown_responses(summary, tokenizer),
        record=record,
    )


def _subtitle(summary: Summary) -> str:
    source, pool = summary.source, summary.pool
    facts = [f"{pool.rows:,} tokens of {pool.responses:,} responses"]
    for name in ("model", "dtype", "temperature", "strategy", "base_loss"):
        value = source.get(name)
        if value is not None:
            # Of a directory its name; a hub's "organisation/model" stays whole.
            facts.append(f"{name} {Path(value).name if name == 'model' and Path(value).is_absolute() else value}")
    if pool.layout.layers:
        facts.append(f"{len(pool.layout.layers)} layers with experts, {pool.layout.experts_per_token} per token")
    versions = source.get("versions")
    if isinstance(versions, dict):
        facts.append(", ".join(f"{name} {version}" for name, version in versions.items()))
    return "; ".join(facts)


def _figures(summary: Summary, tokenizer: Any) -> Iterator[FigureSpec]:
    pairs = summary.pool.layout.pairs
    yield FigureSpec(
        "comparisons",
        "Where the difference comes from",
        "k3 of each comparison of two log-probs of the same tokens. engine is what training sees at best, replay the "
        "same with R3, floor what remains between two passes over the same weights; the roundings are against float32.",
        sums.comparisons_table(summary),
        figures.comparisons,
    )
    if pairs:
        yield from _acceptance_figures(summary)
    ages: Any = sums.by_age_table(summary)
    if len(ages):
        yield FigureSpec(
            "by_age",
            "Acceptance and divergence by age",
            "Age is the number of optimizer updates between rollout and use. Mismatch (verl) is there at age 0; "
            "staleness grows with age from 0.",
            ages[ages["pair"] == summary.pool.layout.headline_pair] if pairs else ages,
            figures.acceptance_by_age,
            2,
        )
    yield from _cut_figures(summary)
    if summary.pool.layout.routed:
        yield FigureSpec(
            "layers",
            "Routing disagreement by layer",
            "Share of tokens for which rollout engine and trainer choose another set of experts.",
            sums.layers_table(summary),
            figures.layers,
        )
    if pairs:
        yield _tokens_figure(summary, tokenizer)


def _acceptance_figures(summary: Summary) -> Iterator[FigureSpec]:
    yield FigureSpec(
        "acceptance_by_k",
        "Acceptance by K",
        "Share of tokens that SIS accepts, beside what the two policies say it must be (dotted), and their ratio "
        "kappa, which is 1 if tokens come from the policy that they are tested against.",
        sums.by_k_table(summary),
        figures.acceptance_by_k,
        2,
    )
    yield FigureSpec(
        "residual_mass",
        f"Residual mass at K = {summary.headline_k}",
        "Probability of the current policy outside the old policy's top-K. The certificate asks for a mean of at "
        "most 0.02 and for the curve to pass above the crossing of the dashed lines (95 % of tokens at most 0.10).",
        sums.residual_table(summary),
        figures.residual_mass,
    )
    yield FigureSpec(
        "divergence_by_position",
        "D and D_SIS by position",
        "Mean |log w| of the tokens at a position; summed over a response it is D of the paper's Theorem 1. SIS "
        "leaves that of rejected tokens.",
        sums.cut_table(summary, "position"),
        figures.divergence_by_position,
    )


def _cut_figures(summary: Summary) -> Iterator[FigureSpec]:
    for grouping in summary.pool.groupings:
        table = sums.cut_table(summary, grouping.name)
        if grouping.name == "age" or (grouping.name == "turn" and len(table) < 2):
            continue
        yield FigureSpec(
            f"by_{grouping.name}",
            f"Mismatch and acceptance by {grouping.name}",
            f"k3 and acceptance at K = {summary.headline_k}, by {grouping.title}.",
            table,
            figures.cut(grouping.title),
            2,
        )


def _tokens_figure(summary: Summary, tokenizer: Any) -> FigureSpec:
    table = sums.tokens_table(summary)
    most = pandas.concat([table.head(LISTED_TOKENS), table.nlargest(20, "accepted")]).drop_duplicates("token")
    texts = [repr(decode(tokenizer, int(token)))[1:-1] for token in most["token"]]
    return FigureSpec(
        "tokens",
        "Most rejected and most accepted tokens",
        (
            f"By the number that training drew, at K = {summary.source.get('top_k')}."
            if summary.counts is not None
            else f"By expected number, at K = {summary.headline_k}."
        )
        + f" The CSV holds the {LISTED_TOKENS} most rejected.",
        most.assign(text=texts).reset_index(drop=True),
        figures.tokens,
        2,
    )


def comparison_section(summaries: Sequence[Summary]) -> Section:
    """Several studies side by side.

    Args:
        summaries: Two or more.
    """
    rows = [
        {"measure": name, "study": summary.name, **vars(estimate)}
        for summary in summaries
        for name, estimate in sums.headline_numbers(summary).items()
    ]
    table = pandas.DataFrame(rows)
    shared = [name for name, group in table.groupby("measure", sort=False) if len(group) > 1][:4]
    spec = FigureSpec(
        "side_by_side",
        "Studies side by side",
        "Dots are pooled over all tokens, bars are 95 % intervals from a bootstrap over responses. The CSV holds every "
        "number that a study has.",
        table,
        lambda axes, data: figures.side_by_side(axes, data.query("measure in @names", local_dict={"names": shared})),
        max(len(shared), 1),
    )
    return Section("Side by side", f"{len(summaries)} studies", [], {}, [spec])

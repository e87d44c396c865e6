"""From pooled sums to the numbers of a report, each with its confidence interval, and to tables for the figures."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas

from verl_sis.core.metrics import histogram_quantile
from verl_sis.core.statistics import HISTOGRAM_EDGES
from verl_sis.records.counts import read_counts
from verl_sis.records.read import open_study
from verl_sis.study import measures
from verl_sis.study.bootstrap import Bootstrap, Estimate
from verl_sis.study.pool import Pool, pool_study


@dataclass(frozen=True)
class Summary:
    """A study, summed up.

    Attributes:
        name: Of the study, in legends.
        pool: Its sums.
        bootstrap: Of these.
        source: Where it comes from, from the header of its files.
        kind: ``collect`` or ``dump``.
        schema: Version of the schema it was written in.
        counts: int64 ``[V, 2]``, rejected and accepted tokens of each id, where training counted them.
    """

    name: str
    pool: Pool
    bootstrap: Bootstrap
    source: dict
    kind: str
    schema: int
    counts: np.ndarray | None = None

    @property
    def headline_k(self) -> int:
        """The K that single numbers are given for."""
        return self.pool.layout.ks[measures.headline(self.pool.layout.ks)]

    def comparison(self, name: str, term: str) -> Estimate | None:
        """Mean per token of a term of a comparison; None if the study lacks it."""
        if f"{name}.{term}" not in self.bootstrap:
            return None
        return self.bootstrap.ratio(f"{name}.{term}", f"{name}.tokens")

    def pair(self, name: str, term: str, k: int | None = None) -> Estimate | None:
        """Mean per token of a term of a pair at one K (the headline K if None); None if the study lacks it."""
        if name not in self.pool.layout.pairs:
            return None
        return self.bootstrap.ratio(f"{name}.{term}@{k or self.headline_k}", f"{name}.tested")

    def kappa(self, name: str, k: int | None = None) -> Estimate | None:
        """Acceptance over its expectation; for a pair whose tokens come from its old policy it is 1."""
        if name not in self.pool.layout.pairs:
            return None
        k = k or self.headline_k
        return self.bootstrap.ratio(f"{name}.accepted@{k}", f"{name}.expected@{k}")

    def divergence(self, name: str, *, under_sis: bool) -> Estimate | None:
        """D of Theorem 1, the mean over responses of sum |log w|; under SIS, in expectation, D_SIS of Proposition 3."""
        if name not in self.pool.layout.pairs:
            return None
        term = f"{name}.divergence_sis@{self.headline_k}" if under_sis else f"{name}.divergence"
        return self.bootstrap.ratio(term, "responses")

    def explained_by_routing(self) -> Estimate | None:
        """Share of the engine's k3 that replaying its routes removes."""
        if "replay.k3" not in self.bootstrap:
            return None
        return self.bootstrap.estimate(
            lambda t: 1.0 - (t["replay.k3"] / t["replay.tokens"]) / (t["engine.k3"] / t["engine.tokens"])
        )

    def residual_p95(self, name: str) -> float:
        """95th percentile of xi at the headline K, exact to 4.7 %."""
        return histogram_quantile(self.pool.histograms[f"{name}.residual"], 0.95)

    def certified(self, name: str, k: int) -> bool:
        """Whether mean xi_K is at most 0.02 and its 95th percentile at most 0.10, from exact counts."""
        mean, certain = self.pair(name, "residual", k), self.pair(name, "certain", k)
        return bool(mean and certain and mean.value <= measures.CERTIFICATE_MEAN and certain.value >= 0.95)

    def smallest_certified_k(self, name: str) -> int | None:
        """Smallest K of the grid that passes the certificate."""
        return next((k for k in self.pool.layout.ks if self.certified(name, k)), None)


def summarize(name: str, path: Path) -> Summary:
    """Read a study and sum it up.

    Args:
        name: Of the study, in legends.
        path: As ``verl_sis.records.read.open_study`` takes it.

    Raises:
        StudyFileError: If there is none, or something in it is damaged.
    """
    files = open_study(path)
    header, pool = files[0].header, pool_study(files)
    bootstrap = Bootstrap(pool.names, pool.sums)
    return Summary(name, pool, bootstrap, header.source, header.kind, header.version, read_counts(path))


def headline_numbers(summary: Summary) -> dict[str, Estimate]:
    """The numbers that studies are set side by side by; those that the study has."""
    k, pair = summary.headline_k, summary.pool.layout.headline_pair or ""
    numbers = {
        "k3, engine against trainer": summary.comparison("engine", "k3") or summary.comparison("verl", "k3"),
        "k3 with R3": summary.comparison("replay", "k3"),
        "k3, trainer against itself": summary.comparison("floor", "k3"),
        "k3, staleness": summary.comparison("staleness", "k3"),
        f"acceptance at K = {k}": summary.pair(pair, "accepted"),
        f"acceptance with R3 at K = {k}": summary.pair("replay", "accepted"),
        f"acceptance of the floor at K = {k}": summary.pair("floor", "accepted"),
        f"kappa at K = {k}": summary.kappa(pair),
        f"residual mass at K = {k}": summary.pair(pair, "residual"),
        "D per response": summary.divergence(pair, under_sis=False),
        "D_SIS per response": summary.divergence(pair, under_sis=True),
    }
    return {name: estimate for name, estimate in numbers.items() if estimate is not None}


def _cells(prefix: str, estimate: Estimate | None) -> dict[str, float]:
    if estimate is None:
        return {}
    return {prefix: estimate.value, f"{prefix}_low": estimate.low, f"{prefix}_high": estimate.high}


def comparisons_table(summary: Summary) -> pandas.DataFrame:
    """A row per comparison: counts, k1, k3, ``|d|`` (mean, p99, largest), share of tokens with ``|d|`` above log 2."""
    rows = []
    for c in summary.pool.layout.comparisons:
        row: dict[str, object] = {"comparison": c.name, "reference": c.reference, "other": c.other}
        row |= {term: summary.bootstrap.total(f"{c.name}.{term}") for term in ("tokens", "non_finite")}
        for term in ("k1", "k3", "abs", "outside_2"):
            row |= _cells(term, summary.comparison(c.name, term))
        row["abs_p99"] = histogram_quantile(summary.pool.histograms[f"{c.name}.abs"], 0.99)
        row["abs_max"] = summary.pool.largest.get(f"{c.name}.abs", math.nan)
        rows.append({**row, "meaning": c.meaning})
    return pandas.DataFrame(rows)


def by_k_table(summary: Summary) -> pandas.DataFrame:
    """A row per pair and K: acceptance, expected acceptance, kappa, membership, residual mass, certificate."""
    return pandas.DataFrame(
        [
            {"pair": pair, "k": k, **_pair_cells(summary, pair, k)}
            for pair in summary.pool.layout.pairs
            for k in summary.pool.layout.ks
        ]
    )


def _pair_cells(summary: Summary, pair: str, k: int) -> dict[str, object]:
    row: dict[str, object] = {}
    for column, term in (
        ("acceptance", "accepted"),
        ("expected", "expected"),
        ("in_top_k", "inside"),
        ("residual_mass", "residual"),
        ("residual_at_most_0.10", "certain"),
        ("divergence_sis", "divergence_sis"),
    ):
        row |= _cells(column, summary.pair(pair, term, k))
    row |= _cells("kappa", summary.kappa(pair, k))
    row |= _cells("divergence", summary.bootstrap.ratio(f"{pair}.divergence", f"{pair}.tested"))
    return {**row, "certified": summary.certified(pair, k)}


def by_age_table(summary: Summary) -> pandas.DataFrame:
    """A row per age and K of the update pair, with the comparisons of each age; empty without ages."""
    rows = []
    for age, sums in sorted(summary.pool.by_age.items()):
        at_age = replace(summary, bootstrap=Bootstrap(summary.pool.names, sums))
        cells: dict[str, object] = {}
        for c in summary.pool.layout.comparisons:
            cells |= _cells(f"{c.name}_k3", at_age.comparison(c.name, "k3"))
        for pair in summary.pool.layout.pairs:
            rows += [
                {"pair": pair, "age": age, "k": k, **_pair_cells(at_age, pair, k), **cells}
                for k in summary.pool.layout.ks
            ]
    return pandas.DataFrame(rows)


def cut_table(summary: Summary, grouping: str) -> pandas.DataFrame:
    """A row per bin of a grouping that holds tokens: counts, and means per token with intervals."""
    pool = summary.pool
    cut = pool.cuts[grouping]
    label = next(g.label for g in pool.groupings if g.name == grouping)
    rows = []
    for index in np.flatnonzero(cut[:, :, 0].sum(axis=0)).tolist():
        bootstrap = Bootstrap(pool.cut_names, cut[:, index])
        row: dict[str, object] = {"bin": label(index), "tokens": bootstrap.total("tokens")}
        for name in pool.cut_names[1:]:
            owner, _, term = name.partition(".")
            if term not in ("tokens", "tested"):
                count = "tokens" if term in measures.COMPARISON_TERMS else "tested"
                denominator = "tokens" if owner == "routes" else f"{owner}.{count}"
                row |= _cells(name.replace("@", "_at_"), bootstrap.ratio(name, denominator))
        rows.append(row)
    return pandas.DataFrame(rows)


def layers_table(summary: Summary) -> pandas.DataFrame:
    """A row per layer with experts: share of tokens whose expert set differs; empty without routes."""
    if not summary.pool.layout.routed:
        return pandas.DataFrame()
    rows = [
        {"layer": layer, **_cells("disagreement", summary.bootstrap.ratio(f"routes.differs@{layer}", "tokens"))}
        for layer in summary.pool.layout.layers
    ]
    return pandas.DataFrame(rows)


def residual_table(summary: Summary) -> pandas.DataFrame:
    """Histogram of xi at the headline K: upper edge of each bin, and the share of tokens up to it, by pair."""
    columns: dict[str, object] = {"residual_mass": np.append(HISTOGRAM_EDGES, math.inf)}
    for pair in summary.pool.layout.pairs:
        counts = summary.pool.histograms[f"{pair}.residual"]
        columns[pair] = np.cumsum(counts) / max(int(counts.sum()), 1)
    return pandas.DataFrame(columns).query("1e-6 <= residual_mass <= 1.0").reset_index(drop=True)


def tokens_table(summary: Summary) -> pandas.DataFrame:
    """A row per token id that occurs, the most rejected first: counts, acceptance rate, mean ``|log w|``.

    Counts are those of the z that were drawn, of all tokens of the dumped rollouts, where training wrote them; else
    expected ones, of the tokens of the table.
    """
    drawn, by_token = summary.counts, summary.pool.by_token
    if drawn is None:
        drawn = np.stack([by_token[:, 0] - by_token[:, 1], by_token[:, 1]], axis=1)
    ids = np.flatnonzero(drawn.sum(axis=1) > 0)
    rejected, accepted = drawn[ids].T
    known = np.pad(by_token, ((0, max(len(drawn) - len(by_token), 0)), (0, 0)))[ids]
    with np.errstate(invalid="ignore"):
        mean = known[:, 2] / known[:, 0]
    table = pandas.DataFrame(
        {
            "token": ids,
            "count": accepted + rejected,
            "accepted": accepted,
            "rejected": rejected,
            "acceptance": accepted / (accepted + rejected),
            "abs_log_ratio": mean,
        }
    )
    return table.sort_values("rejected", ascending=False, ignore_index=True)

"""Figures of a study; each is drawn from one table, which lies beside it as CSV."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas

from verl_sis.study import measures

COLORS = {
    "engine": "tab:blue",
    "replay": "tab:green",
    "floor": "tab:gray",
    "update": "tab:pink",
    "verl": "tab:purple",
    "staleness": "tab:red",
    "mode": "tab:olive",
    "arithmetic": "tab:brown",
    "trainer_rounding": "tab:cyan",
    "engine_rounding": "tab:orange",
}
"""One color for each pair and comparison, in every figure."""

LABELS = {
    "engine": "engine, trainer",
    "replay": "engine, trainer with R3",
    "floor": "trainer, itself (floor)",
    "update": "old policy, policy in training",
}
"""Legend of each pair."""

SHOWN_IN_CUTS = ("engine", "replay", "verl", "staleness", "floor")


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        name: Of its files.
        title: What it shows.
        explanation: One or two sentences for a reader who does not know the code.
        table: The table it is drawn from.
        draw: Draws the table onto axes.
        panels: Number of axes.
    """

    name: str
    title: str
    explanation: str
    table: pandas.DataFrame
    draw: Callable[[Any, pandas.DataFrame], None]
    panels: int = 1


def panels(spec: FigureSpec) -> list[bytes]:
    """Draw a figure, each panel as a picture of its own: side by side on a desk, one below the other on a phone.

    Args:
        spec: What to draw.

    Returns:
        PNG files.
    """
    # No display is needed, and no global state of pyplot is touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = [Figure(figsize=(5.2, 3.8), layout="constrained") for _ in range(spec.panels)]
    for picture in pictures:
        FigureCanvasAgg(picture)
    spec.draw([picture.subplots() for picture in pictures], spec.table)
    files = []
    for picture in pictures:
        stream = io.BytesIO()
        picture.savefig(stream, format="png", dpi=110)
        files.append(stream.getvalue())
    return files


def band(axis: Any, x: Any, table: pandas.DataFrame, column: str, **style: Any) -> None:
    """A line with its confidence interval as a band."""
    axis.plot(x, table[column], marker=".", **style)
    low, high = table.get(f"{column}_low"), table.get(f"{column}_high")
    if low is not None and high is not None:
        axis.fill_between(x, low, high, color=style.get("color"), alpha=0.15, linewidth=0)


def acceptance_by_k(axes: Any, table: pandas.DataFrame) -> None:
    """Acceptance and its expectation, then kappa, by K."""
    for pair, rows in table.groupby("pair", sort=False):
        color, label = COLORS[str(pair)], LABELS[str(pair)]
        band(axes[0], rows["k"], rows, "acceptance", color=color, label=label)
        axes[0].plot(rows["k"], rows["expected"], color=color, linestyle=":")
        band(axes[1], rows["k"], rows, "kappa", color=color, label=label)
    axes[0].set(xscale="log", xlabel="K", ylabel="acceptance (dotted: expected)", ylim=(None, 1.0))
    axes[1].set(xscale="log", xlabel="K", ylabel="kappa")
    axes[1].axhline(1.0, color="black", linewidth=0.8)
    _finish(axes)


def acceptance_by_age(axes: Any, table: pandas.DataFrame) -> None:
    """Acceptance by age, a line per K; staleness and mismatch by age."""
    ks = sorted(set(table["k"]))
    for index, (k, rows) in enumerate(table.groupby("k")):
        shade = 0.25 + 0.7 * index / max(len(ks) - 1, 1)
        color = (0.8, 0.1, 0.1, shade)
        band(axes[0], rows["age"], rows, "acceptance", color=color, label=f"K = {k}")
        axes[0].plot(rows["age"], rows["expected"], color=color, linestyle=":")
    once: Any = table[table["k"] == ks[-1]]
    for name in ("staleness", "verl", "mode", "update"):
        if f"{name}_k3" in once:
            band(axes[1], once["age"], once, f"{name}_k3", color=COLORS[name], label=name)
    for axis in axes:
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set(xlabel="age, optimizer updates", ylabel="acceptance (dotted: expected)", ylim=(None, 1.0))
    axes[1].set(xlabel="age, optimizer updates", ylabel="k3")
    _positive(axes[1])
    _finish(axes)


def residual_mass(axes: Any, table: pandas.DataFrame) -> None:
    """Distribution of the residual mass, with the bounds of the certificate."""
    for pair in table.columns[1:]:
        axes[0].plot(table["residual_mass"], table[pair], color=COLORS[pair], label=LABELS[pair])
    axes[0].axvline(measures.CERTIFICATE_P95, color="black", linestyle="--", linewidth=0.8)
    axes[0].axhline(0.95, color="black", linestyle="--", linewidth=0.8)
    axes[0].set(xscale="log", xlabel="residual mass xi", ylabel="share of tokens up to it", ylim=(0.0, 1.02))
    _finish(axes)


def comparisons(axes: Any, table: pandas.DataFrame) -> None:
    """The size of k3 of every comparison, with its interval."""
    rows = table.iloc[::-1]
    places = np.arange(len(rows))
    low, high = rows["k3"] - rows["k3_low"], rows["k3_high"] - rows["k3"]
    errors = None if low.isna().all() else np.clip(np.stack([low, high]), 0.0, None)
    colors = [COLORS[name] for name in rows["comparison"]]
    axes[0].barh(places, rows["k3"], xerr=errors, color=colors, alpha=0.8, capsize=3)
    axes[0].set_yticks(places, rows["comparison"])
    axes[0].set(xlabel="k3")
    if (rows["k3"] > 0).any():
        axes[0].set(xscale="log")
    axes[0].grid(alpha=0.3)


def cut(grouping: str) -> Callable[[Any, pandas.DataFrame], None]:
    """Mismatch and acceptance along one grouping."""

    def draw(axes: Any, table: pandas.DataFrame) -> None:
        places = np.arange(len(table))
        for name in SHOWN_IN_CUTS:
            if f"{name}.k3" in table:
                band(axes[0], places, table, f"{name}.k3", color=COLORS[name], label=LABELS.get(name, name))
        for pair in LABELS:
            column = next(
                (c for c in table if c.startswith(f"{pair}.accepted") and not c.endswith(("low", "high"))), ""
            )
            if column:
                band(axes[1], places, table, column, color=COLORS[pair], label=LABELS[pair])
        _positive(axes[0])
        axes[0].set(ylabel="k3", xlabel=grouping)
        axes[1].set(ylabel="acceptance", xlabel=grouping, ylim=(None, 1.0))
        for axis in axes:
            axis.set_xticks(places, table["bin"], rotation=45, ha="right", fontsize="small")
        _finish(axes)

    return draw


def divergence_by_position(axes: Any, table: pandas.DataFrame) -> None:
    """|log w| of the headline pair by position, and what SIS leaves of it."""
    places = np.arange(len(table))
    pair = next(p for p in ("update", "engine", "floor") if f"{p}.divergence" in table)
    after = next(c for c in table if c.startswith(f"{pair}.divergence_sis") and not c.endswith(("low", "high")))
    band(axes[0], places, table, f"{pair}.divergence", color="tab:red", label="|log w|: adds up to D")
    band(axes[0], places, table, after, color="tab:green", label="(1 - a) |log w|: to D_SIS")
    axes[0].set_xticks(places, table["bin"], rotation=45, ha="right", fontsize="small")
    axes[0].set(xlabel="position in the response", ylabel="nats per token")
    _positive(axes[0])
    _finish(axes)


def layers(axes: Any, table: pandas.DataFrame) -> None:
    """Share of tokens with another expert set, by layer."""
    band(axes[0], table["layer"], table, "disagreement", color="tab:blue")
    axes[0].set(xlabel="decoder layer", ylabel="tokens with another expert set", ylim=(0.0, None))
    axes[0].grid(alpha=0.3)


def tokens(axes: Any, table: pandas.DataFrame) -> None:
    """The most rejected tokens, and the most accepted ones."""
    for axis, column, color in ((axes[0], "rejected", "tab:red"), (axes[1], "accepted", "tab:green")):
        rows = table.nlargest(20, column).iloc[::-1]
        axis.barh(np.arange(len(rows)), rows[column], color=color, alpha=0.8)
        # Text of a model may hold a dollar sign, which would start a formula.
        labels = [str(text).replace("$", r"\$") for text in rows["text"]]
        axis.set_yticks(np.arange(len(rows)), labels, fontsize="x-small")
        axis.set(xlabel=f"tokens {column}")


def side_by_side(axes: Any, table: pandas.DataFrame) -> None:
    """Headline numbers of several studies with their intervals, a panel each."""
    for axis, (measure, rows) in zip(axes, table.groupby("measure", sort=False), strict=False):
        places = np.arange(len(rows))
        errors = np.clip(np.stack([rows["value"] - rows["low"], rows["high"] - rows["value"]]), 0.0, None)
        axis.errorbar(rows["value"], places, xerr=np.nan_to_num(errors), fmt="o", capsize=3)
        axis.set_yticks(places, rows["study"], fontsize="small")
        axis.set(xlabel=str(measure), ylim=(-0.5, len(rows) - 0.5))
        low, high = float(np.min(rows["value"])), float(np.max(rows["value"]))
        if 0 < low < high / 20:
            axis.set_xscale("log")
        axis.invert_yaxis()
        axis.grid(alpha=0.3)


def curves(lines: Sequence[tuple[str, str]], logarithmic: bool) -> Callable[[Any, pandas.DataFrame], None]:
    """Metrics of training runs by step: (label, column) each."""

    def draw(axes: Any, table: pandas.DataFrame) -> None:
        for label, column in lines:
            shown = table[["step", column]].dropna()
            axes[0].plot(shown["step"], shown[column], marker=".", label=label)
        axes[0].set(xlabel="step")
        if logarithmic:
            _positive(axes[0])
        _finish(axes)

    return draw


def _positive(axis: Any) -> None:
    """A logarithmic axis where there is anything to show on it."""
    heights = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axis.lines] or [np.zeros(0)])
    if (heights > 0).any():
        axis.set_yscale("log")


def _finish(axes: Any) -> None:
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="x-small")

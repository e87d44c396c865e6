"""Figures of the estimator laboratory; each answers one question, and its numbers lie beside it as CSV.

Synthetic policies are drawn over a continuous axis, their drift; collected ones over categories, the groups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas

CERTIFICATE = {"residual_mass": 0.02, "residual_mass_p95": 0.10}
"""What a reviewer of the paper asked of xi_K before the unit weight is justified: mean and 95th percentile."""


@dataclass(frozen=True)
class Across:
    """What groups of policies are told apart by in a figure.

    Attributes:
        column: Of the tables.
        title: Of one of the groups.
        categorical: Whether it is a name, and not a number.
    """

    column: str
    title: str
    categorical: bool


DRIFT = Across("drift", "drift", categorical=False)
POLICIES = Across("policies", "pair of policies", categorical=True)


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        name: File name without ending.
        question: What it answers.
        table: Key of the table it is drawn from.
        draw: Draws it, onto a row of axes, with what tells the groups of the table apart.
        panels: Number of axes.
        across: What that is.
    """

    name: str
    question: str
    table: str
    draw: Callable[[Any, pandas.DataFrame, Across], None]
    panels: int
    across: Across = DRIFT


def _curves(table: pandas.DataFrame, by: str, names: list[Any] | None) -> Iterator[tuple[Any, pandas.DataFrame]]:
    for value in names if names is not None else list(dict.fromkeys(table[by])):
        rows: Any = table[table[by] == value]
        yield value, rows


def _lines(axes: Any, table: pandas.DataFrame, by: str, x: str, y: str, names: list[Any] | None = None) -> None:
    for value, rows in _curves(table, by, names):
        axes.errorbar(rows[x], rows[y], yerr=rows.get(f"{y}_se"), marker=".", capsize=2, label=str(value))
    axes.set(xlabel=x.replace("_", " "))
    _finish(axes, by, y)


def _over_groups(
    axes: Any, table: pandas.DataFrame, by: str, y: str, across: Across, names: list[Any] | None = None
) -> None:
    """A line per value of ``by`` over the drift, or a column of points per named group, side by side."""
    if not across.categorical:
        _lines(axes, table, by, across.column, y, names)
        axes.set_xscale("log")
        return
    groups = dict(zip(table[across.column], table["log_ratio_rms"], strict=True))
    place = {name: number for number, name in enumerate(groups)}
    curves = list(_curves(table, by, names))
    for number, (value, rows) in enumerate(curves):
        aside = 0.7 * ((number + 0.5) / len(curves) - 0.5)
        x = [place[name] + aside for name in rows[across.column]]
        axes.errorbar(x, rows[y], yerr=rows.get(f"{y}_se"), marker="o", linestyle="", capsize=2, label=str(value))
    labels = [f"{name}\n({drift:.2g})" for name, drift in groups.items()]
    slanted = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if len(labels) > 3 else {}
    axes.set_xticks(range(len(labels)), labels, **slanted)
    axes.set(xlabel=f"{across.title} (root mean square of log w)", xlim=(-0.5, len(labels) - 0.5))
    _finish(axes, by, y)


def _finish(axes: Any, by: str, y: str) -> None:
    axes.set(ylabel=y.replace("_", " "))
    axes.grid(alpha=0.3)
    # Beside the axes: within them it hides points.
    axes.legend(title=by, fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _legends_once(panels: Sequence[Any]) -> None:
    """Keep the legend of the last of several panels that all have the same."""
    legends = [axes.get_legend() for axes in panels]
    labels = [[text.get_text() for text in legend.get_texts()] for legend in legends]
    for legend, mine in zip(legends[:-1], labels[:-1], strict=True):
        if mine == labels[-1]:
            legend.remove()


def _logarithmic_from_zero(axis: Any) -> None:
    """A logarithmic axis that can show an exact 0."""
    axis.set_yscale("symlog", linthresh=1e-4)
    # Room for whole markers at both ends.
    axis.set_ylim(bottom=-2e-5, top=1.5 * axis.get_ylim()[1])


def _residual_mass_and_bias(axes: Any, table: pandas.DataFrame, across: Across) -> None:
    some: Any = table[table["residual_mass"] > 0]
    exact: Any = table[table["residual_mass"] == 0]
    # Named groups do not make a line; the K of one group do.
    _lines(axes[0], some, across.column if across.categorical else "k", "residual_mass", "relative_bias")
    axes[0].set(yscale="log", title="bias of SIS against residual mass")
    axes[0].locator_params(axis="x", nbins=5)
    _over_groups(axes[1], table, "k", "relative_bias", across)
    without = f"; K = {exact['k'].max()} has no residual mass" if len(exact) else ""
    axes[1].set(yscale="log", title=f"bias of SIS by {across.title}{without}")


def _sequences(axes: Any, table: pandas.DataFrame, across: Across) -> None:
    for axis, column, title in zip(
        axes,
        ("to_surrogate", "to_policy_gradient"),
        ("distance from the token-level surrogate", "distance from the policy gradient"),
        strict=True,
    ):
        _over_groups(axis, table, "estimator", column, across)
        axis.set(title=title)
        _logarithmic_from_zero(axis)


def _choice_of_k(axes: Any, table: pandas.DataFrame, across: Across) -> None:
    for axis, column in zip(axes, ("residual_mass_p95", "acceptance", "mse_over_is_256"), strict=True):
        _lines(axis, table, across.column, "k", column)
        axis.set(xscale="log")
    axes[0].axhline(CERTIFICATE["residual_mass_p95"], color="black", linestyle="--")
    axes[0].set(title="residual mass, 95th percentile (dashed: 0.10)")
    axes[1].set(title="acceptance probability")
    axes[2].axhline(1.0, color="black", linestyle="--")
    axes[2].set(title="mean squared error over that of IS, 256 samples")


def _filters(axes: Any, table: pandas.DataFrame, across: Across) -> None:
    names = ["IS", "TIS", "IcePop", "PPO clip", "CISPO", "SIS", "SIS, expected", "uncorrected"]
    k = ", ".join(str(k) for k in dict.fromkeys(table["k"]))
    titles = (
        f"bias over target (SIS: K = {k})",
        "standard deviation of one sample over target",
        "MSE over that of IS, 256 samples",
    )
    columns = ("relative_bias", "relative_deviation", "mse_over_is_256")
    for axis, column, title in zip(axes, columns, titles, strict=True):
        _over_groups(axis, table, "estimator", column, across, names)
        axis.set(title=title)
    _logarithmic_from_zero(axes[0])


def _falsifier(axes: Any, table: pandas.DataFrame, across: Across) -> None:
    chosen = [table["k"].min(), 10, table["k"].max()]
    for axis, column in zip(axes, ("acceptance", "relative_bias", "mse_over_is_4096"), strict=True):
        _over_groups(axis, table, "k", column, across, [k for k in chosen if k in set(table["k"])])
        axis.set(title=column.replace("_", " ") + " of SIS, by K")


FIGURES = (
    FigureSpec(
        "q1_residual_mass_and_bias",
        "1. How does the residual mass enter the bias of the token-level gradient?",
        "by_k",
        _residual_mass_and_bias,
        2,
    ),
    FigureSpec("q2_sequences", "2. Of which quantity is the estimator unbiased?", "by_sequence", _sequences, 2),
    FigureSpec("q4_choice_of_k", "4. By which rule should K be chosen?", "by_k", _choice_of_k, 3),
    FigureSpec("q7_filters", "7. How does SIS differ from filters and clips?", "side_by_side", _filters, 3),
    FigureSpec("q8_falsifier", "8. Do K = 1 and the largest envelope change results?", "by_k", _falsifier, 3),
)
"""The figures of synthetic policies, in the order of the questions."""

COLLECTED_FIGURES = tuple(
    replace(
        spec,
        name=f"collected_{spec.name}",
        question=f"{spec.question} (collected policies; bars: over draws of the advantages)",
        table=f"collected_{spec.table}",
        across=POLICIES,
    )
    for spec in FIGURES
    if spec.table != "by_sequence"
)
"""The same of collected policies, less the question on sequences, of which every one would have to be known."""


def draw(spec: FigureSpec, table: pandas.DataFrame, path: Path) -> None:
    """Draw one figure; the file appears complete or not at all.

    Args:
        spec: What to draw.
        table: Its data.
        path: PNG file to write.
    """
    # No display is needed, and no global state of pyplot is touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * spec.panels, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, spec.panels)
    spec.draw(panels, table, spec.across)
    _legends_once(panels)
    figure.suptitle(spec.question)
    scratch = path.with_name(f".{path.name}")
    figure.savefig(scratch, format="png", dpi=120)
    scratch.replace(path)

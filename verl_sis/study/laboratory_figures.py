"""Figures of the estimator laboratory; each answers one question, and its numbers lie beside it as CSV."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

CERTIFICATE = {"residual_mass": 0.02, "residual_mass_p95": 0.10}
"""What a reviewer of the paper asked of xi_K before the unit weight is justified: mean and 95th percentile."""


@dataclass(frozen=True)
class FigureSpec:
    """One figure.

    Attributes:
        name: File name without ending.
        question: What it answers.
        table: Key of the table it is drawn from.
        draw: Draws it, onto a row of axes.
        panels: Number of axes.
    """

    name: str
    question: str
    table: str
    draw: Callable[[Any, pandas.DataFrame], None]
    panels: int


def _lines(axes: Any, table: pandas.DataFrame, by: str, x: str, y: str, names: list[Any] | None = None) -> None:
    for value in names if names is not None else list(dict.fromkeys(table[by])):
        rows = table[table[by] == value]
        axes.errorbar(rows[x], rows[y], yerr=rows.get(f"{y}_se"), marker=".", capsize=2, label=str(value))
    axes.set(xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend(title=by, fontsize="small")


def _logarithmic_from_zero(axis: Any) -> None:
    """A logarithmic axis that can show an exact 0."""
    axis.set_yscale("symlog", linthresh=1e-4)
    axis.set_ylim(bottom=0.0)


def _residual_mass_and_bias(axes: Any, table: pandas.DataFrame) -> None:
    largest: Any = table["k"].max()
    below: Any = table[table["k"] < largest]
    _lines(axes[0], below, "k", "residual_mass", "relative_bias")
    axes[0].set(yscale="log", title="bias of SIS against residual mass, a line per K")
    _lines(axes[1], table, "k", "drift", "relative_bias")
    axes[1].set(xscale="log", yscale="log", title=f"bias of SIS by drift; K = {largest} has no residual mass")


def _sequences(axes: Any, table: pandas.DataFrame) -> None:
    for axis, column, title in zip(
        axes,
        ("to_surrogate", "to_policy_gradient"),
        ("distance from the token-level surrogate", "distance from the policy gradient"),
        strict=True,
    ):
        _lines(axis, table, "estimator", "drift", column)
        axis.set(xscale="log", title=title)
        _logarithmic_from_zero(axis)


def _choice_of_k(axes: Any, table: pandas.DataFrame) -> None:
    for axis, column in zip(axes, ("residual_mass_p95", "acceptance", "mse_over_is_256"), strict=True):
        _lines(axis, table, "drift", "k", column)
        axis.set(xscale="log")
    axes[0].axhline(CERTIFICATE["residual_mass_p95"], color="black", linestyle="--")
    axes[0].set(title="residual mass, 95th percentile (dashed: 0.10)")
    axes[1].set(title="acceptance probability")
    axes[2].axhline(1.0, color="black", linestyle="--")
    axes[2].set(title="mean squared error over that of IS, 256 samples")


def _filters(axes: Any, table: pandas.DataFrame) -> None:
    names = ["IS", "TIS", "IcePop", "PPO clip", "CISPO", "SIS", "SIS, expected", "uncorrected"]
    titles = ("bias over target", "standard deviation of one sample over target", "MSE over that of IS, 256 samples")
    columns = ("relative_bias", "relative_deviation", "mse_over_is_256")
    for axis, column, title in zip(axes, columns, titles, strict=True):
        _lines(axis, table, "estimator", "drift", column, names)
        axis.set(xscale="log", title=title)
    _logarithmic_from_zero(axes[0])


def _falsifier(axes: Any, table: pandas.DataFrame) -> None:
    chosen = [table["k"].min(), 10, table["k"].max()]
    for axis, column in zip(axes, ("acceptance", "relative_bias", "mse_over_is_4096"), strict=True):
        _lines(axis, table, "k", "drift", column, [k for k in chosen if k in set(table["k"])])
        axis.set(xscale="log", title=column.replace("_", " ") + " of SIS, a line per K")


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
    FigureSpec("q8_falsifier", "8. Do K = 1 and the exact envelope change results?", "by_k", _falsifier, 3),
)
"""The figures, in the order of the questions."""


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
    spec.draw(figure.subplots(1, spec.panels), table)
    figure.suptitle(spec.question)
    scratch = path.with_name(f".{path.name}")
    figure.savefig(scratch, format="png", dpi=120)
    scratch.replace(path)

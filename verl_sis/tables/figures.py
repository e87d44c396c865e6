"""Figures 2, 3 and 4: one panel per metric, one row of panels per model and task."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from verl_sis.tables.curves import FIGURES, HELD_OUT, REWARD, Point

TITLES = {
    REWARD: "training reward",
    HELD_OUT: "held-out reward",
    "actor/sis/accept_rate": "acceptance rate",
    "actor/sis/accept_rate_by_age": "acceptance rate by age of the rollout",
    "actor/sis/D": "D",
    "actor/sis/D_sis": "D_SIS",
    "actor/entropy": "entropy",
    "actor/grad_norm": "gradient norm",
    "actor/mismatch/k3": "k3 of engine and trainer (verl_sis)",
    "rollout_corr/k3_kl": "k3 of engine and trainer (verl's own)",
}

LOGARITHMIC = ("actor/grad_norm", "actor/mismatch/k3", "rollout_corr/k3_kl")

_PANEL = (4.6, 3.4)
"""Inches of width and height."""

_TITLE = 60
"""Letters in a line of a title."""

_COLORS = 10
_FEW = 40
"""Points up to which each is marked."""


def draw(figure_name: str, points: Sequence[Point], path: Path) -> None:
    """Draw a figure to a file.

    Args:
        figure_name: A key of ``FIGURES``.
        points: Its data.
        path: PNG file to write.
    """
    plot(figure_name, points).savefig(path, format="png", dpi=90)


def plot(figure_name: str, points: Sequence[Point]) -> Any:
    """Draw a figure.

    Args:
        figure_name: A key of ``FIGURES``.
        points: Its data. Standard errors are bands around curves, and bars where a panel has one place on its x axis.

    Returns:
        The ``matplotlib.figure.Figure``.
    """
    # No display is needed, and no global state of pyplot is touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = FIGURES[figure_name]
    scopes = _scopes(figure_name, points)
    width, height = _PANEL[0] * len(metrics), _PANEL[1] * len(scopes)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(scopes), len(metrics), squeeze=False)
    # Room for titles and labels in inches; a layout engine draws everything twice to find it.
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, bottom=0.5 / height, top=1 - 0.45 / height, wspace=0.2, hspace=0.45
    )
    for row, scope in zip(axes, scopes, strict=True):
        for panel, metric in zip(row, metrics, strict=True):
            chosen = [point for point in points if _scope(figure_name, point) == scope and point.metric == metric]
            _panel(panel, metric, chosen, title=f"{TITLES[metric]}\n{fill(', '.join(scope), _TITLE)}")
    return figure


def _scope(figure_name: str, point: Point) -> tuple[str, ...]:
    """What shares a row of panels: in Figure 2 an algorithm alone and with SIS."""
    if figure_name != "figure2":
        return point.model, point.task
    return point.model, point.task, point.method.partition(" + SIS")[0].removesuffix(" (+)")


def _scopes(figure_name: str, points: Sequence[Point]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(_scope(figure_name, point) for point in points)) or [()]


def _label(point: Point) -> str:
    return f"{point.method}, N={point.N}" + f", {point.replay}" * (point.replay != "off")


def _panel(axes: Any, metric: str, points: Sequence[Point], title: str) -> None:
    lines: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for point in points:
        if point.mean is not None:
            lines[_label(point)].append((point.x, point.mean, point.se))
    places = {x for line in lines.values() for x, _, _ in line}
    one_place = len(places) == 1
    for number, (label, line) in enumerate(lines.items()):
        color, marker = f"C{number % _COLORS}", "." if len(line) < _FEW else None
        if one_place:
            # Beside each other, or their error bars would hide each other.
            ((_, mean, se),) = line
            axes.errorbar([number], [mean], yerr=None if se is None else [se], c=color, fmt=".", capsize=3, label=label)
            continue
        axes.plot(*zip(*((x, mean) for x, mean, _ in line), strict=True), c=color, marker=marker, lw=1.2, label=label)
        band = [(x, mean - se, mean + se) for x, mean, se in line if se is not None]
        if band:
            axes.fill_between(*zip(*band, strict=True), color=color, alpha=0.2, linewidth=0)
    age = metric.endswith("by_age")
    axes.set(xlabel="optimizer steps since the rollout" if age else "optimizer steps")
    if one_place:
        axes.set_xlim(-1, len(lines))
        axes.set_xticks([(len(lines) - 1) / 2], [str(*places)])
    axes.set_title(title, fontsize=9)
    axes.grid(alpha=0.3)
    if lines:
        if metric in LOGARITHMIC and all(mean > 0 for line in lines.values() for _, mean, _ in line):
            axes.set_yscale("log")
            axes.minorticks_off()
        axes.legend(fontsize=6)
    else:
        axes.text(0.5, 0.5, "not measured in these runs", ha="center", transform=axes.transAxes)

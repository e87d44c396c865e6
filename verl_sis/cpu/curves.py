"""Curves of one run: reward, acceptance, divergence and train-inference mismatch over steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_sis.cpu.run_metrics import HELD_OUT, Row

PANELS = (
    ("reward", "linear", {"training": "critic/rewards/mean", "held-out": HELD_OUT}),
    ("acceptance", "linear", {"observed": "actor/sis/accept_rate", "expected": "actor/sis/accept_rate_expected"}),
    ("divergence per response", "linear", {"D": "actor/sis/D", "D_SIS": "actor/sis/D_sis"}),
    (
        "train-inference mismatch",
        "log",
        {
            "k3": "actor/mismatch/k3",
            "k3 without replay": "actor/mismatch/native/k3",
            "k3 of trainer against itself": "actor/mismatch/floor/k3",
            "|dlogp| mean": "actor/mismatch/abs_log_ratio/mean",
        },
    ),
)
"""Title, scale and lines (legend to metric) of each panel."""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the curves.

    Args:
        rows: Steps of a run, from `verl_sis.cpu.run_metrics.read_verl_log`.
        path: PNG file to write.
    """
    # No display is needed, and no global state of pyplot is touched.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, scale, lines) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        _draw(axes, rows, lines)
        axes.set(title=title, xlabel="step", yscale=scale)
        axes.grid(alpha=0.3)
    scratch = path.with_name(f".{path.name}")
    figure.savefig(scratch, format="png", dpi=120)
    scratch.replace(path)


def _draw(axes: Any, rows: Sequence[Row], lines: dict[str, str]) -> None:
    for label, metric in lines.items():
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", label=label)
    if axes.lines:
        axes.legend()
    else:
        axes.text(0.5, 0.5, "not measured in this run", ha="center", transform=axes.transAxes)

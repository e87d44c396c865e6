"""What one update has to report on routing and mismatch: pooled over micro-batches and ranks, then metrics."""

from dataclasses import dataclass, field

from verl_sis.core.metrics import mismatch_metrics
from verl_sis.core.routing import RoutingStatistics, routing_metrics
from verl_sis.core.statistics import PooledStatistics

REPORT = "routing_report"
"""Key under which reports travel through verl's metric exchange to the worker."""


@dataclass
class RoutingReport:
    """Mergeable statistics of one update.

    Attributes:
        equal_weights: Native against replayed choices in the old pass: the train-inference difference.
        update: The same in the update, where the weights have moved on.
        mismatch: Log-probs of rollout engine against trainer, with replay; empty where SIS reports them itself.
        native: The same without replay.
        floor: Two native passes of the trainer against each other.
    """

    equal_weights: RoutingStatistics = field(default_factory=RoutingStatistics)
    update: RoutingStatistics = field(default_factory=RoutingStatistics)
    mismatch: PooledStatistics = field(default_factory=PooledStatistics)
    native: PooledStatistics = field(default_factory=PooledStatistics)
    floor: PooledStatistics = field(default_factory=PooledStatistics)

    def merge(self, other: "RoutingReport") -> None:
        """Add everything of ``other``."""
        for name in ("equal_weights", "update", "mismatch", "native", "floor"):
            getattr(self, name).merge(getattr(other, name))


def report_metrics(total: RoutingReport, by_age: list[RoutingReport]) -> dict[str, float]:
    """Metrics of one step.

    Args:
        total: All mini-batches together.
        by_age: Each mini-batch, by its age in optimizer steps.

    Returns:
        ``routing/*`` at equal weights (in bypass mode and under R2, whose old pass replays nothing, of the first
        mini-batch), ``routing/disagreement_by_age/{age}`` of the update, and ``mismatch/*``, ``mismatch/native/*``,
        ``mismatch/floor/*`` where they were measured.
    """
    first = by_age[0].update if by_age else total.update
    at_equal_weights = total.equal_weights if total.equal_weights.layers else first
    values = routing_metrics(at_equal_weights)
    for age, report in enumerate(by_age):
        values[f"routing/disagreement_by_age/{age}"] = routing_metrics(report.update)["routing/disagreement"]
    for prefix, pooled in (
        ("mismatch", total.mismatch),
        ("mismatch/native", total.native),
        ("mismatch/floor", total.floor),
    ):
        if pooled.sums["mismatch_tokens"] or pooled.sums["mismatch_non_finite"]:
            values |= mismatch_metrics(pooled, prefix)
    return values

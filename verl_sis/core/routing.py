"""Expert choices of a mixture of experts: how two engines' choices for the same tokens differ.

A router picks K of E experts for each token in each layer. "Native" is what the trainer's router picks by itself,
"target" what another forward pass picked (the rollout engine's, under R3). Only the set counts: the order within the K
carries no meaning. Definitions of the rates: R3, arXiv 2510.11370, section 3.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch

REGIONS = ("prompt", "response")
"""Rows that predict no response token, and rows that predict one. Kept apart: only the latter bear loss."""

PROMPT, RESPONSE = range(len(REGIONS))

_MIN_CHOICES = 256
"""Fewest choices (rows times K) of one layer and region on which its agreement is judged."""

_MIN_VARIETY = 0.05
"""Least ``1 - chance``: a router that picks the same experts for every token agrees with anything."""

SUMS = ("rows", "native_rows", "missing_rows", "route_bytes", "tokens", "tokens_any_difference")


@dataclass
class RoutingStatistics:
    """Mergeable counts over tokens and layers; int64 in float64 or int64 arrays, so merging is exact.

    Attributes:
        layers: Absolute decoder layers that the arrays speak of, ``C`` of them; empty before anything was counted.
        experts_per_token: K.
        sums: By name (``SUMS``): real rows; rows that went native; of those, rows without a route that are not the last
            of their sequence; bytes of the routes of this rank; response rows with a route; of those, rows where any
            layer differs.
        rows_by_region: ``[2]`` rows with a route, by ``REGIONS``.
        differs: ``[2, C]`` rows whose expert set differs.
        overlap: ``[2, C]`` experts that both chose, summed over rows.
        native_counts: ``[2, C, E]`` how often the native router chose each expert; None where not counted.
        target_counts: ``[2, C, E]`` how often the target did.
    """

    layers: tuple[int, ...] = ()
    experts_per_token: int = 0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    rows_by_region: np.ndarray = field(default_factory=lambda: np.zeros(len(REGIONS)))
    differs: np.ndarray | None = None
    overlap: np.ndarray | None = None
    native_counts: np.ndarray | None = None
    target_counts: np.ndarray | None = None

    def merge(self, other: "RoutingStatistics") -> None:
        """Add the rows of ``other``.

        Raises:
            ValueError: If the two speak of different layers.
        """
        if self.layers and other.layers and self.layers != other.layers:
            raise ValueError(f"statistics of layers {self.layers} and {other.layers} cannot be merged")
        self.layers = self.layers or other.layers
        self.experts_per_token = self.experts_per_token or other.experts_per_token
        for name, value in other.sums.items():
            self.sums[name] += value
        self.rows_by_region = self.rows_by_region + other.rows_by_region
        for name in ("differs", "overlap", "native_counts", "target_counts"):
            own, added = getattr(self, name), getattr(other, name)
            if added is not None:
                setattr(self, name, added if own is None else own + added)

    def agreement(self) -> np.ndarray:
        """Chance-corrected agreement of native and target choices (Cohen, 1960), by region and layer.

        ``(observed - chance) / (1 - chance)`` with ``observed`` the mean share of common experts and ``chance`` that of
        two independent choices with the same frequencies of experts. 1 is equality, 0 what shuffled rows give.

        Returns:
            ``[2, C]`` float64; NaN where there are too few rows, or no variety, to judge by.
        """
        if self.overlap is None or self.native_counts is None or self.target_counts is None:
            return np.full((len(REGIONS), len(self.layers)), math.nan)
        k = self.experts_per_token
        rows = self.rows_by_region[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            observed = self.overlap / (rows * k)
            chance = ((self.native_counts / rows[..., None]) * (self.target_counts / rows[..., None])).sum(-1) / k
            agreement = (observed - chance) / (1.0 - chance)
        return np.where((rows * k >= _MIN_CHOICES) & (1.0 - chance >= _MIN_VARIETY), agreement, math.nan)


class RoutingObserver:
    """Counts the differences of one micro-batch on its device, layer by layer, without waiting for the device."""

    def __init__(
        self, layers: tuple[int, ...], shape: tuple[int, int], region: torch.Tensor, valid: torch.Tensor, *, count: bool
    ) -> None:
        """Prepare for a micro-batch.

        Args:
            layers: Absolute decoder layers, ``C`` of them.
            shape: Experts E, and K of them per token.
            region: int64 ``[n]``, index into ``REGIONS`` of each row.
            valid: bool ``[n]``, rows that have a target.
            count: Count the experts too, for ``RoutingStatistics.agreement``.
        """
        self._layers, (self._experts, self._k) = layers, shape
        self._region, self._valid = region, valid
        self._weight = torch.nn.functional.one_hot(region, len(REGIONS)) * valid[:, None]
        zeros = valid.new_zeros
        self._differs = zeros((len(REGIONS), len(layers)), dtype=torch.int64)
        self._overlap = torch.zeros_like(self._differs)
        self._layers_differing = zeros(len(valid), dtype=torch.int64)
        size = (len(layers), len(REGIONS) * self._experts)
        self._counts = [zeros(size, dtype=torch.int64) for _ in range(2)] if count else None

    @torch.no_grad()
    def observe(self, column: int, native: torch.Tensor, target: torch.Tensor) -> None:
        """Count one layer.

        Args:
            column: Index of the layer among ``layers``.
            native: int64 ``[n, K]``, distinct within a row.
            target: int64 ``[n, K]``, the same; ignored where a row has none.
        """
        common = (native.unsqueeze(-1) == target.unsqueeze(-2)).any(-1).sum(-1)
        differs = common < self._k
        self._layers_differing += differs
        self._differs[:, column] = (self._weight * differs[:, None]).sum(0)
        self._overlap[:, column] = (self._weight * common[:, None]).sum(0)
        if self._counts is not None:
            weight = self._valid.long()[:, None].expand_as(native).reshape(-1)
            for counts, ids in zip(self._counts, (native, target), strict=True):
                index = self._region[:, None] * self._experts + ids
                counts[column].index_add_(0, index.reshape(-1), weight)

    @torch.no_grad()
    def packed(self) -> torch.Tensor:
        """Everything as one int64 vector, so that ranks can add theirs up in one collective."""
        response = self._valid & (self._region == RESPONSE)
        parts = [
            self._weight.sum(0),
            torch.stack([response.sum(), (response & (self._layers_differing > 0)).sum()]),
            self._differs.reshape(-1),
            self._overlap.reshape(-1),
            *(counts.reshape(-1) for counts in self._counts or ()),
        ]
        return torch.cat(parts)

    def statistics(self, packed: torch.Tensor) -> RoutingStatistics:
        """The statistics in a vector made by ``packed``, of one rank or added up over several."""
        values = packed.cpu().numpy().astype(np.float64)
        c = len(self._layers)
        pooled = RoutingStatistics(layers=self._layers, experts_per_token=self._k, rows_by_region=values[:2])
        pooled.sums["tokens"], pooled.sums["tokens_any_difference"] = values[2:4].tolist()
        pooled.differs = values[4 : 4 + 2 * c].reshape(2, c)
        pooled.overlap = values[4 + 2 * c : 4 + 4 * c].reshape(2, c)
        if self._counts is not None:
            native, target = values[4 + 4 * c :].reshape(2, c, len(REGIONS), self._experts)
            pooled.native_counts, pooled.target_counts = native.swapaxes(0, 1), target.swapaxes(0, 1)
        return pooled


def routing_metrics(pooled: RoutingStatistics) -> dict[str, float]:
    """Routing metrics, prefix ``routing/``, of the tokens that predict a response token and have a route.

    Args:
        pooled: Statistics of all tokens to report on.

    Returns:
        ``tokens`` (count); ``disagreement``, share of (token, layer) pairs whose expert set differs, and
        ``disagreement_layer/{i}`` of each layer; ``tokens_any_difference``, share of tokens with any such layer;
        ``layers_per_token``, mean number of them; ``agreement``, chance-corrected, of all layers together (NaN where
        experts were not counted); ``fallback_fraction``, share of rows that went native, the last row of a sequence
        included, which no engine routes; ``missing_tokens``, rows without a route besides those last ones;
        ``bytes_per_token`` of the routes on the device. Rates over no token are NaN.
    """
    s = pooled.sums
    tokens, rows = s["tokens"], s["rows"]
    differs = np.zeros(len(pooled.layers)) if pooled.differs is None else pooled.differs[RESPONSE]
    values = {
        "routing/tokens": tokens,
        "routing/disagreement": _ratio(float(differs.sum()), tokens * len(pooled.layers)),
        "routing/tokens_any_difference": _ratio(s["tokens_any_difference"], tokens),
        "routing/layers_per_token": _ratio(float(differs.sum()), tokens),
        "routing/agreement": _mean_of_known(pooled.agreement()[RESPONSE]),
        "routing/fallback_fraction": _ratio(s["native_rows"], rows),
        "routing/missing_tokens": s["missing_rows"],
        "routing/bytes_per_token": _ratio(s["route_bytes"], rows),
    }
    for layer, count in zip(pooled.layers, differs.tolist(), strict=True):
        values[f"routing/disagreement_layer/{layer}"] = _ratio(count, tokens)
    return values


def _mean_of_known(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else math.nan


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan

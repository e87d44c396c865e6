"""What the routers of one forward pass shall choose: one immutable set per micro-batch."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core.routing import PROMPT, RESPONSE
from verl_sis.errors import SisStateError

ROUTES = "routed_experts"
"""Column ``[B, j, L, K]`` int16 in which verl carries the rollout engine's choices, nested over tokens."""


@dataclass(frozen=True)
class Rows:
    """What each row that this rank's routers see stands for.

    Attributes:
        packed_index: int64 ``[n]``, index of the row's token in the packed micro-batch; ``NO_TOKEN`` of
            ``verl_compat`` for padding.
        region: int64 ``[n]``, ``RESPONSE`` where the row predicts a response token, else ``PROMPT``.
        last: bool ``[n]``, last token of its sequence: no engine ever feeds it.
    """

    packed_index: torch.Tensor
    region: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, packed_index: torch.Tensor, data: TensorDict) -> "Rows":
        """Describe the rows of a micro-batch.

        Args:
            packed_index: As in the attribute, on the model's device.
            data: The micro-batch.
        """
        tokens, ends = verl_compat.packed(data, "input_ids")
        region = torch.full((len(tokens),), PROMPT)
        last = torch.zeros(len(tokens), dtype=torch.bool)
        for end, length in zip(ends, verl_compat.response_lengths(data), strict=True):
            region[end - length - 1 : end - 1] = RESPONSE
            last[end - 1] = True
        known = packed_index.clamp(min=0)
        device = packed_index.device
        return cls(
            packed_index, region.to(device)[known], last.to(device)[known] & (packed_index != verl_compat.NO_TOKEN)
        )

    @property
    def real(self) -> torch.Tensor:
        """Rows that hold a token, bool ``[n]``."""
        return self.packed_index != verl_compat.NO_TOKEN


@dataclass(frozen=True)
class Targets:
    """Choices for the rows of one forward pass.

    Attributes:
        ids: int16 ``[n, C, K]``; a column is widened when its router fires. Arbitrary where not valid.
        columns: Column of ``ids`` for each absolute decoder layer.
        valid: bool ``[n]``: rows that are replayed. All others route natively.
        rows: What the rows stand for.
    """

    ids: torch.Tensor
    columns: dict[int, int]
    valid: torch.Tensor
    rows: Rows

    @classmethod
    def of(cls, routes: torch.Tensor, present: torch.Tensor, columns: dict[int, int], rows: Rows) -> "Targets":
        """Lay packed routes out as the model's rows.

        Args:
            routes: int16 ``[N, C, K]`` of the packed micro-batch.
            present: bool ``[N]``, tokens that have a route.
            columns: Column of ``routes`` for each layer that has a router.
            rows: Rows of this rank.
        """
        index = rows.packed_index.clamp(min=0)
        own = routes if _is_identity(rows.packed_index, len(routes)) else routes[index]
        return cls(own, columns, present[index] & rows.real, rows)


def routes_of(data: TensorDict, layers: int, experts_per_token: int) -> torch.Tensor:
    """The rollout engine's routes of a micro-batch, packed as ``input_ids``.

    Args:
        data: Micro-batch as verl's engines see it.
        layers: Decoder layers of the model.
        experts_per_token: K of the model.

    Returns:
        int16 ``[N, layers, K]``.

    Raises:
        SisStateError: If the column is missing or does not fit the tokens or the model.
    """
    if ROUTES not in data:
        raise SisStateError(
            f"routing replay R3 needs the rollout engine's choices, but the batch has no {ROUTES!r}. The engine "
            "returned none: it takes rollout.enable_rollout_routing_replay=True and vLLM 0.22 or later"
        )
    column: Any = data[ROUTES]
    if not column.is_nested:
        raise SisStateError(f"expected {ROUTES!r} nested over tokens, found a tensor of shape {tuple(column.shape)}")
    (tokens, ends), (routes, route_ends) = verl_compat.packed(data, "input_ids"), verl_compat.packed(data, ROUTES)
    if ends != route_ends:
        sample = next(i for i, pair in enumerate(zip(ends, route_ends, strict=True)) if pair[0] != pair[1])
        lengths = [[end - start for start, end in pairwise([0, *part])][sample] for part in (ends, route_ends)]
        raise SisStateError(
            f"sample {sample} of the micro-batch has {lengths[0]} tokens but {lengths[1]} rows of routes; the two were "
            "truncated or padded differently on their way from the rollout engine"
        )
    if tuple(routes.shape[1:]) != (layers, experts_per_token):
        raise SisStateError(
            f"the rollout engine's routes have shape {tuple(routes.shape[1:])} per token, expected ({layers}, "
            f"{experts_per_token}): decoder layers and experts per token of the model in training"
        )
    return routes.to(tokens.device)


def checked_presence(routes: torch.Tensor, columns: dict[int, int], experts: int, data: TensorDict) -> torch.Tensor:
    """Which tokens have a route of the rollout engine, after checking every route there is.

    verl carries a missing route as zeros. With two experts or more per token that is no possible choice.

    Args:
        routes: int16 ``[N, C, K]`` of the packed micro-batch, K at least 2.
        columns: Column of each layer that has a router; dense layers are not looked at.
        experts: E.
        data: The micro-batch.

    Returns:
        bool ``[N]``.

    Raises:
        SisStateError: If a token that bears loss has no route, or a route is not K distinct experts.
    """
    used = routes if len(columns) == routes.shape[1] else routes[:, list(columns.values())]
    present = used.any(dim=-1).any(dim=-1)
    _check_choices(used, present, data, experts, list(columns))
    _check_loss_bearing(present, data)
    return present


def _is_identity(packed_index: torch.Tensor, count: int) -> bool:
    """Whether the rows are the packed tokens themselves, so that no copy is needed."""
    return len(packed_index) == count and bool((packed_index == torch.arange(count, device=packed_index.device)).all())


def _check_choices(
    routes: torch.Tensor, present: torch.Tensor, data: TensorDict, experts: int, layers: list[int]
) -> None:
    """Each route must be K distinct experts of the model, in every layer."""
    wrong = torch.empty(routes.shape[:2], dtype=torch.bool, device=routes.device)
    for column in range(routes.shape[1]):  # one layer at a time: the indices of a sort are int64
        ordered = routes[:, column].sort(dim=-1).values
        repeated = (ordered[:, 1:] == ordered[:, :-1]).any(dim=-1)
        wrong[:, column] = (repeated | (ordered[:, 0] < 0) | (ordered[:, -1] >= experts)) & present
    if bool(wrong.any()):
        token, column = wrong.nonzero()[0].tolist()
        sample, position = _locate(token, data)
        raise SisStateError(
            f"the route of sample {sample}, position {position}, decoder layer {layers[column]} is "
            f"{routes[token, column].tolist()}, which are not {routes.shape[-1]} distinct experts of {experts}"
        )


def _check_loss_bearing(present: torch.Tensor, data: TensorDict) -> None:
    """A row that predicts a token with loss must have a route, or another network is trained than was sampled."""
    _, ends = verl_compat.packed(data, "input_ids")
    mask = verl_compat.padded(data, "response_mask").bool().to(present.device)
    bears_loss = torch.zeros_like(present)
    for sample, (end, length) in enumerate(zip(ends, verl_compat.response_lengths(data), strict=True)):
        bears_loss[end - length - 1 : end - 1] = mask[sample, :length]
    lost = bears_loss & ~present
    if bool(lost.any()):
        sample, position = _locate(int(lost.nonzero()[0]), data)
        raise SisStateError(
            f"no route for {int(lost.sum())} tokens that bear loss; the first is at position {position + 1} of sample "
            f"{sample} of the micro-batch, whose row {position} has none. The rollout engine did not return it, or it "
            "was lost between turns"
        )


def _locate(token: int, data: TensorDict) -> tuple[int, int]:
    _, ends = verl_compat.packed(data, "input_ids")
    starts = [0, *ends[:-1]]
    sample = next(i for i, end in enumerate(ends) if token < end)
    return sample, token - starts[sample]

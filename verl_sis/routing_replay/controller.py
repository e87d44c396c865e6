"""Hooks on the routers of a model: replay a target set, or record the native choice, one micro-batch at a time.

Life of a micro-batch: ``arm`` (or ``record``), the forward pass, ``finish_forward``, and, in training, the backward
pass, in which gradient checkpointing runs the routers once more. The target set stays in place until the next
micro-batch or ``disarm``, so that the recomputation sees what the forward pass saw; that it did is checked, because
batched and grouped experts would go on in silence with wrong gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from verl_sis.core.routing import RoutingObserver
from verl_sis.errors import SisStateError
from verl_sis.routing_replay.routers import Router
from verl_sis.routing_replay.targets import Rows, Targets


class RoutingReplay:
    """Replay of expert choices in one model. Without a target set it changes nothing."""

    def __init__(self, routers: list[Router]) -> None:
        """Hook the routers.

        Args:
            routers: All routers of the model (``find_routers``).
        """
        self.routers = routers
        self.layers = tuple(router.layer for router in routers)
        self.experts = routers[0].experts
        self.experts_per_token = routers[0].experts_per_token
        self._targets: Targets | None = None
        self._observer: RoutingObserver | None = None
        self._recorded: dict[int, torch.Tensor] | None = None
        self._rows = 0
        self._fired: dict[int, int] = {}
        self._recomputed_under: dict[int, Targets | None] = {}
        self._remove = [self._install(router) for router in routers]

    @property
    def targets(self) -> Targets:
        """The targets in place."""
        assert self._targets is not None
        return self._targets

    @property
    def active(self) -> bool:
        """Whether routers are being replayed or recorded."""
        return self._targets is not None or self._recorded is not None

    def remove(self) -> None:
        """Take the hooks away; the model is as it was."""
        self.disarm()
        for remove in self._remove:
            remove()
        self._remove = []

    def arm(self, targets: Targets, *, count: bool) -> None:
        """Replay ``targets`` until the next call of ``arm``, ``record`` or ``disarm``.

        Args:
            targets: For the rows of the micro-batch that comes.
            count: Count experts, for the chance-corrected agreement.
        """
        self.disarm()
        self._targets = targets
        self._rows = len(targets.valid)
        self._observer = RoutingObserver(
            self.layers,
            (self.experts, self.experts_per_token),
            targets.rows.region,
            targets.valid,
            count=count,
        )

    def record(self, rows: Rows) -> None:
        """Route natively and keep the choices of the micro-batch that comes."""
        self.disarm()
        self._recorded = {}
        self._rows = len(rows.packed_index)

    def disarm(self) -> None:
        """Route natively and forget everything of the last micro-batch."""
        self._targets = self._observer = self._recorded = None
        self._fired = {}
        self._recomputed_under = {}

    def finish_forward(self) -> RoutingObserver | None:
        """End the forward pass of a micro-batch.

        Returns:
            What was observed under replay; None after a recording.

        Raises:
            SisStateError: If a router did not run exactly once.
        """
        wrong = {layer: self._fired.get(layer, 0) for layer in self.layers if self._fired.get(layer, 0) != 1}
        if wrong:
            raise SisStateError(
                f"expected each router to run once in a forward pass, found {wrong} (decoder layer: runs). The model "
                "skips layers, or something runs its router in pieces"
            )
        return self._observer

    def recording(self) -> torch.Tensor:
        """int16 ``[n, C, K]``: the recorded choices of this rank's rows, by layer, after ``finish_forward``."""
        assert self._recorded is not None
        return torch.stack([self._recorded[layer] for layer in self.layers], dim=1)

    def _install(self, router: Router) -> Callable[[], None]:
        if router.family.method is None:

            def hook(module: nn.Module, _args: Any, output: Any) -> Any:
                if not self._takes_part(router):
                    return None
                scores, weights, ids = output
                ids, weights = self._choose(router, scores, weights, ids)
                return scores, weights, ids

            return router.module.register_forward_hook(hook).remove
        native: Any = getattr(router.module, router.family.method)

        def route(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ids, weights = native(scores)
            return self._choose(router, scores, weights, ids) if self._takes_part(router) else (ids, weights)

        # On the instance, in front of the class's own method, which stays as it is.
        setattr(router.module, router.family.method, route)
        return lambda: delattr(router.module, str(router.family.method))

    def _takes_part(self, router: Router) -> bool:
        """Whether a router is replayed or recorded now; notes a recomputation that is not."""
        if not self.active and in_backward():
            self._recomputed_under[router.layer] = None
        return self.active

    def _choose(
        self, router: Router, scores: torch.Tensor, weights: torch.Tensor, native: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and weights of one router in the forward pass or in its recomputation."""
        if native.shape != (self._rows, self.experts_per_token):
            raise SisStateError(
                f"{router.name} chose for {tuple(native.shape)} (tokens, experts), expected "
                f"{(self._rows, self.experts_per_token)}: the model sees other rows than verl's engine prepared"
            )
        recomputing = in_backward()
        if not recomputing:
            self._fired[router.layer] = self._fired.get(router.layer, 0) + 1
        if self._recorded is not None:
            self._recorded[router.layer] = native.to(torch.int16)
            return native, weights
        targets = self._targets
        assert targets is not None and self._observer is not None
        column = targets.columns[router.layer]
        target = targets.ids[:, column].to(native.dtype)
        ids = torch.where(targets.valid[:, None], target, native)
        replayed = router.weights(router.module, scores, ids).to(weights.dtype)
        if recomputing:
            self._recomputed_under[router.layer] = targets
            return ids, replayed
        self._observer.observe(self.layers.index(router.layer), native, ids)
        return ids, _SameTargets.apply(replayed, self, router, targets)


class _SameTargets(torch.autograd.Function):
    """Identity whose backward checks that a recomputation of its router used the targets of the forward pass.

    It belongs to the graph of the original forward pass, and runs after the recomputation that its layer's gradients
    need, so it knows both target sets for certain.
    """

    @staticmethod
    def forward(
        ctx: Any, weights: torch.Tensor, replay: RoutingReplay, router: Router, targets: Targets
    ) -> torch.Tensor:
        ctx.replay, ctx.router, ctx.targets = replay, router, targets
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        used = ctx.replay._recomputed_under.pop(ctx.router.layer, ctx.targets)
        if used is not ctx.targets:
            raise SisStateError(
                f"{ctx.router.name} was recomputed for the backward pass with other routes than in the forward pass "
                "(those of another micro-batch, or none); its gradients would be wrong. Run the backward pass of a "
                "micro-batch before the next one is armed"
            )
        return gradients[0], None, None, None


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread: a router that runs in it is a recomputation.

    ``torch.utils.checkpoint`` tells the two apart in the same way.
    """
    return torch._C._current_graph_task_id() != -1

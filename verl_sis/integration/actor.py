"""The actor's worker of a run that chose SIS, routing replay, or both; what was not chosen does nothing."""

from typing import Any

from verl_sis.errors import SisConfigError
from verl_sis.integration.worker import SisTrainingWorker
from verl_sis.routing_replay.worker import RoutingReplayWorker


class ActorTrainingWorker(RoutingReplayWorker, SisTrainingWorker):
    """Routing replay around SIS around verl's ``TrainingWorker``: the top-K of the old policy is taken under replay."""

    def set_loss_fn(self, loss_fn: Any) -> None:
        """Configure both from verl's own configuration.

        Args:
            loss_fn: ``partial(ppo_loss, config=actor_config)``.

        Raises:
            SisConfigError: If the configuration asks for what this worker cannot do, or for neither of the two.
        """
        super().set_loss_fn(loss_fn)
        if self._update_pass is None and self.engine_config.router_replay.mode == "disabled":
            raise SisConfigError(
                "actor_rollout_ref.model.external_lib activates verl_sis, but neither SIS nor routing replay is chosen."
                " Type +sis@_global_=grpo or +routing_replay@_global_=r3, or remove the external_lib"
            )

    def reports_mismatch(self) -> bool:
        """SIS reports the mismatch of its own tokens."""
        return self._update_pass is None

"""Imported through ``actor_rollout_ref.model.external_lib``: makes verl's actor use SIS and routing replay here.

verl imports it wherever it builds the model configuration: in each worker before anything is built, but also in the
driver and in the rollout servers. It acts only on ``verl.workers.engine_workers``, once that is imported, so elsewhere
it costs nothing.
"""

from types import ModuleType

import wrapt

import verl_sis.register  # noqa: F401  (a process with plugin discovery off has not loaded it)
from verl_sis import verl_compat
from verl_sis.errors import SisConfigError


def activate(engine_workers: ModuleType) -> None:
    """Make ``ActorRolloutRefWorker`` build its actor as our worker. The reference model keeps verl's own.

    Args:
        engine_workers: The module ``verl.workers.engine_workers``.

    Raises:
        VerlContractError: If verl is not what verl_sis was built for.
        SisConfigError: If another library has replaced the actor's worker class.
    """
    verl_compat.check_contract()
    from verl_sis.integration.actor import ActorTrainingWorker

    current = engine_workers.ActorRolloutRefWorker.actor_worker_cls
    if current not in (engine_workers.TrainingWorker, ActorTrainingWorker):
        raise SisConfigError(
            f"another library has set ActorRolloutRefWorker.actor_worker_cls to {current.__module__}."
            f"{current.__qualname__}; verl_sis cannot be active beside it. Remove it from "
            "actor_rollout_ref.model.external_lib"
        )
    engine_workers.ActorRolloutRefWorker.actor_worker_cls = ActorTrainingWorker


verl_compat.check_plugin_policy()
wrapt.when_imported("verl.workers.engine_workers")(activate)

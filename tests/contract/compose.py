"""Real Hydra composition of verl's own trainer configuration, as ``python -m verl.trainer.main_ppo`` does it."""

from typing import Any

import verl  # noqa: F401  (loads the plugin, which stores the groups)
from hydra import compose, initialize_config_module
from omegaconf import DictConfig


def compose_run(*overrides: str) -> DictConfig:
    """Compose ``ppo_trainer`` with command-line overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def actor_config(config: DictConfig) -> Any:
    """Build the actor's configuration as verl's driver does first (``validate_config``)."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


ENOUGH = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)
"""What verl itself insists on."""

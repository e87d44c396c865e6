"""Real Hydra composition of verl's own trainer configuration, as ``python -m verl.trainer.main_ppo`` does it.

Hydra composes in two steps: it reads the files that the overrides of groups choose, then changes single values. The
first step takes half a second, so it runs once for each choice of groups; the second, Hydra's own too, each time.
"""

import copy
import functools
from typing import Any

import verl  # noqa: F401  (loads the plugin, which stores the groups)
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig


def compose_run(*overrides: str) -> DictConfig:
    """Compose ``ppo_trainer`` with command-line overrides; the caller may change the configuration."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    groups = [override.input_line for override in parsed if _chooses_files(override)]
    config = copy.deepcopy(_compose_once(*groups))
    ConfigLoaderImpl._apply_overrides_to_config([one for one in parsed if not _chooses_files(one)], config)
    return config


def _chooses_files(override: Override) -> bool:
    """Keys of verl's values have dots, names of its groups do not."""
    return override.package is not None or "." not in override.key_or_group


def compose_in_one_go(*overrides: str) -> DictConfig:
    """The same by Hydra alone."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


_compose_once = functools.cache(compose_in_one_go)


def actor_config(config: DictConfig) -> Any:
    """Build the actor's configuration as verl's driver does first (``validate_config``)."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.actor)


ENOUGH = ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",)
"""What verl itself insists on."""

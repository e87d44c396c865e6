"""The entry point ``verl.plugins: verl_sis``: importing this module registers verl_sis in this process.

verl loads it in every process that imports verl. Loading changes nothing of a run: it stores the Hydra groups, so that
``+sis@_global_=...`` composes if and only if the plugin works, and adds the policy loss ``sis`` to verl's registry once
verl imports that registry. Choosing the group makes the difference (see ``verl_sis.integration.activate``).

verl reports a plugin that fails to load at DEBUG level only, so the failure is logged here before it is raised again.
"""

import importlib
import logging
from collections.abc import Iterator
from importlib.resources import files
from types import ModuleType
from typing import cast

import wrapt
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from verl_sis import __version__, verl_compat
from verl_sis.cpu.ledger import is_cpu_platform
from verl_sis.errors import SisConfigError

logger = logging.getLogger("verl_sis")

PROVIDER = "verl_sis"
GROUPS = ("sis", "routing_replay", "cpu")
"""Hydra groups of this plugin; each is a folder of ``verl_sis/conf``."""


def presets(group: str) -> Iterator[tuple[str, DictConfig]]:
    """Presets of a Hydra group: each YAML file, merged over the group's ``_base.yaml`` if there is one.

    Args:
        group: One of ``GROUPS``.

    Yields:
        ``(name, configuration)`` of each preset, by name.
    """
    folder = files("verl_sis").joinpath("conf", group)
    texts = {
        file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8")
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    base = OmegaConf.create(texts.pop("_base", ""))
    for name in sorted(texts):
        yield name, cast(DictConfig, OmegaConf.merge(base, OmegaConf.create(texts[name])))


def register() -> None:
    """Register everything; safe to call again.

    Raises:
        VerlContractError: If verl is not a supported one.
        SisConfigError: If another plugin claims a name of ours.
    """
    verl_compat.check_version()
    for group in GROUPS:
        _store_group(group)
    wrapt.when_imported("verl.trainer.ppo.core_algos")(_register_policy_loss)
    if is_cpu_platform():
        from verl_sis.cpu import patches, platform

        platform.register()
        patches.apply()
        wrapt.when_imported("verl.workers.engine")(_register_cpu_engines)


def _store_group(group: str) -> None:
    """Store the presets of a group in Hydra's ConfigStore, at the root of the composed configuration."""
    store = ConfigStore.instance()
    existing = store.repo.get(group, {})
    foreign = sorted(name for name, node in existing.items() if getattr(node, "provider", None) != PROVIDER)
    if foreign:
        raise SisConfigError(
            f"the Hydra group {group!r} is claimed by another plugin too (presets {foreign}). Uninstall one of the "
            f"two, or exclude it with VERL_USE_EXTERNAL_PLUGINS={verl_compat.PLUGIN_NAME}"
        )
    for name, node in presets(group):
        store.store(group=group, name=name, node=node, package="_global_", provider=PROVIDER)


def _register_cpu_engines(_engine: ModuleType) -> None:
    """Register the CPU engines wherever verl has engines: a critic's process imports no ``external_lib``."""
    importlib.import_module("verl_sis.cpu.engine")


def _register_policy_loss(core_algos: ModuleType) -> None:
    """Add the loss ``sis`` to verl's registry, which would overwrite silently."""
    from verl_sis.integration.policy_loss import claim_policy_loss

    claim_policy_loss(core_algos)


try:
    register()
except Exception:
    logger.exception(
        "verl_sis %s did not load: +sis@_global_=... and loss_mode=sis are unavailable in this process", __version__
    )
    raise

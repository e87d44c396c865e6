"""Recipes as ``python -m verl.trainer.main_ppo --config-dir recipes +RECIPE@_global_=VARIANT`` composes them.

Hydra merges the files of a ``+RECIPE`` after all of verl's, and reading verl's takes half a second. So verl's part is
composed once per engine and the recipe's part alone, both by Hydra, and the second is merged into a copy of the first.
``test_compose`` compares this with Hydra composing both at once, and with the command line.
"""

import functools
import json
import pickle
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from tests.contract.compose import compose_run

RECIPES = Path(__file__).parents[2] / "recipes"
SEARCH_PATH = f"hydra.searchpath=[file://{RECIPES}]"
"""What ``--config-dir recipes`` does, for Hydra's compose API."""

Plugins.instance()  # registers how Hydra reads files and packages
_ALONE = "recipe_alone"
ConfigStore.instance().store(name=_ALONE, node={"defaults": ["_self_", {"model_engine": "dp"}]})


def recipes() -> list[str]:
    """Folders of ``recipes`` that hold a recipe."""
    return sorted(folder.parent.name for folder in RECIPES.glob("*/expected.json"))


@functools.cache
def expected(recipe: str) -> dict[str, Any]:
    """What ``expected.json`` of a recipe says."""
    return json.loads((RECIPES / recipe / "expected.json").read_text())


def variants(recipe: str) -> list[str]:
    """Variants of a recipe."""
    return sorted(expected(recipe)["variants"])


def every_variant() -> list[tuple[str, str]]:
    """All variants of all recipes."""
    return [(recipe, variant) for recipe in recipes() for variant in variants(recipe)]


class _Repository(ConfigRepository):
    """Hydra copies a repository lest sources be added to it later; none are here, and the copy takes half the time."""

    def __deepcopy__(self, memo: dict) -> "_Repository":
        return self


def _recipes_part(groups: list[str]) -> DictConfig:
    """Hydra's two steps, the list of files and their merger, without Hydra's own configuration."""
    path = ConfigSearchPathImpl()
    for provider, source in (("main", "pkg://verl.trainer.config"), ("recipes", f"file://{RECIPES}")):
        path.append(provider, source)
    path.append("schema", "structured://")
    repository = CachingConfigRepository(_Repository(path))
    overrides = OverridesParser.create().parse_overrides(groups)
    files = create_defaults_list(repository, _ALONE, overrides, prepend_hydra=False, skip_missing=False)
    return ConfigLoaderImpl(path)._compose_config_from_defaults_list(files.defaults, repository)


@functools.cache
def _verls_part(engine: str) -> bytes:
    # Pickled, because unpickling takes a fraction of the time of a deep copy.
    return pickle.dumps(compose_run(f"model_engine={engine}"))


@functools.cache
def composed(recipe: str, variant: str, *groups: str) -> DictConfig:
    """Compose a variant, once for all tests: read-only.

    Args:
        recipe: Folder of ``recipes``.
        variant: One of its ``variants``.
        groups: Overrides that select files of groups, e.g. ``math_qwen3_8b/top_k@_global_=k50``.
    """
    part = _recipes_part([f"+{recipe}@_global_={variant}", *groups])
    config = pickle.loads(_verls_part(part.model_engine))
    OmegaConf.set_struct(config, False)
    config.merge_with(part)
    OmegaConf.set_struct(config, True)
    OmegaConf.set_readonly(config, True)
    return config


def composed_at_once(recipe: str, variant: str, *overrides: str) -> DictConfig:
    """The same by Hydra alone, with any overrides."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=[SEARCH_PATH, f"+{recipe}@_global_={variant}", *overrides])


def written(recipe: str, variant: str, *groups: str) -> dict[str, Any]:
    """Composed values by dotted key, as written: interpolations stay, a list is one value."""
    found: dict[str, Any] = {}

    def walk(prefix: str, node: dict) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{key}.", value)
            else:
                found[f"{prefix}{key}"] = value

    walk("", cast(dict, OmegaConf.to_container(composed(recipe, variant, *groups))))
    return found


def value(recipe: str, variant: str, keys: str) -> Any:
    """The resolved value of the first of several keys, ``a|b``, that the variant has: engines name things differently.

    Raises:
        KeyError: It has none of them.
    """
    config = composed(recipe, variant)
    for key in keys.split("|"):
        parent, _, name = key.rpartition(".")
        section = OmegaConf.select(config, parent)
        if section is not None and name in section:
            return section[name]
    raise KeyError(f"{recipe} {variant}: none of {keys}")

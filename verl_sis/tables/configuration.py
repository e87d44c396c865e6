"""The configuration of a run as Hydra wrote it: the only source for what ran.

Hydra writes the composed configuration with its interpolations. They are resolved here, except for environment
variables: those of the reader say nothing about the run, so the name of the variable stands for its value.
"""

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_sis.errors import StudyFileError

_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)[^}]*\}")


_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SafeLoader):
    """YAML as OmegaConf reads what it wrote: nothing is a date. In C where there is C; a configuration is long."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class Configuration:
    """Values of one run's configuration by dotted key."""

    def __init__(self, tree: dict[str, Any], path: Path) -> None:
        """Keep what was read.

        Args:
            tree: The configuration, interpolations unresolved.
            path: Its file, for messages.
        """
        self._tree, self.path = tree, path

    def get(self, key: str, default: Any = None) -> Any:
        """A resolved value; the default if the key is absent or null.

        Raises:
            StudyFileError: The value refers to something that cannot be resolved.
        """
        value: Any = self._tree
        for part in key.split("."):
            # A whole section may be an interpolation.
            if _refers(value):
                break
            value = value.get(part) if isinstance(value, dict) else None
        if _refers(value):
            value = self._resolved(key)
        return default if value is None else value

    @cached_property
    def _omegaconf(self) -> DictConfig:
        """For interpolations only: it takes as long as reading the file."""
        return DictConfig(self._tree)

    def _resolved(self, key: str) -> Any:
        try:
            value = OmegaConf.select(self._omegaconf, key, default=None)
            return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            raise StudyFileError(
                f"{self.path}: expected {key} to be a value, but it does not resolve: {error}. Write the value itself "
                "where the run is configured"
            ) from error

    def need(self, key: str) -> Any:
        """A resolved value that the tables cannot do without.

        Raises:
            StudyFileError: The key is absent or null.
        """
        value = self.get(key)
        if value is None:
            raise StudyFileError(
                f"{self.path}: expected a value for {key}, found none. Tables read the configuration of "
                f"verl.trainer.main_ppo; start the run with {key}=VALUE"
            )
        return value

    def integer(self, key: str, least: int) -> int:
        """An integer.

        Raises:
            StudyFileError: It is none, or less than ``least``.
        """
        value = self.need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise StudyFileError(f"{self.path}: expected {key} to be an integer of at least {least}, found {value!r}")
        return value

    def number(self, key: str) -> float:
        """A number.

        Raises:
            StudyFileError: It is none.
        """
        value = self.need(key)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise StudyFileError(f"{self.path}: expected {key} to be a number, found {value!r}") from error


def read_configuration(path: Path) -> Configuration:
    """Read ``.hydra/config.yaml``.

    Args:
        path: The file.

    Raises:
        StudyFileError: It is not readable, or not a configuration.
    """
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise StudyFileError(f"{path}: expected a configuration that Hydra wrote, but {error}") from error
    if not isinstance(tree, dict):
        raise StudyFileError(f"{path}: expected a configuration that Hydra wrote, found {type(tree).__name__}")
    return Configuration(_without_environment(tree), path)


def _without_environment(node: Any) -> Any:
    """Each ``${oc.env:NAME}`` becomes ``NAME``."""
    if isinstance(node, dict):
        return {key: _without_environment(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_environment(value) for value in node]
    return _ENVIRONMENT.sub(r"\1", node) if isinstance(node, str) else node


def _refers(value: Any) -> bool:
    """Whether a value is, or holds, an interpolation."""
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value

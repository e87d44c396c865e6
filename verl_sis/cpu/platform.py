"""Adds the platform "cpu" to verl's platform registry."""

from verl_sis.errors import VerlContractError

PLATFORM_NAME = "cpu"


def register() -> None:
    """Add `verl_sis.cpu.cpu_platform.PlatformCPU` to verl's registry; repeated calls do nothing.

    Raises:
        VerlContractError: If another class already claims the name "cpu".
    """
    # verl, half imported while it loads its plugins, is needed from here on only: a module that imported it at the top
    # would start the plugins that in turn need the module.
    from verl.plugin.platform.platform_manager import PlatformRegistry

    from verl_sis.cpu.cpu_platform import PlatformCPU

    present = PlatformRegistry.get(PLATFORM_NAME)
    if present is PlatformCPU:
        return
    if present is not None:
        raise VerlContractError(
            f"expected verl to have no platform named '{PLATFORM_NAME}', found "
            f"{present.__module__}.{present.__qualname__}. Unset VERL_PLATFORM, or uninstall the other CPU plugin."
        )
    PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)

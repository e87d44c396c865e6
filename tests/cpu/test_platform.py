"""The platform "cpu" exists if and only if ``VERL_PLATFORM=cpu`` asks for it."""

import pytest
import torch
import verl  # noqa: F401  loads the plugin, on which the platform's class depends
from verl.plugin.platform.platform_manager import PlatformRegistry

from tests.subprocesses import output_of, run_python
from verl_sis.cpu import platform
from verl_sis.cpu.cpu_platform import PlatformCPU
from verl_sis.errors import SisConfigError, VerlContractError

WHICH = """
import verl
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry
print(get_platform().device_name, "cpu" in PlatformRegistry.registered_names())
"""


def test_chosen_by_the_environment_variable():
    assert output_of(WHICH) == "cpu True"


@pytest.mark.parametrize("value", [None, "nvidia"])
def test_absent_otherwise(value):
    code = WHICH.replace("get_platform().device_name", "'-'")
    assert output_of(code, VERL_PLATFORM=value) == "- False"


def test_without_the_plugin_verl_says_so():
    done = run_python(WHICH, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "Unknown platform 'cpu'" in done.stderr


def test_registered_whichever_module_is_imported_first():
    code = """
        from verl_sis.cpu import platform
        platform.register()
        from verl.plugin.platform import get_platform
        from verl_sis.cpu.ledger import installed_patches
        print(get_platform().device_name, "P1" in installed_patches())
    """
    assert output_of(code) == "cpu True"


def test_registering_twice_is_registering_once():
    platform.register()
    platform.register()
    assert PlatformRegistry.get("cpu") is PlatformCPU


def test_a_platform_of_the_same_name_is_not_overwritten(monkeypatch):
    class Foreign(PlatformCPU):
        pass

    monkeypatch.setitem(PlatformRegistry._platforms, "cpu", Foreign)
    with pytest.raises(VerlContractError, match="Foreign"):
        platform.register()


def test_never_chosen_by_probing():
    assert not PlatformCPU().is_platform_available(use_smi_check=True)


def test_device_is_never_an_index():
    cpu = PlatformCPU()
    assert torch.zeros(1).to(cpu.current_device()).device == torch.device("cpu")
    assert cpu.device_module.current_device() == "cpu"


def test_device_module_has_what_verl_calls():
    module = PlatformCPU().device_module
    assert module.is_available() and module.device_count() == 1
    assert 0 < module.memory_allocated() <= module.max_memory_allocated() + 2**20
    available, total = module.mem_get_info()
    assert 0 < available <= total
    assert module.Stream is torch.cpu.Stream, "what is not defined here comes from torch.cpu"


def test_device_module_restores_random_state():
    module = PlatformCPU().device_module
    module.manual_seed(3)
    state = module.get_rng_state()
    first = torch.rand(4)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)


def test_slots_are_pretended_accelerators():
    cpu = PlatformCPU()
    assert cpu.ray_resource_name() == "GPU"
    assert cpu.ray_resource_options(2) == {"num_gpus": 2}
    assert cpu.communication_backend_name() == "gloo"
    assert not cpu.is_ipc_supported()


def test_rollout_engine_gets_the_platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert PlatformCPU().rollout_env_vars()["VERL_PLATFORM"] == "cpu"


def test_engines_are_registered_for_policies_and_critics():
    from verl.workers.engine import EngineRegistry

    import verl_sis.cpu.engine as engine

    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is engine.CPUFSDPEngineWithLMHead
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is engine.CPUFSDPEngineWithValueHead


def test_fsdp1_is_refused_with_the_remedy():
    from types import SimpleNamespace

    import verl_sis.cpu.engine as engine

    with pytest.raises(SisConfigError, match="strategy=fsdp2"):
        engine.CPUFSDPEngineWithLMHead(None, SimpleNamespace(strategy="fsdp"), None, None)

"""The ledger says of each patch what, why, where upstream and until when; and each still fits what it patches."""

import inspect
import re
from types import ModuleType

import pytest

from tests.subprocesses import output_of
from verl_sis.cpu import ledger
from verl_sis.cpu.ledger import Patch, disabled_patches, install_all, replace_on_import
from verl_sis.cpu.patches import LEDGER
from verl_sis.errors import VerlContractError


def patch_ids(patches):
    return [patch.id for patch in patches]


def test_ids_are_unique():
    assert len(set(patch_ids(LEDGER))) == len(LEDGER)


@pytest.mark.parametrize("patch", LEDGER, ids=patch_ids(LEDGER))
def test_entry_is_complete(patch):
    assert re.fullmatch(r"[PV]\d", patch.id)
    assert re.fullmatch(r"(verl|vllm)[\w.]*:[\w.]+", patch.target)
    assert re.search(r"https://github\.com/|(verl|vLLM) \d+\.\d+\.\d+, .*\.py:\d+", patch.upstream)
    assert len(patch.why) > 20 and len(patch.remove_when) > 20


# The heart of each target as the patch assumes it. When upstream changes one of these, this test says which patch to
# look at: adapt it, or delete it if its `remove_when` has come true.
ASSUMED = {
    "P1": 'backend = backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"',
    "P2": None,  # looked up by name, see test_verl_patches
    "P3": None,  # torch's class; what matters is who calls it, see below
    "P4": "self.socket = self.zmq_context.socket(zmq.REQ)",
    "P5": "poll_interval: float = 2.0",
    "P6": 'attn_implementation="flash_attention_2"',
    "P7": "self.zmq_handle = zmq_handle",
    "P8": "self.zmq_handle = zmq_handle",
    "P9": 'self._ray_master_port_range = kwargs.pop("master_port_range", None)',
    "V1": "layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)",
    "V2": """            if self.unquantized_backend == UnquantizedMoeBackend.CPU:""",
    "V3": ") -> tuple[torch.Tensor, torch.Tensor]:\n        return select_experts(",
}


def test_every_patch_states_its_assumption():
    assert set(ASSUMED) == set(patch_ids(LEDGER))


@pytest.mark.parametrize("patch", [p for p in LEDGER if ASSUMED[p.id]], ids=lambda p: p.id)
def test_upstream_still_is_as_assumed(patch):
    source = inspect.getsource(ledger.original(patch.target))
    assert ASSUMED[patch.id] in source, f"{patch.target} has changed: look at {patch.id} ({patch.remove_when})"


def test_upstream_still_pins_memory_of_the_reference_model():
    import verl.workers.engine.fsdp.transformer_impl as module

    assert "CPUOffloadPolicy(pin_memory=True)" in inspect.getsource(module)


def test_upstream_still_names_the_weight_socket_by_the_job_id_alone():
    from verl.workers.rollout.vllm_rollout import utils, vllm_rollout

    name = "ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{%s}-rank-{%s}.sock"
    assert name % ("replica_rank", "trainer_rank") in inspect.getsource(utils)
    assert name % ("self.replica_rank", "local_rank") in inspect.getsource(vllm_rollout)


def test_upstream_still_looks_for_a_port_without_keeping_it():
    from verl.single_controller.ray import base
    from verl.trainer.ppo.v1 import trainer_base

    lookup = inspect.getsource(base.get_master_addr_port._function)
    assert 's.bind(("", 0))' in lookup and 's.bind(("", port))' in lookup and "with socket.socket() as s" in lookup
    assert "master_port_range" not in inspect.getsource(trainer_base), "the trainer has a setting: P9 can go"


def test_upstream_still_packs_experts_on_the_first_load_only():
    (patch,) = (patch for patch in LEDGER if patch.id == "V2")
    source = inspect.getsource(ledger.original(patch.target))
    guarded = source[source.index("if not is_weight_update:") :]
    assert "process_weights_after_loading(layer)" in guarded


def test_upstream_still_removes_linear_weights():
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    source = inspect.getsource(UnquantizedLinearMethod.process_weights_after_loading)
    assert "dispatch_cpu_unquantized_gemm(layer, remove_weight=True)" in source


def test_upstream_still_offers_no_capture_on_a_cpu():
    code = """
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts
        print("supports_routing_replay_capture" in vars(Experts))
    """
    assert output_of(code, VERL_PLATFORM=None).splitlines()[-1] == "False"


def test_disabled_patches_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv(ledger.DISABLE_VARIABLE, " V2, P4,")
    assert disabled_patches() == {"V2", "P4"}


def fake_patch(target, wrap):
    return Patch("X1", target, "why", "upstream", "when", replace_on_import(wrap))


@pytest.fixture
def fresh_ledger(monkeypatch):
    monkeypatch.setattr(ledger, "_installed", set())


def add_module(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(ledger.importlib.import_module("sys").modules, name, module)
    return module


def test_a_patch_is_installed_once_and_remembers_the_original(monkeypatch, fresh_ledger):
    def before():
        return 1

    module = add_module(monkeypatch, "verl_sis_fake_module", value=before)
    patch = fake_patch("verl_sis_fake_module:value", lambda original: lambda: original() + 1)
    install_all([patch])
    install_all([patch])
    assert module.value() == 2
    assert ledger.original(patch.target) is before


def test_a_missing_target_names_the_supported_releases(monkeypatch, fresh_ledger):
    add_module(monkeypatch, "verl_sis_fake_module")
    with pytest.raises(VerlContractError, match=r"gone.*verl==0\.9\.1"):
        install_all([fake_patch("verl_sis_fake_module:gone", lambda original: original)])


def test_nothing_is_patched_without_the_platform():
    code = """
        import verl, verl.utils.distributed as d
        from verl_sis.cpu import patches, vllm_plugin, ledger
        patches.apply(); vllm_plugin.register()
        print(sorted(ledger.installed_patches()), hasattr(d.initialize_global_process_group_ray, "_verl_sis_original"))
    """
    assert output_of(code, VERL_PLATFORM=None).splitlines()[-1] == "[] False"


def test_all_of_verls_patches_are_armed_with_the_platform():
    code = """
        import verl
        from verl_sis.cpu import ledger, patches
        print(sorted(ledger.installed_patches()) == sorted(p.id for p in patches.VERL_PATCHES))
    """
    assert output_of(code).splitlines()[-1] == "True"

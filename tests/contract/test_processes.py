"""How loading and not loading show in a fresh process."""

import pytest

from tests.subprocesses import run_python

MAIN = ["verl.trainer.main_ppo", "--cfg", "job"]


@pytest.mark.parametrize("policy", ["none", "verl-sis"])
def test_without_the_plugin_the_flag_stops_the_run(policy):
    # The CPU platform comes with the plugin too.
    result = run_python([*MAIN, "+sis@_global_=grpo"], VERL_USE_EXTERNAL_PLUGINS=policy, VERL_PLATFORM="")
    assert result.returncode != 0
    assert "sis" in result.stderr
    assert "Could not find 'sis/grpo'" in result.stderr or "config group 'sis' does not exist" in result.stderr


def test_a_typo_in_the_preset_lists_the_presets():
    result = run_python([*MAIN, "+sis@_global_=gprs"])
    assert result.returncode != 0
    for name in ("cispo", "dapo", "grpo", "gspo"):
        assert name in result.stderr


def test_a_plugin_that_cannot_load_says_so_at_error_level():
    result = run_python(
        "from packaging.specifiers import SpecifierSet\n"
        "from verl_sis.verl_compat import checks\n"
        "checks.SUPPORTED_VERL = SpecifierSet('>=7')\n"
        "import verl\n"
        "from hydra.core.config_store import ConfigStore\n"
        "print('group' if 'sis' in ConfigStore.instance().repo else 'no group')\n"
    )
    assert "did not load: +sis@_global_=... and loss_mode=sis are unavailable" in result.stderr
    assert "VerlContractError: verl_sis supports verl >=7" in result.stderr
    assert result.stdout.strip() == "no group"


def test_loading_does_not_import_workers_or_losses():
    result = run_python(
        "import sys, verl\n"
        "assert 'verl_sis.register' in sys.modules\n"
        "print([name for name in ('verl.workers.engine_workers', 'verl.trainer.ppo.core_algos', 'vllm')"
        " if name in sys.modules])\n",
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_the_loss_is_registered_once_verl_imports_its_registry():
    result = run_python(
        "import verl\nfrom verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "print(get_policy_loss_fn('sis').__module__)"
    )
    assert result.stdout.strip() == "verl_sis.integration.policy_loss", result.stderr


def test_activation_in_a_process_that_excludes_the_plugin_fails():
    result = run_python("import verl_sis.integration.activate", VERL_USE_EXTERNAL_PLUGINS="none", VERL_PLATFORM="")
    assert result.returncode != 0
    assert "SisConfigError: VERL_USE_EXTERNAL_PLUGINS='none' keeps verl from loading 'verl_sis'" in result.stderr

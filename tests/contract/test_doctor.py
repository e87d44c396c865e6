"""``verl-sis doctor`` says "ready", or names the fault, its remedy, and exits with 1."""

import pytest
import torch
from typer.testing import CliRunner

from tests.subprocesses import run_python
from verl_sis import __main__, doctor
from verl_sis.errors import SisError


def run_doctor(**variables):
    return run_python(["verl_sis", "doctor"], COLUMNS="300", **variables)


def test_ready_in_this_environment():
    result = run_doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ready: add +sis@_global_=grpo" in result.stdout
    assert result.stdout.count(" ok ") == len(doctor.CHECKS)
    assert "|E[z] - (1 - xi)" in result.stdout, "text in brackets is no markup"


NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        pytest.param({"VERL_PLATFORM": ""}, "VERL_PLATFORM=cpu", marks=NO_CUDA),
        ({"VERL_SIS_CPU_DISABLE": "V2"}, "unset VERL_SIS_CPU_DISABLE"),
    ],
)
def test_a_fault_of_the_environment_is_named_with_its_remedy(variables, remedy):
    result = run_doctor(**variables)
    assert result.returncode == 1, result.stdout
    assert remedy in result.stdout


def test_an_excluded_plugin_is_a_fault_with_a_remedy():
    result = run_doctor(VERL_USE_EXTERNAL_PLUGINS="other", VERL_PLATFORM="")
    assert result.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=verl_sis" in result.stdout
    assert "ready" not in result.stdout


def test_one_fault_does_not_hide_another(monkeypatch):
    def broken():
        raise SisError("first fault")

    def missing():
        raise ImportError("second fault")

    monkeypatch.setattr(doctor, "CHECKS", {"one": broken, "two": missing, "three": lambda: "fine"})
    result = CliRunner().invoke(__main__.app, ["doctor"])
    assert result.exit_code == 1
    for text in ("first fault", "second fault", "fine"):
        assert text in result.output


@pytest.mark.parametrize("fault", ["uniforms", "top-K", "identity"])
def test_the_self_test_can_fail(monkeypatch, fault):
    assert "top-K exact" in doctor.self_test()
    if fault == "uniforms":
        monkeypatch.setattr(doctor.acceptance, "counter_uniforms", lambda *_, **__: torch.zeros(2))
    elif fault == "top-K":
        monkeypatch.setattr(
            doctor.envelope, "top_k_logits", lambda logits, k, **_: (logits[:, :k], torch.zeros(len(logits), k).int())
        )
    else:
        monkeypatch.setattr(
            doctor.acceptance, "acceptance_log_prob", lambda log_ratio, *_, **__: torch.zeros_like(log_ratio)
        )
    with pytest.raises(SisError):
        doctor.self_test()

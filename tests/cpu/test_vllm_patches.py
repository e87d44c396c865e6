"""Each of vLLM's patches, with a real vLLM: without it the documented failure, with it the trainer's policy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_sis.cpu.environment import cpu_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("vllm_after_update.py")


@pytest.fixture
def serve(tmp_path):
    def run(*arguments, disable=""):
        environment = {**cpu_environment(dict(os.environ)), "VERL_SIS_CPU_DISABLE": disable}
        command = [sys.executable, str(PROGRAM), str(tmp_path), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path)

    return run


def result(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_v1_v2_v3_log_probs_and_routes_follow_the_weights(serve):
    found = result(serve("--routes"))
    assert found["before"] < 1e-5
    assert found["after"] < 1e-5
    assert found["differing_routes"] == 0


def test_without_v2_the_policy_is_silently_wrong_after_an_update(serve):
    found = result(serve(disable="V2"))
    assert found["before"] < 1e-5
    assert found["after"] > 1e-3


def test_without_v1_new_weights_find_nothing_to_load_into(serve):
    done = serve(disable="V1")
    assert done.returncode != 0
    assert "weight_loader" in done.stderr


def test_without_v3_vllm_refuses_to_return_routes(serve):
    done = serve("--routes", disable="V3")
    assert done.returncode != 0
    assert "Routed-experts capture is not supported with monolithic MoE kernel" in done.stderr + done.stdout

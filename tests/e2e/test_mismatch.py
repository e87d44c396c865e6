"""On the same responses of a real vLLM in bfloat16: replay lowers the mismatch, and each misalignment is noticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.worker import harness
from verl_sis.cpu.environment import cpu_environment
from verl_sis.errors import SisStateError

PROGRAM = Path(__file__).with_name("vllm_rollout.py")


def as_rollout(conversations):
    """What ``vllm_rollout.py`` has saved as verl's agent loop would hand it on, and its log-probs."""
    rollout = harness.Rollout(
        prompts=[torch.tensor(c["prompt"]) for c in conversations],
        responses=[torch.tensor(c["tokens"]) for c in conversations],
        masks=[torch.tensor(c["mask"]) for c in conversations],
        routes=[aligned(c) for c in conversations],
    )
    return rollout, harness.nested([torch.tensor(c["log_probs"]) for c in conversations])


def aligned(conversation):
    """Routes of the whole sequence, by verl's own agent loop."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    return AgentLoopOutput(
        prompt_ids=conversation["prompt"],
        response_ids=conversation["tokens"],
        response_mask=conversation["mask"],
        routed_experts=conversation["routes"].numpy(),
        metrics=AgentLoopMetrics(),
    ).as_dict()["routed_experts"]


@pytest.fixture(scope="module")
def conversations(routing_world, tmp_path_factory):
    output = tmp_path_factory.mktemp("vllm") / "rollout.pt"
    environment = cpu_environment(dict(os.environ))
    subprocess.run([sys.executable, PROGRAM, routing_world, output], check=True, timeout=900, env=environment)
    return torch.load(output, weights_only=False)


@pytest.fixture(scope="module")
def answers(conversations):
    return as_rollout(conversations["one turn"])


@pytest.fixture
def build(routing_world):
    def build_worker(**replay):
        settings = harness.Settings(
            model=routing_world / "model",
            sis=None,
            replay=replay,
            dtype="bf16",
            micro_batch_size=32,
            learning_rate=0.0,
        )
        return harness.build_worker(settings)

    harness.prepare_environment()
    return build_worker


def metrics_of(worker, rollout, log_probs):
    columns = {"rollout_log_probs": log_probs}
    old = harness.response_log_probs(harness.old_pass(worker, rollout, columns=columns), rollout)
    metrics = harness.update(worker, rollout, old, columns=columns)
    return {name: values[0] for name, values in metrics.items() if name.startswith(("routing/", "mismatch/"))}


def test_replay_lowers_the_mismatch_by_more_than_the_noise_floor(build, answers):
    rollout, log_probs = answers
    found = metrics_of(build(native_pass_every=1), rollout, log_probs)
    print(found)
    assert found["mismatch/tokens"] == found["mismatch/native/tokens"] == sum(map(len, rollout.responses))
    assert found["mismatch/k3"] < found["mismatch/native/k3"] - found["mismatch/floor/k3"]
    assert found["mismatch/abs_log_ratio/mean"] < found["mismatch/native/abs_log_ratio/mean"]
    assert 0.0 < found["routing/disagreement"] < 0.1
    assert found["routing/agreement"] > 0.95
    assert found["routing/missing_tokens"] == 0.0


MISALIGNED = {
    "rows off by one": lambda rows, prompt: rows.roll(1, 0),
    "layers off by one": lambda rows, prompt: rows.roll(1, 1),
    "prompt rows filled": lambda rows, prompt: torch.cat(
        [torch.arange(rows.shape[-1], dtype=torch.int16).expand_as(rows[:prompt]), rows[prompt:]]
    ),
}


@pytest.mark.parametrize("fault", MISALIGNED)
def test_each_misalignment_is_noticed(build, answers, fault):
    """By the alarm, which stops the run; and, with the alarm off, by a mismatch far above that of native routing."""
    rollout, log_probs = answers
    wrong = rollout.select(list(range(len(rollout.responses))))
    wrong.routes = [
        MISALIGNED[fault](rows, len(prompt)) for rows, prompt in zip(rollout.routes, rollout.prompts, strict=True)
    ]
    for rows in wrong.routes:
        rows[-1] = 0
    with pytest.raises(SisStateError, match="belong to other tokens or layers"):
        harness.old_pass(build(), wrong)
    found = metrics_of(build(min_agreement=0.0, native_pass_every=1), wrong, log_probs)
    print(fault, found)
    assert found["mismatch/k3"] > 5 * found["mismatch/native/k3"]


def test_two_turns_keep_the_routes_of_the_first(build, conversations):
    """The engine's second answer carries the routes of the whole prefix, prefix cache and tool tokens included."""
    rollout, log_probs = as_rollout(conversations["two turns"])
    found = metrics_of(build(native_pass_every=1), rollout, log_probs)
    print(found)
    assert found["mismatch/tokens"] == sum(int(mask.sum()) for mask in rollout.masks)
    assert found["routing/missing_tokens"] == 0.0
    assert found["routing/agreement"] > 0.95
    assert found["mismatch/k3"] < found["mismatch/native/k3"]

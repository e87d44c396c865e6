"""Installed and not chosen, verl behaves bit for bit as without us."""

import json

from tests.subprocesses import run_python

PROGRAM = """
import hashlib, json, sys
from pathlib import Path
from tests.worker import harness
harness.prepare_environment()
import torch
torch.set_num_threads(1)
if {plugin!r} == "without":
    import verl
    assert "verl_sis.register" not in sys.modules
    # The CPU platform is not what is under test: without it verl has no device here.
    from verl_sis.cpu import patches, platform
    platform.register()
    patches.apply()
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
assert ("sis" in POLICY_LOSS_REGISTRY) == ({plugin!r} == "with")
worker = harness.build_worker(harness.Settings(model=Path({model!r}), sis=None, micro_batch_size=2))
assert type(worker).__module__ == "verl.workers.engine_workers"
rollout = harness.made_up_rollout([5, 1, 4, 7])
metrics = [harness.step(worker, rollout, mini_batch_size=2, epochs=2) for _ in range(2)]
state = hashlib.sha256()
for parameter in worker.engine.module.parameters():
    state.update(parameter.full_tensor().detach().numpy().tobytes())
kept = [{{name: [float(value) for value in values] for name, values in step.items()
         if name.startswith(("actor/", "grad_norm", "loss"))}} for step in metrics]
print("RESULT" + json.dumps({{"metrics": kept, "weights": state.hexdigest()}}))
"""


def run(model_folder, plugin):
    policy = {"with": "auto", "without": "none"}[plugin]
    program = PROGRAM.format(model=str(model_folder), plugin=plugin)
    result = run_python(program, VERL_USE_EXTERNAL_PLUGINS=policy)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


def test_losses_gradients_and_weights_are_bit_identical_with_and_without_the_plugin(model_folder):
    with_plugin = run(model_folder, "with")
    assert with_plugin == run(model_folder, "without")
    assert len(with_plugin["metrics"][0]["grad_norm"]) == 4

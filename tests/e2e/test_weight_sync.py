"""After every weight update vLLM's policy is the trainer's: the repair without which it is silently another one."""

from tests.subprocesses import output_of


def differences(steps):
    """Largest |p_rollout - p_trainer| of each step's sampled tokens."""
    return [step["training/rollout_probs_diff_max"] for step in steps]


def test_rollout_and_trainer_agree_after_every_update(train):
    steps = train("trainer.total_training_steps=4", "actor_rollout_ref.actor.optim.lr=1e-3")
    assert len(steps) == 4
    assert max(step["training/rollout_probs_diff_mean"] for step in steps) < 1e-6
    # The largest of thousands of tokens: long runs came to 1.4e-5.
    assert max(differences(steps)) < 1e-4
    # The updates moved the policy, so agreement is not that of weights that stood still.
    assert all(step["actor/grad_norm"] > 1e-3 for step in steps)
    # This run did not choose SIS: no trace of it.
    assert not any("sis/" in name or "mismatch/" in name for step in steps for name in step)


def test_without_the_expert_repack_the_rollout_policy_is_silently_wrong(train):
    steps = train("actor_rollout_ref.actor.optim.lr=1e-3", variables={"VERL_SIS_CPU_DISABLE": "V2"})
    # From the first step on: verl sends the trainer's weights before the first rollout, too.
    assert min(differences(steps)) > 1e-2


IN_A_WORKER = """
    import os
    import subprocess
    import sys
    import ray

    @ray.remote
    def raylets():
        inherited = subprocess.check_output([sys.executable, "-c", "import os; print(os.environ['RAY_RAYLET_PID'])"])
        return os.environ["RAY_RAYLET_PID"], inherited.decode().strip(), str(os.getppid())

    ray.init(num_cpus=1, include_dashboard=False)
    print(*ray.get(raylets.remote()), ray.get_runtime_context().get_job_id())
    ray.shutdown()
"""


def test_ray_tells_workers_and_their_children_which_raylet_is_theirs():
    """What tells the weights of two runs on one host apart: the job id does not."""
    own, inherited, parent, job = output_of(IN_A_WORKER).splitlines()[-1].split()
    assert own == inherited == parent
    assert job == "01000000"

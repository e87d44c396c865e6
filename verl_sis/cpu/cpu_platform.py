"""What verl asks of a platform, answered by a machine that has only its CPU.

verl asks for a torch device module, for names of Ray resources and for what its rollout engine may share. The answers
are torch.cpu, pretended "GPU" slots, and shared memory. `verl_sis.cpu.platform` puts this class into verl's registry.
"""

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase

from verl_sis.cpu.platform import PLATFORM_NAME

_ROLLOUT_VARIABLES = ("VERL_PLATFORM", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND")


class CPUDeviceModule(types.ModuleType):
    """``torch.cpu`` with the functions that verl expects of an accelerator's module, such as ``torch.cuda``.

    Memory functions report the process: resident bytes for what is allocated, the machine's for what is free.
    """

    def __getattr__(self, name: str) -> Any:
        """Everything that is not defined here comes from torch.cpu."""
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True

    def device_count(self) -> int:
        """One device per process."""
        return 1

    def current_device(self) -> str:
        """Return "cpu": torch would read an integer as the index of an accelerator."""
        return PLATFORM_NAME

    def set_device(self, device: Any) -> None:
        """Do nothing; there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Do nothing; CPU work is synchronous."""

    def empty_cache(self) -> None:
        """Do nothing; torch keeps no cache of CPU memory."""

    def ipc_collect(self) -> None:
        """Do nothing; weights travel through shared memory."""

    def memory_allocated(self, device: Any = None) -> int:
        """Resident memory of this process in bytes."""
        import psutil  # only read when a run logs memory

        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        """Largest resident memory of this process so far, in bytes."""
        import resource  # absent on Windows, where verl does not run either

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def memory_reserved(self, device: Any = None) -> int:
        """Same as `memory_allocated`: there is no caching allocator."""
        return self.memory_allocated()

    def max_memory_reserved(self, device: Any = None) -> int:
        """Same as `max_memory_allocated`: there is no caching allocator."""
        return self.max_memory_allocated()

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing; the operating system keeps the peak for the life of the process."""

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Available and total memory of the machine in bytes."""
        import psutil  # only read when a run logs memory

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def get_device_name(self, device: Any = None) -> str:
        """Name for reports."""
        return "CPU"

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """State of torch's CPU generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Restore torch's CPU generator."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator; there is only one."""
        torch.manual_seed(seed)


_DEVICE_MODULE = CPUDeviceModule("verl_sis_cpu_device")


class PlatformCPU(PlatformBase):
    """verl's view of a machine that has only its CPU."""

    @property
    def device_name(self) -> str:
        """Device type for tensors and for the engine registry."""
        return PLATFORM_NAME

    @property
    def vendor_name(self) -> str:
        """Vendor for the engine registry."""
        return PLATFORM_NAME

    @property
    def device_module(self) -> types.ModuleType:
        """Stand-in for ``torch.cuda``."""
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        """A CPU is always there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never chosen by probing: only ``VERL_PLATFORM=cpu`` selects this platform."""
        return False

    def current_device(self) -> Any:
        """Return "cpu": verl passes this to ``Tensor.to`` and FSDP, where an integer means an accelerator."""
        return PLATFORM_NAME

    def device_count(self) -> int:
        """One device per process."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing; there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing; CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's CPU generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's CPU generator; there is only one."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing; there is no caching allocator."""

    def empty_cache(self) -> None:
        """Do nothing; there is no caching allocator."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """A CPU has no compute capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Collectives between processes on a CPU."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """The variable in which Ray tells an actor its pretended slots (see `ray_resource_name`)."""
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Do nothing; there is no NVTX."""
        yield

    def profiler_start(self) -> None:
        """Do nothing; there is no device profiler."""

    def profiler_stop(self) -> None:
        """Do nothing; there is no device profiler."""

    def ray_resource_name(self) -> str:
        """Ray's resource for one worker.

        "GPU" although there is none: verl's placement groups and its vLLM replicas read accelerator ids of this
        resource, and ``ray.init(num_gpus=N)`` offers N such slots on any machine.
        """
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Variable that keeps Ray from hiding the pretended slots."""
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        """No device IPC: weights reach the rollout engine through shared memory."""
        return False

    def rollout_env_vars(self) -> dict[str, str]:
        """Variables that the rollout engine's processes must share with this one."""
        return {name: os.environ[name] for name in _ROLLOUT_VARIABLES if name in os.environ}

    def cudart(self) -> None:
        """There is no CUDA runtime."""
        return None

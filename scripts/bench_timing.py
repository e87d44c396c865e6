"""What the benchmarks share: timing in turn, peak memory from the allocator, versions, a record written whole."""

import importlib.metadata
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# The profiler's library announces each start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

Job = Callable[[], object]
"""What is timed."""


def time_in_turn(jobs: dict[Any, Job], rounds: int, device: str) -> dict[Any, list[float]]:
    """Seconds of each job in each round; all jobs once per round, after one round that is not counted."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds: dict[Any, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds + 1):
        for name, job in jobs.items():
            synchronize()
            start = time.perf_counter()
            job()
            synchronize()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def peak_bytes(job: Job, device: str) -> int:
    """Largest memory that a job holds at any moment beyond what was there before, from the allocator itself."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        job()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    held = peak = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def environment() -> dict[str, Any]:
    """Versions and threads, for the record."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "verl", "verl-sis", "tensordict")}
    return {"python": platform.python_version(), "threads": torch.get_num_threads(), **versions}


def write_json(record: dict[str, Any], path: Path) -> None:
    """Write the record; the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(record, stream, indent=1)
    os.chmod(scratch, 0o644)
    os.replace(scratch, path)

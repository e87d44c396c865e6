"""Python in a process of its own that has not imported verl: patches, plugins and platforms load once per process.

The processes are forked from a server that has imported what verl imports from others (torch, transformers, ...), never
verl, vLLM or verl_sis. That saves up to eight seconds a process, and what is under test is still imported afresh.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OF_OTHERS = [
    "torch.distributed.fsdp",
    "torch._inductor.lowering",
    "tensordict",
    "transformers.processing_utils",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "datasets",
    "hydra",
    "ray.dag",
    "peft",
    "fastapi",
    "aiohttp",
    "openai.types.responses",
    "scipy.signal",
]
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(_OF_OTHERS)
_OURS = ("verl", "verl_sis", "vllm")


def _child(program, environment, folder):
    # What the server imported is never garbage here; a search through all of it takes half a second.
    gc.freeze()
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY), stream)
    early = sorted(name for name in sys.modules if name.split(".")[0] in _OURS)
    assert not early, f"imported before the program started: {early}"
    os.environ.clear()
    os.environ.update(environment)
    if isinstance(program, str):
        sys.argv = ["-c"]
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = list(program)
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)


@dataclass
class Running:
    """A program in its process."""

    program: Any
    process: Any
    folder: Path

    def text(self, name):
        """What it has written so far to "out" or "err"."""
        return (self.folder / name).read_text()

    def wait_for(self, printed, timeout=300):
        """Wait until it has printed a text; returns the time at which it printed last."""
        deadline = time.time() + timeout
        while printed not in self.text("out") and self.process.is_alive() and time.time() < deadline:
            time.sleep(0.1)
        assert printed in self.text("out"), self.text("err")[-3000:]
        return (self.folder / "out").stat().st_mtime

    def finish(self, timeout):
        """Wait until it ends."""
        self.process.join(timeout)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired(self.program, timeout, self.text("out"), self.text("err"))
        return subprocess.CompletedProcess(self.program, self.process.exitcode, self.text("out"), self.text("err"))


@contextmanager
def started(program, **variables):
    """Start a program, given as to ``run_python``, and end it with the block."""
    settings = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", **variables}
    environment = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    program = textwrap.dedent(program) if isinstance(program, str) else program
    with tempfile.TemporaryDirectory() as folder:
        for name in ("out", "err"):
            Path(folder, name).touch()
        process = _SERVER.Process(target=_child, args=(program, environment, folder))
        process.start()
        try:
            yield Running(program, process, Path(folder))
        finally:
            process.kill()
            process.join()


def run_python(program, *, timeout=300, **variables):
    """Run source text, or a module with its arguments given as a list (``python -m``), and wait for it.

    ``VERL_PLATFORM`` is "cpu" unless a variable says otherwise; None removes a variable.
    """
    with started(program, **variables) as running:
        return running.finish(timeout)


def output_of(program, **kwargs):
    """Standard output of a program that must succeed."""
    done = run_python(program, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()

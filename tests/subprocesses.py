"""Python in a process of its own that has not imported verl: patches, plugins and platforms load once per process.

The processes are forked from a server that has imported what verl imports from others (torch, transformers, ...), never
verl, vLLM or verl_sis. That saves four seconds a process, and what is under test is still imported afresh.
"""

import gc
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "torch._inductor.lowering",
        "torch._dynamo.testing",
        "tensordict",
        "transformers.processing_utils",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "datasets",
        "hydra",
        "ray",
        "ray.dag",
        "peft",
        "fastapi",
        "aiohttp",
        "openai.types.responses",
        "scipy.signal",
        "zmq.asyncio",
    ]
)
_OURS = ("verl", "verl_sis", "vllm")


def _child(program, environment, folder):
    gc.freeze()
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), stream)
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


def run_python(program, *, timeout=300, **variables):
    """Run source text, or a module with its arguments given as a list (``python -m``), and wait for it.

    ``VERL_PLATFORM`` is "cpu" unless a variable says otherwise; None removes a variable.
    """
    settings = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", **variables}
    environment = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    program = textwrap.dedent(program) if isinstance(program, str) else program
    with tempfile.TemporaryDirectory() as folder:
        process = _SERVER.Process(target=_child, args=(program, environment, folder))
        process.start()
        process.join(timeout)
        timed_out = process.is_alive()
        if timed_out:
            process.kill()
            process.join()
        output, errors = (Path(folder, name).read_text() for name in ("out", "err"))
    if timed_out:
        raise subprocess.TimeoutExpired(program, timeout, output, errors)
    return subprocess.CompletedProcess(program, process.exitcode, output, errors)


def output_of(program, **kwargs):
    """Standard output of a program that must succeed."""
    done = run_python(program, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()

"""Run one verl training run as a child process and leave nothing behind.

    python -m verl_sis.cpu.launch [--log FILE] [--timeout SECONDS] OVERRIDE ...

starts ``python -m verl.trainer.main_ppo OVERRIDE ...`` in the environment of a CPU run, with a Ray directory of its
own. When verl ends, by itself, by an error, by the time limit or because this process is told to end, every process
that descends from it is ended by its id: Ray's daemons and vLLM's engines are adopted by this process when their
parents die, so none can hide.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

from verl_sis.cpu.environment import cpu_environment

_PR_SET_CHILD_SUBREAPER = 36

_POLL_SECONDS = 0.5
_MEMORY_SAMPLE_SECONDS = 5.0
_GRACE_SECONDS = 20.0
_NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    returncode: int
    """verl's exit code; negative for a signal."""

    timed_out: bool
    """Whether the time limit ended it."""

    seconds: float
    """Wall time from the start of the process to the end of its last descendant."""

    peak_bytes: int
    """Largest memory of all its processes together, sampled; pages that they share are counted once."""

    leftovers: tuple[str, ...]
    """Command lines of processes that outlived verl and had to be ended here."""


def run_verl(
    overrides: Sequence[str],
    *,
    log: Path | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run ``python -m verl.trainer.main_ppo`` and wait for it and all its descendants.

    Args:
        overrides: Hydra overrides, e.g. ``["+cpu@_global_=tiny"]``.
        log: File for verl's output; this process's own output if None.
        timeout: Seconds after which the run is ended; None for no limit.
        variables: Environment variables on top of this process's and of those that a CPU run needs.
        on_poll: Called twice a second while the run lasts.

    Returns:
        How it ended. A failing verl is not an error here.
    """
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    return run_command(command, log=log, timeout=timeout, variables=variables, on_poll=on_poll)


def run_command(
    command: Sequence[str],
    *,
    log: Path | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run any command as `run_verl` runs verl; the arguments have the same meaning."""
    with _signals_interrupt(), _ray_directory() as ray_directory, _output(log) as output:
        environment = {**cpu_environment(dict(os.environ)), **(variables or {}), "RAY_TMPDIR": ray_directory}
        _adopt_orphans()
        started = time.monotonic()
        # Its own session: a Ctrl-C reaches this process only, which then ends the children in order.
        child = subprocess.Popen(list(command), env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            timed_out, peak = _watch(child, None if timeout is None else started + timeout, on_poll)
        finally:
            leftovers = _end_descendants(child, ray_directory)
    return RunResult(child.returncode, timed_out, time.monotonic() - started, peak, leftovers)


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Let SIGTERM end the run in order as Ctrl-C does; and Ctrl-C too, which a shell's background jobs ignore."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _ray_directory() -> Iterator[str]:
    """Short-lived directory for one Ray cluster; short, because sockets in it may have paths of 107 bytes at most."""
    directory = tempfile.mkdtemp(prefix="sis-ray-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _output(log: Path | None) -> Iterator[IO[bytes] | None]:
    if log is None:
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as stream:
        yield stream


def _adopt_orphans() -> None:
    """Make this process the new parent of descendants whose own parent dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _watch(child: subprocess.Popen, deadline: float | None, on_poll: Callable[[], None]) -> tuple[bool, int]:
    """Wait for the child; return whether the deadline passed, and the peak memory of its family in bytes."""
    peak, next_sample = 0, 0.0
    while child.poll() is None:
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return True, peak
        if now >= next_sample:
            peak, next_sample = max(peak, _family_bytes(child.pid)), now + _MEMORY_SAMPLE_SECONDS
        on_poll()
        time.sleep(_POLL_SECONDS)
    on_poll()
    return False, peak


def _family_bytes(pid: int) -> int:
    """Proportional set size of a process and its descendants."""
    import psutil

    total = 0
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_full_info().pss
    return total


def _end_descendants(child: subprocess.Popen, ray_directory: str) -> tuple[str, ...]:
    """End the child and everything that descends from it: ask, wait, insist. Return what had outlived the child."""
    import psutil

    if child.poll() is None:
        # Python turns SIGINT into KeyboardInterrupt, on which Ray stops its own daemons.
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    # Ray's workers need a moment to notice that their cluster is gone.
    _, alive = psutil.wait_procs(_descendants(ray_directory), timeout=_NOTICE_SECONDS)
    commands = tuple(_command_line(process) for process in alive)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        _, alive = psutil.wait_procs(alive, timeout=_NOTICE_SECONDS)
    return commands


def _descendants(ray_directory: str) -> list[Any]:
    """Living descendants of this process that belong to the run: they inherited its Ray directory."""
    import psutil

    family = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("RAY_TMPDIR") == ray_directory:
                family.append(process)
    return family


def _command_line(process: Any) -> str:
    import psutil

    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(process.cmdline())[:200] or process.name()
    return "(ended)"


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    app = typer.Typer(add_completion=False)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command(
        context: typer.Context,
        log: Annotated[Path | None, typer.Option(help="File for verl's output; the terminal if left out.")] = None,
        timeout: Annotated[float | None, typer.Option(help="Seconds after which the run is ended.")] = None,
    ) -> None:
        """Run verl on a CPU with the given Hydra overrides, and leave no process behind."""
        result = run_verl(context.args, log=log, timeout=timeout)
        print(
            f"verl_sis.cpu.launch: exit code {result.returncode}, {result.seconds:.0f} s, "
            f"{result.peak_bytes / 2**30:.1f} GiB, {len(result.leftovers)} process(es) had to be ended",
            file=sys.stderr,
        )
        raise typer.Exit(124 if result.timed_out else abs(result.returncode))

    app()


if __name__ == "__main__":
    main()

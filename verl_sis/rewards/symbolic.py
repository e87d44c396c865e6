"""math-verify behind a limit that holds: comparisons run in child processes, which the kernel ends.

math-verify guards itself with ``signal.alarm``. That raises an error outside a main thread, where verl's reward workers
call rewards, and interrupts no computation inside one C function, such as the power of ``9^{9^{9}}``. Here each child
(``verl_sis.rewards.symbolic_child``) arms a timer on its own CPU time whose signal is not handled, so that the kernel
ends the process whatever it does. CPU time, because on a busy machine a limit on wall time would change rewards.

Children are started when first needed, with ``exec``: nothing of the parent (Ray, CUDA, threads) is forked into them.
A child ends when its standard input closes, hence with its parent however that dies; one in the middle of a comparison
ends at its limit.
"""

import atexit
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from enum import Enum, auto

from verl_sis.errors import SisConfigError, SisStateError

CPU_SECONDS = 5.0
"""CPU time of one comparison. math-verify's own default, for parsing and for comparing each, is 5 s of wall time."""

WALL_SECONDS = 120.0
"""Wall time of one comparison, for a machine that swaps or is suspended; the CPU limit is the one that counts."""

MEMORY_BYTES = 4 << 30
"""Address space of a child. One at rest uses 0.1 GB; huge integers may take all there is before the time is over."""

START_SECONDS = 300.0
"""Wall time until a child has imported sympy; long, since file systems of clusters can be slow."""

CHILDREN = 4
"""Processes at most, per reward worker; further comparisons wait for one. Most take milliseconds."""


class Verdict(Enum):
    """What came out of a comparison."""

    EQUAL = auto()
    DIFFERENT = auto()
    SAME_TEXT = auto()
    """The ground truth cannot be read as mathematics; the answer is the same text."""
    OTHER_TEXT = auto()
    """The ground truth cannot be read as mathematics; the answer is another text."""
    TIMED_OUT = auto()
    FAILED = auto()
    """The process died of something else than its limits of time."""


class Checker:
    """A pool of child processes that compare answers; safe to call from many threads."""

    def __init__(self, children: int = CHILDREN, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS):
        """Start nothing yet.

        Args:
            children: Processes at most.
            cpu_seconds: CPU time of one comparison.
            wall_seconds: Wall time of one comparison.
        """
        self._limits = (cpu_seconds, wall_seconds)
        self._free = threading.BoundedSemaphore(children)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._closed = False

    def equivalent(self, ground_truth: str, answer: str) -> Verdict:
        """Compare two bare answers; waits for a free child.

        Args:
            ground_truth: LaTeX without ``$`` and box.
            answer: LaTeX without ``$`` and box.

        Raises:
            SisConfigError: math-verify is not installed.
            SisStateError: The child does not start.
        """
        with self._free:
            with self._lock:
                child = self._idle.pop() if self._idle else None
            # One that died while it was idle, e.g. for lack of memory on the machine, says nothing about the answer.
            if child is None or not child.alive():
                child = _Child(*self._limits)
            verdict = child.compare(ground_truth, answer)
            with self._lock:
                if child.alive() and not self._closed:
                    self._idle.append(child)
                    return verdict
            child.close()
            return verdict

    def close(self) -> None:
        """End the children that are idle; those at work end when they are done."""
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for child in idle:
            child.close()


class _Child:
    """One process and the pipes to it. Used by one thread at a time."""

    def __init__(self, cpu_seconds: float, wall_seconds: float):
        if importlib.util.find_spec("math_verify") is None:
            raise SisConfigError("the rule math_verify needs the package math-verify. Type: pip install math-verify")
        self._wall_seconds = wall_seconds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_sis.rewards.symbolic_child", str(cpu_seconds), str(MEMORY_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # The child finds what the parent finds, also where the parent's path was set by hand.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        if self._line(START_SECONDS) != b"ready\n":
            self.close()
            raise SisStateError(
                f"the process for math-verify did not start (exit code {self._process.returncode}); its message is "
                f"above. Type: {sys.executable} -m verl_sis.rewards.symbolic_child {cpu_seconds} {MEMORY_BYTES}"
            )

    def alive(self) -> bool:
        return self._process.poll() is None

    def compare(self, ground_truth: str, answer: str) -> Verdict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([ground_truth, answer]).encode() + b"\n")
            reply = self._line(self._wall_seconds)
        except BrokenPipeError:
            reply = b""
        if reply is None:
            self.close()
            return Verdict.TIMED_OUT
        if reply:
            return Verdict[reply.decode().strip()]
        return Verdict.TIMED_OUT if self._process.wait() == -signal.SIGPROF else Verdict.FAILED

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> bytes | None:
        """The next line; empty at the end of the output, None if there is none in time."""
        assert self._process.stdout is not None
        # Not `select`, which takes no descriptor above 1023: a Ray worker may have more files open.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                return None
        return self._process.stdout.readline()


_checker: Checker | None = None
_checker_lock = threading.Lock()


def equivalent(ground_truth: str, answer: str) -> Verdict:
    """`Checker.equivalent` of the one checker of this process, made when first needed."""
    global _checker
    with _checker_lock:
        if _checker is None:
            _checker = Checker()
        checker = _checker
    return checker.equivalent(ground_truth, answer)


def _forget() -> None:
    """In a forked process: the pipes belong to the parent, and a lock may be held by a thread that is not here."""
    global _checker, _checker_lock
    _checker, _checker_lock = None, threading.Lock()


@atexit.register
def _close() -> None:
    if _checker is not None:
        _checker.close()


os.register_at_fork(after_in_child=_forget)

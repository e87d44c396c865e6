"""Comparisons that never end, and processes that die, cost one answer its reward and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.rewards import symbolic
from verl_sis.rewards.symbolic import Checker, Verdict


@pytest.fixture(scope="module")
def checker():
    checker = Checker(children=1, cpu_seconds=0.3)
    yield checker
    assert checker.equivalent("5", "5") is Verdict.EQUAL
    process = process_of(checker)
    checker.close()
    assert process.returncode is not None


def process_of(checker):
    (child,) = checker._idle
    return child._process


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hostile", ["9^{9^{9}}", "{" * 400 + "5" + "}" * 400], ids=["power", "braces"])
def test_hostile_answers_time_out(checker, hostile):
    assert checker.equivalent("5", hostile) is Verdict.TIMED_OUT
    assert not checker._idle
    assert checker.equivalent("5", "\\frac{10}{2}") is Verdict.EQUAL


def test_the_wall_limit_ends_what_uses_no_cpu_time(checker):
    assert checker.equivalent("5", "5") is Verdict.EQUAL
    process = process_of(checker)
    os.kill(process.pid, signal.SIGSTOP)
    checker._idle[0]._wall_seconds = 0.05
    assert checker.equivalent("5", "5") is Verdict.TIMED_OUT
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_died_idle_is_replaced(checker):
    assert checker.equivalent("5", "5") is Verdict.EQUAL
    first = process_of(checker)
    first.kill()
    first.wait()
    assert checker.equivalent("5", "6") is Verdict.DIFFERENT
    assert process_of(checker).pid != first.pid


def test_a_process_killed_at_work_is_no_verdict(checker):
    assert checker.equivalent("5", "5") is Verdict.EQUAL
    process = process_of(checker)
    os.kill(process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.05, process.kill)
    killer.start()
    assert checker.equivalent("5", "5") is Verdict.FAILED


def test_memory_is_limited(checker):
    assert checker.equivalent("5", "5") is Verdict.EQUAL
    limits = Path(f"/proc/{process_of(checker).pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert line.split()[3:5] == [str(symbolic.MEMORY_BYTES)] * 2


def test_a_child_that_does_not_start_is_an_error(monkeypatch, capfd):
    monkeypatch.setattr(symbolic, "MEMORY_BYTES", "none")
    with pytest.raises(SisStateError, match="did not start"):
        Checker().equivalent("5", "5")
    assert "invalid literal" in capfd.readouterr().err


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SisConfigError, match="pip install math-verify"):
        Checker().equivalent("5", "5")


ORPHANS = """
import os, signal
from verl_sis.rewards import symbolic
assert symbolic.equivalent("5", "5").name == "EQUAL"
forked = os.fork()
if not forked:
    os._exit(symbolic._checker is not None)
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
assert symbolic.equivalent("5", "6").name == "DIFFERENT"
print(symbolic._checker._idle[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_process_outlives_a_parent_that_is_killed():
    """Also: a fork does not share the pipes, and leaves the parent's process in order."""
    parent = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=60)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    deadline = time.monotonic() + 20
    while alive(int(parent.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(int(parent.stdout))


def alive(pid):
    """Whether a process runs; one that ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

"""A run ends with all its descendants, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from verl_sis.cpu import launch
from verl_sis.cpu.environment import SETTINGS, cpu_environment
from verl_sis.cpu.launch import run_command

# A grandchild in a session of its own, whose parent dies at once: what Ray's daemons look like.
DAEMON = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
"""


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_exit_code_and_output(tmp_path):
    log = tmp_path / "deep" / "run.log"
    result = run_command(python("import sys; print('hello'); sys.exit(3)"), log=log)
    assert result.returncode == 3 and not result.timed_out and result.leftovers == ()
    assert log.read_text() == "hello\n"


def test_orphaned_daemon_is_ended_by_its_id(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_NOTICE_SECONDS", 1.0)
    result = run_command(python(DAEMON, tmp_path / "pid"))
    assert result.returncode == 0
    assert len(result.leftovers) == 1 and "time.sleep(600)" in result.leftovers[0]
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_processes_of_others_are_left_alone():
    ours = subprocess.Popen(python("import time; time.sleep(60)"), start_new_session=True)
    try:
        assert run_command(python("pass")).leftovers == ()
        assert is_running(ours.pid)
    finally:
        ours.kill()
        ours.wait()


def test_time_limit():
    started = time.monotonic()
    result = run_command(python("import time; time.sleep(600)"), timeout=1.0)
    assert result.timed_out and result.returncode != 0
    assert time.monotonic() - started < 30


def test_an_error_of_the_caller_ends_the_run_too(tmp_path):
    marker = tmp_path / "pid"

    def fail_once_started():
        if marker.exists() and marker.read_text():
            raise RuntimeError("disk full")

    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    with pytest.raises(RuntimeError, match="disk full"):
        run_command(python(code, marker), on_poll=fail_once_started)
    assert not is_running(int(marker.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_this_process_ends_the_run_too(tmp_path, number):
    runner = """
        import signal, sys
        from verl_sis.cpu.launch import run_command
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell's background jobs have it
        run_command(sys.argv[1:])
    """
    # It must see the interrupt: a child that inherited an ignored SIGINT could only be killed, after the grace time.
    child = """
        import os, sys, time
        from pathlib import Path
        try:
            Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(600)
        except KeyboardInterrupt:
            Path(sys.argv[2]).touch()
    """
    marker, interrupted = tmp_path / "pid", tmp_path / "interrupted"
    run = subprocess.Popen(python(dedent(runner), *python(dedent(child), marker, interrupted)))
    deadline = time.monotonic() + 60
    while not (marker.exists() and marker.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.send_signal(number)
    assert run.wait(60) != 0
    assert interrupted.exists()
    assert not is_running(int(marker.read_text()))


def test_each_run_has_a_ray_directory_of_its_own_which_goes_with_it(tmp_path):
    code = "import os; print(os.environ['RAY_TMPDIR'], os.path.isdir(os.environ['RAY_TMPDIR']))"
    seen = set()
    for number in range(2):
        run_command(python(code), log=tmp_path / str(number))
        folder, existed = (tmp_path / str(number)).read_text().split()
        assert existed == "True" and not Path(folder).exists()
        assert len(folder) < 40, "Ray puts sockets below it, whose paths may have 107 bytes"
        seen.add(folder)
    assert len(seen) == 2


def test_memory_is_sampled(monkeypatch):
    monkeypatch.setattr(launch, "_MEMORY_SAMPLE_SECONDS", 0.5)
    result = run_command(python("import time; block = bytearray(200 * 2**20); time.sleep(3)"))
    assert result.peak_bytes > 200 * 2**20


def test_a_users_variable_wins_but_the_platform_is_the_cpu():
    environment = cpu_environment({"OMP_NUM_THREADS": "4", "VERL_PLATFORM": "nvidia"})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["VERL_PLATFORM"] == "cpu"
    assert environment["HF_HUB_OFFLINE"] == SETTINGS["HF_HUB_OFFLINE"]


def test_shell_exports_keep_what_is_set():
    script = f'eval "$({sys.executable} -m verl_sis.cpu.environment)"; echo "$OMP_NUM_THREADS $VERL_PLATFORM"'
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "cpu"]

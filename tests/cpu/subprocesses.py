"""Run a piece of Python in a fresh process: patches and platforms are installed once per process."""

import os
import subprocess
import sys
import textwrap


def run_python(code, *, timeout=120, **variables):
    """Run code with ``VERL_PLATFORM=cpu`` unless a variable says otherwise; None removes a variable."""
    settings = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", **variables}
    environment = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def output_of(code, **kwargs):
    """Standard output of code that must succeed."""
    done = run_python(code, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()

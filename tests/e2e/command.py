"""The command line as a user types it."""

import os
import subprocess
import sys


def verl_sis(*arguments, check=True):
    """Run ``python -m verl_sis``; the result of subprocess, whose output is text."""
    command = [sys.executable, "-m", "verl_sis", *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert not check or result.returncode == 0, result.stderr[-5000:]
    return result

"""Environment of all tests: verl on a CPU, no model hub, one thread, no pause for usage reports."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import functools
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "waits: only waits for time to pass; comes last, when it has passed")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("waits") is not None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Several workers (``pytest -n 2``): tests that share something expensive run in one, which then has it once.

    That is the server that forks processes, what Hydra has read, and what a fixture makes for all tests of a module.
    pytest-xdist 3.8 would do this with marks (``--dist loadgroup``), but with pytest 9.2 it overlooks them.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _unit(nodeid)

    return Scheduling(config, log)


@functools.cache
def _unit(nodeid):
    """What runs in one worker: all tests that fork, all that compose, all of one file, or a single one."""
    file = nodeid.partition("::")[0]
    text = (ROOT / file).read_text()
    if "tests.subprocesses" in text or "two_ranks" in text:
        return "tests that fork"
    if "tests.contract.compose" in text:
        return "tests that compose"
    return file if 'scope="module"' in text else nodeid

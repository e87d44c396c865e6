"""Environment of all tests: verl on a CPU, no model hub, one thread, no pause for usage reports."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "waits: only waits for time to pass; comes last, when it has passed")


def pytest_itemcollected(item):
    """Under ``pytest -n 2 --dist loadgroup``, tests that share something expensive run in one worker, which has it once.

    That is the server that forks processes, and what a fixture makes for all tests of a module.
    """
    if "two_ranks" in item.fixturenames or _imports_from(item.module, "tests.subprocesses"):
        item.add_marker(pytest.mark.xdist_group("fork server"))
    elif any(found[-1].scope == "module" for found in item._fixtureinfo.name2fixturedefs.values()):
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("waits") is not None)


def _imports_from(module, name):
    return any(getattr(value, "__module__", None) == name for value in vars(module).values())

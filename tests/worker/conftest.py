"""One model folder and one process group for all tests of a worker in this process, and one more pair of processes."""

import pytest
import torch

from tests.worker import harness, ranks


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Adapters of LoRA start at random ones: else a test's would depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    harness.prepare_environment()
    return harness.build_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def build(model_folder):
    """Builds a worker from the settings that differ."""

    def build_worker(**changes):
        return harness.build_worker(harness.Settings(model=model_folder, **changes))

    return build_worker


@pytest.fixture(scope="package")
def two_ranks():
    """Started once for all tests that need them, and ended after the last test of this folder."""
    started = ranks.TwoRanks()
    yield started
    started.stop()

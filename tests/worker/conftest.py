"""One model folder and one process group for all tests of a worker in this process, and one more pair of processes."""

import pytest

from tests.worker import harness, ranks


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

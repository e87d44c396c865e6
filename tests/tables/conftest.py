"""Recorded runs, written once."""

import pytest

from tests.tables.recorded import write_all
from verl_sis.tables.runs import find_runs


@pytest.fixture(scope="session")
def recorded_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("tables") / "runs"
    write_all(root)
    return root


@pytest.fixture(scope="session")
def recorded(recorded_runs):
    return find_runs([recorded_runs])

"""Environment variables that a recipe's ``run.sh`` sets for it."""

import pytest


@pytest.fixture(autouse=True)
def _tiny_world(monkeypatch):
    monkeypatch.setenv("VERL_SIS_TINY_WORLD", "/tiny_world")

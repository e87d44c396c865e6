"""What verl reads when it is imported: no accelerator, no downloads."""

import os

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""The oldest supported transformers returns probabilities where later ones return logits."""

import os
import subprocess
import sys

import pytest

OLDEST = "5.5.4"

PROGRAM = """
import torch, transformers
assert transformers.__version__ == {version!r}, transformers.__version__
from tests.routing_replay import models, running
for family in models.FAMILIES:
    for dtype in (torch.float32, torch.bfloat16):
        model = models.build(family, dtype=dtype).eval()
        tokens = models.tokens()
        with torch.no_grad():
            native = running.forward(model, tokens)
            replay = running.install(model)
            ids = running.record(model, replay, tokens)
            assert torch.equal(running.replayed(model, replay, tokens, running.targets(replay, ids)), native), family
            other = running.targets(replay, running.random_ids(replay, 24))
            assert not torch.equal(running.replayed(model, replay, tokens, other), native), family
    print("ok", family)
"""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", folder, f"transformers=={OLDEST}"], check=True, timeout=600)
    return folder


def test_self_replay_is_bit_equal_for_every_family(oldest, pytestconfig):
    environment = {**os.environ, "PYTHONPATH": f"{oldest}{os.pathsep}{pytestconfig.rootpath}", "HF_HUB_OFFLINE": "1"}
    code = PROGRAM.format(version=OLDEST)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("ok ") == 8

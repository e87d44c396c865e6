"""Verl's vocab-parallel log-probs are float32-accurate for any dtype of logits: SIS takes its normaliser from them."""

import pytest
import torch

from tests.worker.ranks import TwoRanks

pytest.importorskip("megatron.core", reason="Type: pip install 'megatron-core>=0.16'")
pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_two_shards(dtype, tmp_path):
    from tests.megatron import ranks

    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(64, 96, generator=generator) * 5).to(dtype)
    labels = torch.randint(0, 96, (64,), generator=generator)
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, labels[:, None]).squeeze(1)
    processes = TwoRanks()
    try:
        found = processes.run(tmp_path, ranks.log_probs_of_shards, logits, labels)
    finally:
        processes.stop()
    for verls, ours in found:
        assert verls.dtype == ours.dtype == torch.float32
        assert (verls.double() - exact).abs().max() < 5e-6
        assert (ours.double() - exact).abs().max() < 5e-6

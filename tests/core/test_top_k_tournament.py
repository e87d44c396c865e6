"""The tournament of ``top_k_logits`` at every depth, with blocks that do not fit evenly, ties and odd values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sis.core import envelope
from verl_sis.core.envelope import top_k_logits

from .steady import steady


@pytest.fixture
def no_direct_size(monkeypatch):
    """Lets small rows go through several rounds."""
    monkeypatch.setattr(envelope, "_DIRECT_SIZE", 1)


def assert_top_k(logits: torch.Tensor, k: int) -> None:
    values, ids = top_k_logits(logits, k, chunk_tokens=2)
    assert torch.equal(values, logits.float().topk(k, dim=-1).values)
    assert torch.equal(logits.gather(1, ids.long()).float(), values)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "k"), [(151_936, 10), (151_936, 100), (128_256, 50), (50_257, 1), (5_003, 300)])
def test_real_vocabularies(vocab_size, k, dtype):
    assert_top_k(torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(k)).to(dtype), k)


@steady
@given(vocab_size=st.integers(17, 3000), k=st.integers(1, 12), distinct=st.integers(1, 40), seed=st.integers(0, 1000))
def test_ties_at_any_depth(vocab_size, k, distinct, seed):
    direct_size = envelope._DIRECT_SIZE
    envelope._DIRECT_SIZE = 1
    try:
        generator = torch.Generator().manual_seed(seed)
        assert_top_k(torch.randint(0, distinct, (3, vocab_size), generator=generator).float(), k)
    finally:
        envelope._DIRECT_SIZE = direct_size


@pytest.mark.parametrize("place", [0, 7, 8, 63, 64, 511, 512, 1150, 1151, 1152, 1158])
def test_the_largest_is_found_wherever_it_is(place, no_direct_size):
    # 1159 = 8 * 144 + 7 and 144 = 8 * 18: seven ids past the last block of the first round, none in the second.
    logits = torch.zeros(1, 1159)
    logits[0, place] = 1.0
    assert top_k_logits(logits, 2, chunk_tokens=1)[1][0, 0] == place


def test_infinities_and_nan_come_as_from_topk(no_direct_size):
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    logits[0, [3, 500, 999]] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    logits[1, 4:] = -torch.inf
    values, ids = top_k_logits(logits, 6, chunk_tokens=2)
    torch.testing.assert_close(values, logits.topk(6, dim=-1).values, equal_nan=True, atol=0, rtol=0)
    assert ids[0, :2].tolist() == [999, 3]
    assert set(ids[1, :4].tolist()) == {0, 1, 2, 3}

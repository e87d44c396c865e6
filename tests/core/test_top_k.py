"""``top_k_logits`` and ``select_top_k`` against torch.topk on float64, for both of their code paths."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_sis.core.envelope import log_normalizer, select_top_k, top_k_logits
from verl_sis.errors import SisShapeError

from .steady import steady

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Vocabularies above 512 take the tournament. 1283 and 2049 are not divisible by its 8 blocks.
SHAPES = [(5, 7, 1), (5, 7, 7), (3, 128, 1), (4, 1000, 7), (4, 1000, 8), (3, 1283, 10), (2, 2049, 16), (2, 2048, 2048)]


def random_logits(rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(rows, vocab_size, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab_size", "k"), SHAPES)
def test_values_equal_topk_of_float64_and_ids_point_at_them(rows, vocab_size, k, dtype):
    # bfloat16 has 8 bits: at these sizes many logits tie, so ids are checked by what they point at.
    logits = random_logits(rows, vocab_size, dtype)
    values, ids = top_k_logits(logits, k, chunk_tokens=2)
    assert values.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(values.double(), logits.double().topk(k, dim=-1).values)
    assert torch.equal(logits.gather(1, ids.long()).float(), values)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize(("rows", "vocab_size", "k"), SHAPES)
def test_ids_equal_topk_where_no_logits_tie(rows, vocab_size, k):
    logits = torch.stack([torch.randperm(vocab_size, generator=torch.Generator().manual_seed(r)) for r in range(rows)])
    _, ids = top_k_logits(logits.float(), k, chunk_tokens=2)
    assert torch.equal(ids.long(), logits.topk(k, dim=-1).indices)


@steady
@given(data=st.data(), vocab_size=st.integers(128, 700), seed=st.integers(0, 1000))
def test_blocked_path_is_exact_under_ties(data, vocab_size, seed):
    # Only four distinct logits: nearly everything ties, within blocks, across blocks and in the tail.
    k = data.draw(st.integers(1, vocab_size // 128))
    logits = torch.randint(0, 4, (3, vocab_size), generator=torch.Generator().manual_seed(seed)).float()
    values, ids = top_k_logits(logits, k, chunk_tokens=8)
    assert torch.equal(values, logits.topk(k, dim=-1).values)
    assert torch.equal(logits.gather(1, ids.long()), values)
    assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("place", [0, 31, 32, 1279, 1280, 1282])
def test_largest_logit_is_found_wherever_it_is(place):
    # V = 1283 = 8 * 160 + 3: ids 1280 to 1282 lie past the last full block.
    logits = torch.zeros(1, 1283)
    logits[0, place] = 1.0
    assert top_k_logits(logits, 3, chunk_tokens=1)[1][0, 0] == place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(50, 5), (50, 50), (1283, 10)])
def test_chunk_size_changes_no_bit(vocab_size, k, dtype):
    logits = random_logits(13, vocab_size, dtype)
    sampled = torch.randint(0, vocab_size, (13,), generator=torch.Generator().manual_seed(1))
    whole = select_top_k(logits, sampled, k, chunk_tokens=100)
    for chunk in (1, 4, 13):
        part = select_top_k(logits, sampled, k, chunk_tokens=chunk)
        for name in ("ids", "log_prob", "sampled_log_prob", "contains_sampled"):
            assert torch.equal(getattr(part, name), getattr(whole, name)), (chunk, name)


@pytest.mark.parametrize("given_log_prob", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab_size", "k"), [(40, 1), (40, 12), (40, 40), (1283, 10)])
def test_sampled_token_equals_its_top_k_entry_bit_for_bit(vocab_size, k, dtype, given_log_prob):
    rows = 200
    logits = random_logits(rows, vocab_size, dtype)
    # Half of the sampled tokens are the most likely one, so that every K contains some.
    sampled = torch.randint(0, vocab_size, (rows,), generator=torch.Generator().manual_seed(1))
    sampled[::2] = logits[::2].float().argmax(dim=-1)
    own = None
    if given_log_prob:
        # As if from another kernel: wrong by up to a bfloat16 rounding. The envelope must be wrong by the same.
        own = torch.log_softmax(logits.float(), -1).gather(1, sampled[:, None]).squeeze(1).bfloat16()
    top_k = select_top_k(logits, sampled, k, chunk_tokens=64, sampled_log_prob=own)
    matches = top_k.ids == sampled[:, None]
    assert torch.equal(matches.any(dim=-1), top_k.contains_sampled)
    assert bool(top_k.contains_sampled[::2].float().mean() > 0.5)
    inside = top_k.contains_sampled
    assert torch.equal(top_k.log_prob[matches], top_k.sampled_log_prob[inside])


@pytest.mark.parametrize(("dtype", "vocab_size", "k"), [(torch.float32, 40, 40), (torch.bfloat16, 1283, 10)])
def test_log_probs_are_those_of_float64(dtype, vocab_size, k):
    logits = random_logits(30, vocab_size, dtype)
    sampled = torch.arange(30)
    exact = torch.log_softmax(logits.double(), dim=-1)
    top_k = select_top_k(logits, sampled, k, chunk_tokens=7)
    assert torch.allclose(top_k.sampled_log_prob.double(), exact[torch.arange(30), sampled], rtol=0, atol=3e-6)
    assert torch.allclose(top_k.log_prob.double(), exact.gather(1, top_k.ids.long()), rtol=0, atol=3e-6)
    assert top_k.log_prob.dtype == top_k.sampled_log_prob.dtype == torch.float32


@pytest.mark.parametrize("vocab_size", [40, 1283])
def test_no_tokens_give_empty_columns(vocab_size):
    top_k = select_top_k(torch.zeros(0, vocab_size), torch.zeros(0, dtype=torch.int64), 3, chunk_tokens=4)
    assert top_k.ids.shape == top_k.log_prob.shape == (0, 3)
    assert top_k.ids.dtype == torch.int32
    assert top_k.sampled_log_prob.shape == top_k.contains_sampled.shape == (0,)


@pytest.mark.parametrize("k", [0, -1, 8])
def test_k_outside_the_vocabulary_raises(k):
    with pytest.raises(SisShapeError, match=r"\[1, 7\]"):
        top_k_logits(torch.zeros(2, 7), k, chunk_tokens=4)


@pytest.mark.parametrize("shape", [(7,), (1, 2, 7)])
def test_logits_that_are_not_a_matrix_raise(shape):
    with pytest.raises(SisShapeError, match=r"\[N, V\]"):
        top_k_logits(torch.zeros(shape), 1, chunk_tokens=4)
    with pytest.raises(SisShapeError, match=r"\[N, V\]"):
        log_normalizer(torch.zeros(shape), chunk_tokens=4)


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_sampled_ids_of_another_shape_raise(shape):
    with pytest.raises(SisShapeError, match="sampled_ids"):
        select_top_k(torch.zeros(2, 7), torch.zeros(shape, dtype=torch.int64), 1, chunk_tokens=4)


def test_padded_layout_with_k_1_keeps_its_dimension():
    # Fault of the release: a squeezed K = 1 column broadcast against the tokens.
    top_k = select_top_k(random_logits(4, 9, torch.float32), torch.arange(4), 1, chunk_tokens=4)
    assert top_k.ids.shape == top_k.log_prob.shape == (4, 1)

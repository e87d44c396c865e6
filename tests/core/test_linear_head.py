"""Old top-K, normaliser, envelope and residual mass out of hidden states and an LM head, without whole logits."""

import math
import weakref

import pytest
import torch

from verl_sis.core import envelope
from verl_sis.core.linear_head import LinearHead, current_rows, log_probs_of_rows, old_rows, tokens_of
from verl_sis.errors import SisShapeError

RANGES = [(1, 4), (4, 6), (7, 12)]
"""Rows that predict response tokens: neighbours, a gap, and ranges across the blocks of every size below."""
SAMPLED = torch.tensor([0, 5, 2, 39, 7, 7, 11, 3, 0, 20])


def whole_numbers(seed=0, *, tokens=13, vocab=40, hidden=6, chunk_tokens=4, temperature=2.0):
    """A head whose products are exact in float32, in any order of summation: what differs then is not the product."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-3, 4, (rows, hidden), generator=generator).float() for rows in (tokens, vocab)]
    return LinearHead(*parts, temperature=temperature, chunk_tokens=chunk_tokens)


def dense(head):
    return head.hidden @ head.weight.T / head.temperature


def columns_of(current, old, ranges=RANGES, sampled=SAMPLED, k=5, chunk_tokens=3):
    """Everything that either pass takes, by name."""
    before = old_rows(old, ranges, sampled, k, normalize=True, chunk_tokens=chunk_tokens)
    sampled_log_prob = before.sampled_logit - before.log_normalizer
    top_k = envelope.top_k_from_logits(before.values, before.ids, before.sampled_logit, sampled, sampled_log_prob)
    every = torch.ones_like(sampled, dtype=torch.bool)
    terms, normalizer = current_rows(current, ranges, top_k, sampled, normalized=every, chunk_tokens=chunk_tokens)
    after = envelope.normalize_envelope(terms, normalizer)
    return {**vars(before), **vars(top_k), "now": terms.sampled_logit, "normalizer": normalizer, **vars(after)}


def assert_bit_equal(got, expected):
    for name, values in expected.items():
        assert torch.equal(got[name], values), name


def test_two_tokens_by_hand():
    # Logits over temperature 2: old [1, 0, 2] and [0, 3, -1], now [0, 0, 1] and [0, 1, 1].
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]])
    old = LinearHead(torch.tensor([[2.0, 0.0], [0.0, 6.0]]), weight, temperature=2.0, chunk_tokens=1)
    assert torch.equal(dense(old), torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, -3.0]]))
    sampled = torch.tensor([0, 2])
    before = old_rows(old, [(0, 2)], sampled, 2, normalize=True, chunk_tokens=8)
    assert before.ids.tolist() == [[2, 0], [1, 0]]
    assert before.ids.dtype == torch.int32
    assert before.values.tolist() == [[2.0, 1.0], [3.0, 0.0]]
    assert before.sampled_logit.tolist() == [1.0, -3.0]
    z = [math.log(math.e + 1 + math.e**2), math.log(1 + math.e**3 + math.e**-3)]
    assert before.log_normalizer.tolist() == pytest.approx(z, abs=1e-6)

    top_k = envelope.top_k_from_logits(
        before.values, before.ids, before.sampled_logit, sampled, before.sampled_logit - before.log_normalizer
    )
    assert top_k.contains_sampled.tolist() == [True, False]
    now = LinearHead(torch.tensor([[0.0, -2.0], [2.0, 0.0]]), weight, temperature=2.0, chunk_tokens=1)
    assert torch.equal(dense(now), torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, 2.0]]))
    every = torch.tensor([True, True])
    terms, normalizer = current_rows(now, [(0, 2)], top_k, sampled, normalized=every, chunk_tokens=8)
    after = envelope.normalize_envelope(terms, normalizer)
    # Token 0, V_K = {2, 0}: ratios exp(1 - 2) and exp(0 - 1) before normalisers; token 1, V_K = {1, 0}: exp(0 - 3), e.
    z_now = [math.log(1 + math.e**-1 + math.e), math.log(math.e + 1 + math.e**2)]
    assert normalizer.tolist() == pytest.approx(z_now, abs=1e-6)
    log_envelope = [-1 + z[0] - z_now[0], 1 + z[1] - z_now[1]]
    assert after.log_envelope.tolist() == pytest.approx(log_envelope, abs=1e-6)
    assert after.residual_mass.tolist() == pytest.approx([math.exp(-1 - z_now[0]), math.exp(2 - z_now[1])], abs=1e-6)
    assert terms.sampled_logit.tolist() == [0.0, 2.0]


@pytest.mark.parametrize("chunk_tokens", [1, 2, 5, 13, 512])
def test_the_block_size_does_not_matter(chunk_tokens):
    old, now = (whole_numbers(seed, chunk_tokens=chunk_tokens) for seed in (0, 1))
    got = columns_of(now, old, chunk_tokens=chunk_tokens)
    assert_bit_equal(got, columns_of(dense(now), dense(old)))


def test_neither_does_the_order_of_the_tokens():
    old, now = whole_numbers(0), whole_numbers(1)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(2))
    sampled = torch.arange(13) * 3 % 40

    def shuffled(head):
        return LinearHead(head.hidden[order], head.weight, head.temperature, head.chunk_tokens)

    straight = columns_of(now, old, [(0, 13)], sampled)
    got = columns_of(shuffled(now), shuffled(old), [(0, 13)], sampled[order])
    assert_bit_equal(got, {name: values[order] for name, values in straight.items()})


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-6)])
def test_against_float64(dtype, tolerance):
    """The logits are those of the dtype; what is made of them is exact to float32."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3000, 32, generator=generator).to(dtype)
    old, now = (
        LinearHead(torch.randn(13, 32, generator=generator).to(dtype), weight, temperature=0.7, chunk_tokens=4)
        for _ in range(2)
    )
    sampled = SAMPLED * 70
    got = columns_of(now, old, sampled=sampled, k=50)
    rows = torch.cat([torch.arange(*part) for part in RANGES])
    in_blocks = [torch.cat([head.block(start, min(start + 4, 13)) for start in (0, 4, 8, 12)]) for head in (old, now)]
    assert in_blocks[0].dtype == dtype
    log_old, log_now = (torch.log_softmax(logits[rows].double(), -1) for logits in in_blocks)
    expected = log_old.topk(50)
    torch.testing.assert_close(got["log_prob"].double(), expected.values, rtol=0, atol=2e-5)
    # By id rather than by rank: equal logits of bfloat16 may come in either order.
    torch.testing.assert_close(got["log_prob"].double(), log_old.gather(1, got["ids"].long()), rtol=0, atol=2e-5)
    own = log_old.gather(1, sampled[:, None]).squeeze(1)
    torch.testing.assert_close(got["sampled_log_prob"].double(), own, rtol=1e-6, atol=tolerance)
    at_top_k = log_now.gather(1, got["ids"].long())
    log_envelope = (at_top_k - log_old.gather(1, got["ids"].long())).amax(-1)
    torch.testing.assert_close(got["log_envelope"].double(), log_envelope, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(got["residual_mass"].double(), 1 - at_top_k.exp().sum(-1), rtol=0, atol=tolerance)


def test_only_some_tokens_are_normalised():
    old, now = whole_numbers(0), whole_numbers(1)
    before = old_rows(old, RANGES, SAMPLED, 5, normalize=False, chunk_tokens=3)
    assert before.log_normalizer is None
    top_k = envelope.top_k_from_logits(
        before.values, before.ids, before.sampled_logit, SAMPLED, torch.full((10,), -1.0)
    )
    some = torch.tensor([True, False] * 5)
    _, normalizer = current_rows(now, RANGES, top_k, SAMPLED, normalized=some, chunk_tokens=3)
    rows = torch.cat([torch.arange(*part) for part in RANGES])
    expected = torch.where(some, torch.logsumexp(dense(now)[rows], -1), 0.0)
    torch.testing.assert_close(normalizer, expected)
    _, none = current_rows(now, RANGES, top_k, SAMPLED, normalized=None, chunk_tokens=3)
    assert none is None


def test_a_rank_without_response_tokens():
    got = columns_of(whole_numbers(1), whole_numbers(0), [], torch.zeros(0, dtype=torch.int64))
    assert got["ids"].shape == got["log_prob"].shape == (0, 5)
    assert all(len(values) == 0 for values in got.values())


@pytest.mark.parametrize("rows", [[], [3], [1, 2, 3, 7, 8, 12]])
def test_log_probs_of_rows(rows):
    head, rows = whole_numbers(), torch.tensor(rows, dtype=torch.int64)
    parts = list(log_probs_of_rows(head, rows, chunk_tokens=2))
    expected = torch.log_softmax(dense(head)[rows], -1)
    assert torch.equal(torch.cat([log_prob for _, log_prob in parts]), expected)
    for part, log_prob in parts:
        assert torch.equal(log_prob, expected[part])


def test_one_block_at_a_time_and_no_graph(monkeypatch):
    alive, most = [], []
    block = LinearHead.block

    def watched(head, start, stop):
        if stop > start:
            most.append(sum(reference() is not None for reference in alive))
        made = block(head, start, stop)
        assert not made.requires_grad
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(LinearHead, "block", watched)
    old, now = whole_numbers(0), whole_numbers(1)
    now.hidden.requires_grad_()
    got = columns_of(now, old)
    list(log_probs_of_rows(now, torch.arange(13), chunk_tokens=2))
    assert len(most) == 3 + 3 + 4, "no block is made twice"
    assert max(most) == 0, "each is gone when the next is made"
    assert not any(values.requires_grad for values in got.values())


def test_blocks_without_a_wanted_row_are_not_made(monkeypatch):
    made = []
    block = LinearHead.block
    monkeypatch.setattr(
        LinearHead, "block", lambda head, start, stop: made.append((start, stop)) or block(head, start, stop)
    )
    old_rows(whole_numbers(), [(1, 3), (9, 11)], SAMPLED[:4], 2, normalize=False, chunk_tokens=3)
    assert [at for at in made if at != (0, 0)] == [(0, 4), (8, 12)]


def test_shapes_are_checked():
    with pytest.raises(SisShapeError, match=r"expected hidden states \[N, H\] and a weight \[V, H\], found \(2, 3\)"):
        LinearHead(torch.zeros(2, 3), torch.zeros(5, 4), 1.0, 4)
    with pytest.raises(SisShapeError, match=r"sampled_ids must be \(10,\), one per row, got \(9,\)"):
        old_rows(whole_numbers(), RANGES, SAMPLED[:9], 2, normalize=False, chunk_tokens=3)


def test_tokens_of_keeps_the_columns_together():
    got = columns_of(whole_numbers(1), whole_numbers(0))
    top_k = envelope.TopK(*(got[name] for name in ("ids", "log_prob", "sampled_log_prob", "contains_sampled")))
    some = tokens_of(top_k, torch.tensor([4, 1]))
    for name, values in vars(some).items():
        assert torch.equal(values, got[name][[4, 1]]), name

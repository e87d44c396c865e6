"""``log_normalizer`` against float64, and against torch.logsumexp where exponentials overflow or vanish."""

import pytest
import torch

from verl_sis.core.envelope import log_normalizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = float("inf"), float("nan")
SPECIAL_ROWS = {
    "plus infinity": [0.0, INF, 1.0, -INF],
    "two infinities": [INF, INF, 1.0, 2.0],
    "one usable entry": [-INF, -INF, 0.5, -INF],
    "nothing usable": [-INF, -INF, -INF, -INF],
    "not a number": [0.0, NAN, 1.0, 2.0],
    "not a number beside infinity": [NAN, INF, 0.0, -INF],
    "overflow": [300.0, 299.0, 0.0, -300.0],
    "overflow of the sum alone": [88.5, 88.5, 88.5, 88.5],
    "underflow": [-300.0, -301.0, -299.0, -1000.0],
    "nearly underflow": [-60.0, -60.0, -100.0, -104.0],
    "ordinary": [1.0, 2.0, 3.0, -4.0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_equals_float64(dtype, chunk):
    generator = torch.Generator().manual_seed(0)
    logits = (6 * torch.randn(7, 5003, generator=generator)).to(dtype)
    logits[:, ::7] = -INF
    exact = torch.logsumexp(logits.double(), dim=-1)
    found = log_normalizer(logits, chunk_tokens=chunk)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, atol=3e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECIAL_ROWS)
def test_special_rows_equal_logsumexp(name, dtype):
    logits = torch.tensor([SPECIAL_ROWS[name]], dtype=dtype)
    found = log_normalizer(logits, chunk_tokens=4)
    torch.testing.assert_close(found, torch.logsumexp(logits.float(), dim=-1), equal_nan=True, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_special_rows_do_not_touch_their_neighbours(chunk):
    logits = torch.tensor([row for special in SPECIAL_ROWS.values() for row in (special, SPECIAL_ROWS["ordinary"])])
    found = log_normalizer(logits, chunk_tokens=chunk)
    torch.testing.assert_close(found, torch.logsumexp(logits, dim=-1), equal_nan=True, atol=1e-6, rtol=1e-6)
    ordinary = torch.logsumexp(torch.tensor(SPECIAL_ROWS["ordinary"]), dim=-1)
    torch.testing.assert_close(found[1::2], ordinary.expand(len(SPECIAL_ROWS)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_rows_equal_those_of_the_whole(chunk, dtype):
    # Among them rows that take the long way, and one row twice.
    ordinary = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    logits = torch.cat([torch.tensor(list(SPECIAL_ROWS.values())), ordinary]).to(dtype)
    rows = torch.tensor([12, 6, 0, 12, 8, 14])
    whole = log_normalizer(logits, chunk_tokens=100)
    assert torch.equal(log_normalizer(logits, rows, chunk_tokens=chunk), whole[rows])
    assert log_normalizer(logits, rows[:0], chunk_tokens=chunk).shape == (0,)


@pytest.mark.parametrize("offset", [-200.0, -46.0, 40.0, 80.0, 200.0])
def test_a_common_offset_of_all_logits_passes_through(offset):
    # Logits are defined up to a constant, and some models learn a large one.
    logits = torch.randn(4, 2000, generator=torch.Generator().manual_seed(1)).double()
    exact = torch.logsumexp(logits, dim=-1) + offset
    found = log_normalizer((logits + offset).float(), chunk_tokens=4)
    torch.testing.assert_close(found.double(), exact, atol=3e-5, rtol=0)


def test_keeps_no_graph_and_leaves_the_logits_alone():
    logits = torch.randn(3, 50, requires_grad=True)
    before = logits.detach().clone()
    assert not log_normalizer(logits, chunk_tokens=2).requires_grad
    assert torch.equal(logits.detach(), before)

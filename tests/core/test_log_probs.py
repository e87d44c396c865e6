"""``log_probs_in_chunks`` and ``entropy``: against float64, for any chunk, without a graph."""

import math

import pytest
import torch

from verl_sis.core.log_probs import entropy, log_probs_in_chunks
from verl_sis.errors import SisShapeError

from ..reference.policies import logit_pair

INF = math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chosen_rows_equal_float64(chunk, dtype):
    logits = logit_pair(10, 50, drift=0.0, seed=2)[0].to(dtype).requires_grad_()
    rows = torch.tensor([7, 0, 0, 9, 3, 2, 1])
    exact = torch.log_softmax(logits[rows].double(), dim=-1)
    chunks = list(log_probs_in_chunks(logits, rows, chunk_tokens=chunk))
    assert [index for part, _ in chunks for index in range(len(rows))[part]] == list(range(len(rows)))
    found = torch.cat([log_prob for _, log_prob in chunks])
    assert found.dtype == torch.float32 and not found.requires_grad
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(entropy(found).double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=2e-6)


def test_no_rows_give_one_empty_chunk():
    ((part, log_prob),) = log_probs_in_chunks(torch.zeros(4, 9), torch.arange(0), chunk_tokens=2)
    assert log_prob.shape == (0, 9)
    assert len(torch.arange(0)[part]) == 0


def test_entropy_by_hand():
    # A fair coin among tokens of which two are impossible: log 2. NaN stays.
    log_prob = torch.tensor([[math.log(0.5), -INF, math.log(0.5), -INF], [0.0, -INF, -INF, -INF], [math.nan] * 4])
    assert entropy(log_prob).tolist()[:2] == pytest.approx([math.log(2), 0.0])
    assert math.isnan(float(entropy(log_prob)[2]))


def test_another_shape_is_refused():
    with pytest.raises(SisShapeError, match=r"logits must be \[N, V\]"):
        list(log_probs_in_chunks(torch.zeros(2, 3, 4), torch.arange(2), chunk_tokens=2))

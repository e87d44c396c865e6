"""Rows of Megatron's logits: positions of response tokens on a context-parallel rank, without megatron-core."""

import pytest
import torch

from tests.worker import harness
from verl_sis.integration.megatron import MegatronLayout


@pytest.fixture(scope="module")
def data():
    """Two sequences, prompts of 2 and 1 tokens, responses of 3 and 2: packed tokens 0..4 and 5..7."""
    from verl.utils import tensordict_utils as tu

    rollout = harness.Rollout(
        prompts=[torch.tensor([10, 11]), torch.tensor([20])],
        responses=[torch.tensor([12, 13, 14]), torch.tensor([21, 22])],
    )
    return tu.get_tensordict(rollout.columns(), non_tensor_dict={})


def test_packed_rows_without_context_parallelism(data):
    layout = MegatronLayout.of_rows(data, torch.tensor([0, 1, 2, 3, 4, -1, 5, 6, 7, -1]))
    assert layout.token_ids.tolist() == [12, 13, 14, 21, 22]
    assert layout.rows.tolist() == [1, 2, 3, 6, 7]
    assert layout.local_ranges() == [(1, 4), (6, 8)]


def test_padded_rows(data):
    """[B, S] = [2, 6], row by row."""
    layout = MegatronLayout.of_rows(data, torch.tensor([0, 1, 2, 3, 4, -1, 5, 6, 7, -1, -1, -1]))
    assert layout.rows.tolist() == [1, 2, 3, 6, 7]
    spread = layout.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])).view(2, 6)
    assert spread.tolist() == [[0, 1, 2, 3, 0, 0], [4, 5, 0, 0, 0, 0]]


def test_rows_of_two_context_parallel_ranks(data):
    """Sequences padded to 8 and 4: rank 0 has 0 1 | 6 7 and 0 | 3, rank 1 has 2 3 | 4 5 and 1 | 2."""
    first = MegatronLayout.of_rows(data, torch.tensor([0, 1, -1, -1, 5, -1]))
    second = MegatronLayout.of_rows(data, torch.tensor([2, 3, 4, -1, 6, 7]))
    assert first.rows.tolist() == [1, -1, -1, 4, -1]
    assert first.local_ranges() == [(1, 2), (4, 5)]
    assert second.rows.tolist() == [-1, 0, 1, -1, 4]
    assert second.local_ranges() == [(0, 2), (4, 5)]
    assert (first.local() ^ second.local()).all(), "each token is predicted on one rank"


def test_a_rank_without_response_tokens(data):
    layout = MegatronLayout.of_rows(data, torch.tensor([0, -1]))
    assert layout.local_ranges() == []
    assert layout.local_rows().tolist() == []
    assert layout.scatter(torch.zeros(0)).tolist() == [0, 0]

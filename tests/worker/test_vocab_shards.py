"""Two ranks that share the vocabulary get what one rank with all of it gets."""

import pytest
import torch

from tests.worker import vocab_shards
from tests.worker.vocab_shards import Case
from verl_sis.core.vocab_parallel import VocabShard, local_columns
from verl_sis.errors import SisShapeError

NAN, INF = float("nan"), float("inf")

CASES = {
    "even": Case(12, 6, 4),
    "odd vocabulary": Case(13, 7, 4),
    "padded vocabulary": Case(13, 8, 5),
    "a shard of padding alone": Case(8, 8, 3),
    "a shard of padding alone, whole vocabulary": Case(7, 9, 7),
    "K of the whole vocabulary": Case(13, 7, 13),
    "K above the columns of a shard": Case(10, 8, 9),
    "K of one": Case(13, 7, 1),
    "large enough for the tournament": Case(1501, 800, 5),
    "bfloat16": Case(13, 7, 4, dtype=torch.bfloat16, scale=0.7),
    "padding of NaN": Case(13, 8, 5, pad_logit=NAN),
    "filtered by the sampler": Case(12, 6, 9, filtered=(0, 1, 2, 3, 7)),
    "NaN on the first rank": Case(12, 6, 12, spoiled=((3, 2, NAN),)),
    "NaN on the second rank": Case(12, 6, 12, spoiled=((3, 8, NAN), (0, 11, -INF))),
    "infinite": Case(12, 6, 12, spoiled=((4, 1, INF), (7, 9, -INF))),
}


@pytest.fixture(scope="module")
def results(two_ranks, tmp_path_factory):
    of_ranks = two_ranks.run(tmp_path_factory.mktemp("shards"), vocab_shards.on_rank, list(CASES.values()))
    return {name: [found[place] for found in of_ranks] for place, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_as_one_rank(results, name):
    case = CASES[name]
    old, current, sampled = vocab_shards.policies(case)
    expected = vocab_shards.everything(VocabShard.whole(case.vocab_size), old, current, sampled, case.k)
    first, second = results[name]
    for way in first:
        assert_same(first[way], expected, bfloat16=case.dtype == torch.bfloat16)
        for field, value in first[way].items():
            assert value.equal(second[way][field]) or torch.isnan(value).any(), f"ranks differ in {field}"
    assert ("dtensor" in first) == (case.width == -(-case.vocab_size // 2))


def assert_same(got, expected, *, bfloat16):
    if not bfloat16:  # equal logits are frequent there, and their order is free
        # Tokens that the sampler removed, of logit -inf, may stand at the end in any order.
        ids = [torch.where(found["log_prob"] > -torch.inf, found["ids"], -1) for found in (got, expected)]
        assert ids[0].equal(ids[1])
        assert got["contains_sampled"].equal(expected["contains_sampled"])
    assert got["ids"].dtype == torch.int32
    torch.testing.assert_close(got["sampled_logit"], expected["sampled_logit"], rtol=0, atol=0, equal_nan=True)
    depends_on_ties = {"log_envelope", "log_mass", "residual_mass"} if bfloat16 else set()
    for field in got.keys() - {"ids", "contains_sampled", "at_top_k"} - depends_on_ties:
        torch.testing.assert_close(got[field], expected[field], rtol=2e-6, atol=2e-6, equal_nan=True, msg=field)


def test_padded_columns_never_enter(results):
    for name in ("padded vocabulary", "padding of NaN", "a shard of padding alone"):
        case, (first, _) = CASES[name], results[name]
        assert first["shard"]["ids"].min() >= 0
        assert first["shard"]["ids"].max() < case.vocab_size
        assert first["shard"]["residual_mass"].isfinite().all(), "the padding's logit is 10000 or NaN"


def test_by_hand():
    """Four ids in two shards of three columns: pi_old = (.4, .3, .2, .1), pi = (.1, .2, .3, .4), K = 2, y = id 1."""
    shards = [VocabShard.split(4, 3, rank=rank, size=2, group=None) for rank in (0, 1)]
    assert [(shard.start, shard.columns, shard.vocab_size) for shard in shards] == [(0, 3, 4), (3, 1, 4)]
    assert VocabShard.split(4, 4, rank=1, size=2, group=None).columns == 0
    whole = VocabShard.whole(4)
    old, current = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log(), torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    padded = [torch.nn.functional.pad(logits, (0, 2), value=50.0) for logits in (old, current)]
    values, ids = whole.top_k_logits(padded[0], 2, chunk_tokens=8)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(values.exp(), torch.tensor([[0.4, 0.3]]))
    torch.testing.assert_close(whole.log_normalizer(padded[1], chunk_tokens=8), torch.zeros(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("k", [0, 5])
def test_k_outside_of_the_vocabulary(k):
    with pytest.raises(SisShapeError, match=rf"top-K must lie in \[1, 4\], got {k}"):
        VocabShard.whole(4).top_k_logits(torch.zeros(1, 6), k, chunk_tokens=1)


def test_shapes_that_do_not_fit():
    with pytest.raises(SisShapeError, match="2 shards of 3 columns cannot hold a vocabulary of 7 tokens"):
        VocabShard.split(7, 3, rank=0, size=2, group=None)
    with pytest.raises(SisShapeError, match=r"\[N, at least 4\] on this rank, got \(1, 3\)"):
        VocabShard.whole(4).log_normalizer(torch.zeros(1, 3), chunk_tokens=1)


def test_a_dtensor_sharded_otherwise_is_refused(results):
    """Rows of a DTensor belong to sequence parallelism, which the layout knows, not the vocabulary."""
    from torch.distributed.tensor import Partial, Shard

    class Sharded:
        """What ``local_columns`` reads before it refuses."""

        shape, ndim = torch.Size([2, 4]), 2

        def __init__(self, *placements):
            self.placements = placements

    for placements in ((Shard(0),), (Partial(),), (Shard(1), Shard(1))):
        with pytest.raises(SisShapeError, match="expected logits sharded over the vocabulary alone"):
            local_columns(Sharded(*placements))

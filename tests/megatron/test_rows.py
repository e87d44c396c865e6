"""Which token stands in which row of Megatron's logits, against the rows that verl itself feeds, for each rank."""

import dataclasses

import pytest
import torch

pytest.importorskip("megatron.core", reason="Type: pip install 'megatron-core>=0.16'")

from tests.worker import harness
from verl_sis import verl_compat
from verl_sis.integration.megatron import MegatronLayout

LENGTHS = [5, 2, 4, 7]


@pytest.fixture
def ranks_of(monkeypatch):
    """Makes this process any rank of a model-parallel group; verl's layout asks for nothing else."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from verl.models.mcore import util

    @dataclasses.dataclass
    class WithPartitionMode(PackedSeqParams):
        """What later versions of megatron-core have, and the contiguous layout of verl needs."""

        cp_partition_mode: str = "zigzag"

    def become(tensor, context, rank):
        monkeypatch.setattr(util, "PackedSeqParams", WithPartitionMode)
        monkeypatch.setattr(util, "_PACKED_SEQ_PARAMS_HAS_CP_PARTITION_MODE", True)
        monkeypatch.setattr(util.mpu, "get_tensor_model_parallel_world_size", lambda: tensor)
        monkeypatch.setattr(util.mpu, "get_context_parallel_world_size", lambda: context)
        monkeypatch.setattr(util.mpu, "get_context_parallel_rank", lambda: rank)

    return become


@pytest.fixture(scope="module")
def data():
    from verl.utils import tensordict_utils as tu

    return tu.get_tensordict(harness.made_up_rollout(LENGTHS).columns(), non_tensor_dict={})


def fed_tokens(data, data_format, cp_layout):
    """The tokens that verl feeds, row by row."""
    from verl.models.mcore import util

    if data_format == "thd":
        return util.preprocess_thd_engine(data["input_ids"], pre_process=True, cp_layout=cp_layout)[0].flatten()
    return util.preprocess_bshd_engine(data["input_ids"], pre_process=True)[0].flatten()


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("layout", [("thd", "zigzag"), ("thd", "contiguous"), ("bshd", "zigzag")])
def test_rows_are_those_that_verl_feeds(ranks_of, data, tensor, context, layout):
    tokens = data["input_ids"].values()
    seen = torch.zeros(len(tokens), dtype=torch.int64)
    predicted = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    for rank in range(context):
        ranks_of(tensor, context, rank)
        rows = verl_compat.megatron_rows(data, *layout)
        fed = fed_tokens(data, *layout)
        holds = rows >= 0
        assert fed[holds].equal(tokens[rows[holds]])
        assert not fed[~holds].any(), "verl pads with 0, which is none of the tokens here"
        seen += torch.bincount(rows[holds], minlength=len(tokens))
        predicted += MegatronLayout.of_rows(data, rows).local()
    assert (seen == 1).all(), "each token stands on one rank"
    assert (predicted == 1).all(), "each response token is predicted on one rank"

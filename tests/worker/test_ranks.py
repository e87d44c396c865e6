"""One answer on every layout of ranks: data parallel 1 and 2, Ulysses sequence parallel 1 and 2 (gloo processes).

The layouts with fused kernels are held against one rank without: of an LM head that is sharded over both ranks, and of
slices of the packed tokens.
"""

import pytest

from tests.worker import fused, harness, ranks, recorder
from tests.worker.dumps import assert_dumps_are_those_of_one_rank, dumped
from tests.worker.ranks import EPOCHS
from tests.worker.ulysses_on_cpu import NAME

LENGTHS = [5, 2, 4, 7, 3, 6, 1, 8]
DATA_PARALLEL = ("data parallel", "data parallel, dynamic batches", "data parallel, fused kernels")
SEQUENCE_PARALLEL = ("sequence parallel", "sequence parallel, fused kernels")


@pytest.fixture(scope="module")
def rollout():
    return harness.made_up_rollout(LENGTHS)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Where the layouts dump their tokens, each to a folder of its own; dynamic batches do not dump."""
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def results(model_folder, rollout, dumps, two_ranks, tmp_path_factory):
    def settings(**changes):
        return harness.Settings(model=model_folder, **changes)

    under_ulysses = settings(
        sis=dumped(dumps / "sequence parallel"),
        model_overrides={"override_config": {"attn_implementation": NAME}},
        engine={"ulysses_sequence_parallel_size": 2},
    )
    under_ulysses_fused = settings(
        model_overrides={**under_ulysses.model_overrides, **fused.FUSED}, engine=under_ulysses.engine
    )
    layouts = {
        "data parallel": ranks.Layout(settings(micro_batch_size=2, sis=dumped(dumps / "data parallel"))),
        "data parallel, dynamic batches": ranks.Layout(settings(max_tokens=24)),
        "data parallel, fused kernels": ranks.Layout(settings(micro_batch_size=2, model_overrides=fused.FUSED)),
        "sequence parallel": ranks.Layout(under_ulysses, sequence_parallel=2),
        "sequence parallel, fused kernels": ranks.Layout(under_ulysses_fused, sequence_parallel=2),
    }
    of_ranks = two_ranks.run(tmp_path_factory.mktemp("ranks"), ranks.two_steps_of_each, layouts, rollout)
    return {name: [found[name] for found in of_ranks] for name in layouts}


@pytest.fixture(scope="module")
def reference(model_folder, rollout, dumps):
    settings = harness.Settings(model=model_folder, sis=dumped(dumps / "one rank"))
    return ranks.two_steps(ranks.Layout(settings), rollout, world_size=1)


def test_the_reference_is_off_policy(reference):
    recorder.assert_off_policy(reference["decisions"])


@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_two_data_parallel_ranks(results, reference, dumps, layout):
    together = recorder.Decisions()
    for result in results[layout]:
        together.merge(result["decisions"])
        recorder.assert_same_metrics(result["metrics"], reference["metrics"], absolute=2e-6)
    recorder.assert_same_decisions(together, reference["decisions"])
    if layout == "data parallel":
        assert_dumps_are_those_of_one_rank(
            dumps, layout, written_by=(0, 1), updates=(0, EPOCHS), tokens=EPOCHS * sum(LENGTHS)
        )


@pytest.mark.parametrize("layout", SEQUENCE_PARALLEL)
def test_two_sequence_parallel_ranks(results, reference, dumps, layout):
    first, second = results[layout]
    for result in (first, second):
        recorder.assert_same_decisions(result["decisions"], reference["decisions"])
    recorder.assert_same_metrics(first["metrics"], reference["metrics"], absolute=2e-6)
    assert second["metrics"] == [{}, {}], "verl takes metrics from the first sequence-parallel rank only"
    if layout == "sequence parallel":
        assert_dumps_are_those_of_one_rank(
            dumps, layout, written_by=(0,), updates=(0, EPOCHS), tokens=EPOCHS * sum(LENGTHS)
        )

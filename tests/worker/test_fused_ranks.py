"""Fused kernels on two ranks: data parallel with a head sharded over both, and Ulysses sequence parallel."""

import pytest

from tests.worker import fused, harness, ranks, recorder
from tests.worker.test_ranks import LENGTHS, assert_same_metrics
from tests.worker.ulysses_on_cpu import NAME


@pytest.fixture(scope="module")
def rollout():
    return harness.made_up_rollout(LENGTHS)


@pytest.fixture(scope="module")
def results(model_folder, rollout, two_ranks, tmp_path_factory):
    under_ulysses = harness.Settings(
        model=model_folder,
        model_overrides={**fused.FUSED, "override_config": {"attn_implementation": NAME}},
        engine={"ulysses_sequence_parallel_size": 2},
    )
    data_parallel = harness.Settings(model=model_folder, micro_batch_size=2, model_overrides=fused.FUSED)
    layouts = {
        "data parallel": ranks.Layout(data_parallel),
        "sequence parallel": ranks.Layout(under_ulysses, sequence_parallel=2),
    }
    of_ranks = two_ranks.run(tmp_path_factory.mktemp("ranks"), fused.two_steps_of_each, layouts, rollout)
    return {name: [found[name] for found in of_ranks] for name in layouts}


@pytest.fixture(scope="module")
def reference(model_folder, rollout):
    """One rank without fused kernels."""
    return ranks.two_steps(ranks.Layout(harness.Settings(model=model_folder)), rollout, world_size=1)


def test_two_data_parallel_ranks(results, reference):
    together = recorder.Decisions()
    for result in results["data parallel"]:
        together.merge(result["decisions"])
        assert_same_metrics(result["metrics"], reference["metrics"])
    recorder.assert_same_decisions(together, reference["decisions"])


def test_two_sequence_parallel_ranks(results, reference):
    first, second = results["sequence parallel"]
    for result in (first, second):
        recorder.assert_same_decisions(result["decisions"], reference["decisions"])
    assert_same_metrics(first["metrics"], reference["metrics"])
    assert second["metrics"] == [{}, {}], "verl takes metrics from the first sequence-parallel rank only"

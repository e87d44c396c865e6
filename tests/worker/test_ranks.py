"""One answer on every layout of ranks: data parallel 1 and 2, Ulysses sequence parallel 1 and 2 (gloo processes).

The layouts with fused kernels are held against one rank without: of an LM head that is sharded over both ranks, and of
slices of the packed tokens.
"""

import numpy as np
import pytest
from pyarrow import parquet

from tests.worker import fused, harness, ranks, recorder
from tests.worker.dumps import columns_of
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


def dumped(folder):
    return {"dump": {"every": 1, "directory": str(folder)}}


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


@pytest.mark.parametrize("layout", DATA_PARALLEL)
def test_two_data_parallel_ranks(results, reference, dumps, layout):
    together = recorder.Decisions()
    for result in results[layout]:
        together.merge(result["decisions"])
        recorder.assert_same_metrics(result["metrics"], reference["metrics"], absolute=2e-6)
    recorder.assert_same_decisions(together, reference["decisions"])
    if layout == "data parallel":
        assert_dumps_are_those_of_one_rank(dumps, layout, written_by=(0, 1))


@pytest.mark.parametrize("layout", SEQUENCE_PARALLEL)
def test_two_sequence_parallel_ranks(results, reference, dumps, layout):
    first, second = results[layout]
    for result in (first, second):
        recorder.assert_same_decisions(result["decisions"], reference["decisions"])
    recorder.assert_same_metrics(first["metrics"], reference["metrics"], absolute=2e-6)
    assert second["metrics"] == [{}, {}], "verl takes metrics from the first sequence-parallel rank only"
    if layout == "sequence parallel":
        assert_dumps_are_those_of_one_rank(dumps, layout, written_by=(0,))


def assert_dumps_are_those_of_one_rank(dumps, layout, written_by):
    """Each rank that verl takes outputs from writes its own files; together they hold what one rank would write."""
    for kind in ("tokens", "contexts", "counts"):
        assert [file.name for file in sorted((dumps / layout / kind).iterdir())] == [
            f"update-{update:08d}-rank-{rank:05d}.parquet" for update in (0, 1) for rank in written_by
        ]
    for update in (0, 1):
        tables = ["tokens", "contexts"] if len(written_by) == 1 else ["tokens"]
        for kind in tables:
            got, expected = (pooled(dumps / folder / kind, update) for folder in (layout, "one rank"))
            assert len(got["token"]) == sum(LENGTHS), "all of them fit"
            # Ranks number their responses each from 0. A token is accepted by its probability, so one may differ.
            for name in got.keys() - {"sequence", "accepted"}:
                tolerance = 2e-5 if update == 0 else 5e-3
                np.testing.assert_allclose(got[name], expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def pooled(folder, update):
    """Rows of all ranks of a dump, in one order."""
    columns = columns_of(parquet.read_table([*folder.glob(f"update-{update:08d}-*")]))
    order = np.lexsort(
        [columns[name] for name in ("position", "sample_key" if "sample_key" in columns else "sequence")]
    )
    return {name: values[order] for name, values in columns.items()}

"""Routing replay on two real ranks (gloo): data parallel and Ulysses sequence parallel, FSDP2."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.worker import harness, routes
from tests.worker.ulysses_on_cpu import NAME

LENGTHS = [5, 1, 9, 4, 7, 2, 3, 6]


@dataclass
class Layout:
    """Settings of each rank's worker, and the size of its sequence-parallel group."""

    settings: harness.Settings
    sequence_parallel: int


def rollout() -> harness.Rollout:
    """Labelled routes on tokens that occur once."""
    return routes.with_labels(routes.distinct_tokens(LENGTHS))


def one_step_of_each(rank: int, layouts: dict[str, Layout]) -> dict[str, dict[str, Any]]:
    """One step of each layout on one of two ranks."""
    return {name: one_step(layout, rank, 2) for name, layout in layouts.items()}


def one_step(layout: Layout, rank: int, world_size: int) -> dict[str, Any]:
    """One step of one rank on its share; labels are checked on the way."""
    worker = harness.build_worker(layout.settings)
    whole, size = rollout(), layout.sequence_parallel
    count = len(LENGTHS) * size // world_size
    first = (rank // size) * count
    own = whole.select(list(range(first, first + count)))
    labelled = layout.settings.replay["mode"] == "R3"
    seen = routes.watch(worker)
    output = harness.old_pass(worker, own)
    # Ranks that verl takes no output from still score and update; the trainer sends them the same rows.
    outputs: list[Any] = [None] * world_size
    rows = None if output is None else [row.clone() for row in output["log_probs"].unbind()]
    if world_size > 1:
        torch.distributed.all_gather_object(outputs, rows)
    else:
        outputs = [rows]
    old = harness.response_log_probs({"log_probs": harness.nested(outputs[rank - rank % size])}, own)
    columns = {"rollout_log_probs": old}
    metrics = harness.update(worker, own, old, mini_batch_size=len(LENGTHS), columns=columns)
    checked = routes.assert_labels_arrived(seen, relabelled(own, first)) if labelled else 0
    return {"checked": checked, "metrics": metrics}


def relabelled(own: harness.Rollout, first: int) -> harness.Rollout:
    """``assert_labels_arrived`` counts samples from 0; rows in front of this rank's keep the numbering of the batch."""
    empty = harness.Rollout(
        [torch.tensor([], dtype=torch.int64)] * first, [torch.tensor([], dtype=torch.int64)] * first
    )
    return harness.Rollout(empty.prompts + own.prompts, empty.responses + own.responses)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    harness.prepare_environment()
    model = routes.build_wide_model_folder(tmp_path_factory.mktemp("wide"))
    ulysses = {
        "model_overrides": {
            "override_config": {"attn_implementation": NAME},
            "enable_gradient_checkpointing": True,
        },
        "engine": {"ulysses_sequence_parallel_size": 2},
    }

    def settings(mode: str, **changes: Any) -> harness.Settings:
        replay = {"mode": mode, "min_agreement": 0.0}
        return harness.Settings(model=model, sis=None, replay=replay, **changes)

    return {
        "data parallel": Layout(settings("R3", micro_batch_size=2), 1),
        "sequence parallel": Layout(settings("R3", **ulysses), 2),
        "sequence parallel, dynamic batches": Layout(settings("R3", max_tokens=24, **ulysses), 2),
        "sequence parallel, R2": Layout(settings("R2", max_tokens=24, **ulysses), 2),
    }


@pytest.fixture(scope="module")
def results(layouts, two_ranks, tmp_path_factory):
    return two_ranks.run(tmp_path_factory.mktemp("ranks"), one_step_of_each, layouts)


@pytest.fixture(scope="module")
def reference(layouts):
    return one_step(Layout(layouts["data parallel"].settings, 1), 0, 1)


R3 = ["data parallel", "sequence parallel", "sequence parallel, dynamic batches"]


def test_two_ranks_give_every_token_its_own_route_and_one_answer(results, reference):
    """One test, because two workers of pytest would each start the ranks for their share of several."""
    for layout in R3:
        check_every_token_took_its_own_route(results, reference, layout)
        check_metrics_are_those_of_one_rank(results, reference, layout)
    check_r2_under_sequence_parallelism_replays_its_own_choice(results)


def check_every_token_took_its_own_route(results, reference, layout):
    """Old pass and update see each token once between the ranks, with the experts of its label."""
    tokens = 2 * sum(length + 3 for length in LENGTHS)
    assert reference["checked"] == tokens
    assert sum(result[layout]["checked"] for result in results) == tokens, layout


def check_metrics_are_those_of_one_rank(results, reference, layout):
    names = {name for name in reference["metrics"] if name.startswith(("routing/", "mismatch/"))}
    per_rank = [result[layout]["metrics"] for result in results]
    for metrics in per_rank if layout == "data parallel" else per_rank[:1]:
        assert names == {name for name in metrics if name.startswith(("routing/", "mismatch/"))}, layout
        for name in names - {"routing/bytes_per_token"}:
            expected = pytest.approx(reference["metrics"][name], rel=1e-3, abs=2e-6, nan_ok=True)
            assert metrics[name] == expected, (layout, name)
    assert (per_rank[1] == {}) == (layout != "data parallel")


def check_r2_under_sequence_parallelism_replays_its_own_choice(results):
    metrics = results[0]["sequence parallel, R2"]["metrics"]
    assert metrics["routing/disagreement"] == [0.0]
    assert metrics["routing/tokens"] == [float(sum(LENGTHS))]

"""``sis.dump`` in a real worker: what bounds it, what ends it, and that no layout has a part in it."""

import logging
import shutil

import numpy as np
import pytest

from tests.worker import harness, routes
from tests.worker.dumps import KINDS, LENGTHS, K, columns_of, names, table, two_turn_rollout
from verl_sis.errors import SisConfigError
from verl_sis.integration import dump

LAYOUTS = {
    "micro-batches of four": {"micro_batch_size_per_gpu": 4},
    "micro-batches of one": {"micro_batch_size_per_gpu": 1},
    "dynamic micro-batches": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24},
}


def test_the_same_whole_responses_in_any_layout(build, tmp_path):
    """A learning rate of 0 keeps the policy, so that rows of all layouts must agree."""
    rollout = two_turn_rollout().select([0, 1, 2, 3, 4, 5, 0, 6])
    found = []
    for number, layout in enumerate(LAYOUTS.values()):
        folder = tmp_path / str(number)
        settings = {"every": 1, "directory": str(folder), "max_tokens": 30, "max_contexts": 7}
        worker = build(learning_rate=0.0, sis={"top_k": K, "dump": settings})
        harness.step(worker, rollout, mini_batch_size=4, epochs=2, **layout)
        tables = [columns_of(table(folder, kind, 0)) for kind in KINDS]
        found.append(tables)
        rows = tables[2]
        whole = {int(response.sum()) for response in rollout.masks}
        lengths = np.unique(rows["sequence"], return_counts=True)[1]
        assert set(lengths.tolist()) <= whole
        assert 15 < len(rows["token"]) <= 30
        assert 0 < len(tables[0]["token"]) <= 7
        # Of all responses, not only of those in the table.
        assert tables[1]["accepted"].sum() + tables[1]["rejected"].sum() == 2 * sum(map(sum, rollout.masks))
    for tables in found[1:]:
        for one, reference in zip(tables, found[0], strict=True):
            for name, values in one.items():
                np.testing.assert_allclose(values, reference[name], rtol=0, atol=2e-5, err_msg=name)


def test_equal_responses_come_together_and_stay_apart(build, tmp_path):
    rollout = harness.made_up_rollout([4, 3]).select([0, 0, 1, 0])
    settings = {"every": 1, "directory": str(tmp_path), "max_tokens": 12}
    worker = build(micro_batch_size=2, sis={"dump": settings})
    harness.step(worker, rollout)
    rows = columns_of(table(tmp_path, "tokens", 0))
    lengths = np.unique(rows["sequence"], return_counts=True)[1].tolist()
    assert lengths in ([4, 4, 4], [3]), "3 + 12 tokens do not fit"
    assert len(set(rows["sample_key"])) == 1


def alarms(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_too_few_tokens_for_a_response_are_reported(build, tmp_path, caplog):
    worker = build(sis={"dump": {"every": 1, "directory": str(tmp_path), "max_tokens": 2}})
    with caplog.at_level("WARNING", logger="verl_sis"):
        harness.step(worker, harness.made_up_rollout([4, 3, 5, 6]))
        harness.step(worker, harness.made_up_rollout([4, 3, 5, 6]))
    (alarm,) = alarms(caplog)
    assert "dump.max_tokens=4 or more" in alarm.getMessage()
    assert table(tmp_path, "tokens", 0).num_rows == table(tmp_path, "contexts", 0).num_rows == 0
    assert table(tmp_path, "counts", 0).num_rows > 0


def test_the_dump_ends_once_its_files_have_their_size(build, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(dump, "_MB", 1)
    rollout = harness.made_up_rollout([4, 3, 5, 6])
    settings = {"every": 1, "directory": str(tmp_path), "max_mb": 5000}
    with caplog.at_level("WARNING", logger="verl_sis"):
        steps(build(sis={"dump": settings}), rollout)
        first = names(tmp_path)
        assert 0 < len(first) < 12, "of three files for each of four rollouts"
        (alarm,) = alarms(caplog)
        assert alarm.levelno == logging.WARNING
        assert "Training goes on" in caplog.text and "dump.max_mb=10000" in caplog.text
        # A resumed run counts what is there.
        steps(build(sis={"dump": settings}), rollout, 1)
    assert names(tmp_path) == first
    assert len(alarms(caplog)) == 2


def steps(worker, rollout, count: int = 4) -> None:
    for _ in range(count):
        assert harness.step(worker, rollout)["sis/active"] == [1.0]


def test_a_failed_write_ends_the_dump_and_not_the_training(build, tmp_path, caplog):
    worker = build(sis={"dump": {"every": 1, "directory": str(tmp_path)}})
    rollout = harness.made_up_rollout([4, 3, 5, 6])
    steps(worker, rollout, 1)
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "tokens").write_text("in the way")
    with caplog.at_level("WARNING", logger="verl_sis"):
        steps(worker, rollout, 2)
    (alarm,) = alarms(caplog)
    assert alarm.levelno == logging.ERROR
    assert "could not write update 1" in caplog.text and "dump.directory=/another/path" in caplog.text
    assert not any("update-00000001" in name or "update-00000002" in name for name in names(tmp_path))


def test_an_unwritable_directory_is_refused_before_the_first_rollout(build, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(SisConfigError, match=r"(?s)cannot be written to by rank 0.*sis.dump.directory=/a/writable"):
        build(sis={"dump": {"every": 1, "directory": str(tmp_path / "file" / "dump")}})


def test_a_resumed_run_dumps_the_rollouts_of_the_whole_one(build, tmp_path):
    settings = {"every": 3, "directory": str(tmp_path / "dump")}
    rollout = harness.made_up_rollout([4, 3, 5, 6])
    first = build(sis={"dump": settings})
    steps(first, rollout, 2)
    first.save_checkpoint(str(tmp_path / "actor"), global_step=2)
    second = build(sis={"dump": settings})
    second.load_checkpoint(str(tmp_path / "actor"))
    steps(second, rollout, 2)
    assert {name for name in names(tmp_path / "dump") if name.startswith("tokens")} == {
        "tokens/update-00000000-rank-00000.parquet",
        "tokens/update-00000003-rank-00000.parquet",
    }


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_the_anchor_is_taken_under_routing_replay_and_not_counted(build, tmp_path, mode):
    found = []
    for settings in ({}, {"every": 1, "directory": str(tmp_path)}):
        worker = build(sis={"top_k": K, "dump": settings}, replay={"mode": mode, "min_agreement": 0.0})
        rollout = harness.made_up_rollout(LENGTHS)
        if mode == "R3":
            routes.flipped(routes.native_routes(worker, rollout), 0.5, experts=4)
        found.append(harness.step(worker, rollout, mini_batch_size=4))
        assert not worker._passes.replay.active
    of_routing = [{name: str(value) for name, value in one.items() if name.startswith("routing/")} for one in found]
    assert of_routing[0] == of_routing[1]
    rows = columns_of(table(tmp_path, "tokens", 0))
    # Without replay the flipped routes would set the two apart.
    np.testing.assert_allclose(rows["anchor_log_prob"], rows["old_log_prob"], rtol=0, atol=1e-5)

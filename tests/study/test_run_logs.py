"""Logs of verl's loggers become tables: what was logged, by step; foreign files are not taken for logs."""

import math
import shutil

import pytest
import torch
from pandas.testing import assert_frame_equal
from torch.utils.tensorboard import SummaryWriter

from tests.study.run_log_files import only, table, write_events, write_lines
from verl_sis.errors import StudyFileError
from verl_sis.study.run_logs import find_run_logs

STEPS = {
    0: {"val-core/tiny/acc/mean@2": 0.125},
    1: {"actor/sis/accept_rate": 0.75, "critic/rewards/mean": -0.5, "training/global_step": 1},
    2: {"actor/sis/accept_rate": 0.5, "critic/rewards/mean": 0.25, "val-core/tiny/acc/mean@2": 0.375},
}
"""Numbers that 32-bit floats hold exactly, as tensorboard stores them."""

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "minus_inf": -math.inf}

CONFIG = {"trainer": {"experiment_name": "exp", "steps": 3}, "longer_than_a_block": "x" * 70_000}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """One run through verl's own three loggers, and samples of its validation."""
    from verl.utils.tracking import Tracking, ValidationGenerationsLogger

    root = tmp_path_factory.mktemp("tracked")
    backends = ["tensorboard", "wandb", "file"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        patch.setenv("WANDB_DIR", str(root))
        patch.setenv("WANDB_X_DISABLE_STATS", "true")
        patch.setenv("TENSORBOARD_DIR", str(root / "tensorboard_log" / "project" / "exp"))
        patch.setenv("VERL_FILE_LOGGER_ROOT", str(root))
        patch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
        tracking = Tracking("project", "exp", backends, CONFIG)
        for step, metrics in STEPS.items():
            tracking.log(metrics, step)
        samples = ValidationGenerationsLogger("project", "exp")
        samples.log(backends, [["1+1=", "2", 1.0]], 2)
        tracking.log(NOT_FINITE, 3)
        tracking.finish()
        samples.writer.close()

    import wandb

    wandb.teardown()
    return root


def test_three_formats_of_one_run_are_one_table(tracked):
    logs = {log.format: log for log in find_run_logs(tracked)}
    assert sorted(logs) == ["jsonl", "tensorboard", "wandb"]
    expected = table({**STEPS, 3: NOT_FINITE})
    assert_frame_equal(logs["wandb"].table, expected)
    assert_frame_equal(logs["tensorboard"].table, expected)
    # verl's encoder writes null for all three.
    assert_frame_equal(logs["jsonl"].table, table({**STEPS, 3: dict.fromkeys(NOT_FINITE, math.nan)}))
    assert [log.skipped for log in logs.values()] == [0, 0, 0]


def test_a_run_has_verls_name_and_what_wandb_knows_of_its_configuration(tracked):
    wandb_file = next(tracked.glob("wandb/offline-run-*/run-*.wandb"))
    sources = [wandb_file, tracked / "tensorboard_log" / "project" / "exp", tracked / "project" / "exp.jsonl"]
    logs = [only(source) for source in sources]
    assert [log.source for log in logs] == sources
    assert [log.name for log in logs] == ["exp"] * 3
    assert [log.config for log in logs] == [CONFIG, {}, {}]


def test_logs_that_would_share_a_name_have_their_paths(tracked):
    names = [log.name for log in find_run_logs(tracked)]
    assert names[0] == f"{tracked.name}/project/exp.jsonl"
    assert names[1] == f"{tracked.name}/tensorboard_log/project/exp"
    assert names[2].startswith(f"{tracked.name}/wandb/offline-run-")


def test_rows_of_the_quickstart_are_flat_and_may_hold_literals(tmp_path):
    rows = [{"step": step, **metrics} for step, metrics in {**STEPS, 3: NOT_FINITE}.items()]
    log = only(write_lines(tmp_path / "metrics.jsonl", *rows))
    assert (log.name, log.format, log.config) == ("metrics", "jsonl", {})
    assert_frame_equal(log.table, table({**STEPS, 3: NOT_FINITE}))


def test_lines_of_one_step_are_merged_and_texts_left_out(tmp_path):
    lines = [
        {"step": 7, "data": {"a": 1, "note": "text", "list": [1, 2]}},
        "\n",
        {"step": 2, "data": {"a": 5.5, "flag": True}},
        {"step": 7, "data": {"a": 2, "b": 3}},
    ]
    log = only(write_lines(tmp_path / "run.jsonl", *lines))
    assert_frame_equal(log.table, table({2: {"a": 5.5, "flag": 1.0}, 7: {"a": 2.0, "b": 3.0}}))
    assert log.skipped == 0


@pytest.mark.parametrize(
    "line",
    [
        {"input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "step": 3},
        {"step": 1},
        {"data": {"a": 1}},
        {"step": "1", "data": {"a": 1}},
        {"step": True, "a": 1},
        {"step": 2**63, "a": 1},
        [1, 2],
        "not JSON\n",
        "",
        '{"step": 1, "data": {"a"',
    ],
    ids=str,
)
def test_foreign_lines_are_no_log(tmp_path, line):
    """The first is a rollout as verl dumps it, with a step of its own."""
    path = write_lines(tmp_path / "3.jsonl", line)
    assert find_run_logs(tmp_path) == []
    with pytest.raises(StudyFileError, match=r"3\.jsonl: expected .* found none"):
        find_run_logs(path)


@pytest.mark.parametrize("bad", ['{"step": 2, "da\n', '{"note": "text"}\n', '{"step": 2, "\xff": 1}\n'])
def test_a_corrupt_line_is_named(tmp_path, bad):
    good = {"step": 1, "data": {"a": 1}}
    write_lines(tmp_path / "run.jsonl", good, bad, good)
    with pytest.raises(StudyFileError, match=r"run\.jsonl: .* line 2"):
        find_run_logs(tmp_path)


def test_event_files_of_one_directory_are_one_run_and_the_later_time_wins(tmp_path):
    """The resumed run's file comes first by name, and starts again at step 2."""
    write_events(tmp_path / "run" / "events.out.tfevents.a", (2, "x", 20, 200.0), (3, "x", 30, 201.0))
    write_events(tmp_path / "run" / "events.out.tfevents.b", (1, "x", 1, 100.0), (2, "x", 2, 101.0), (2, "y", 5, 102.0))
    write_events(tmp_path / "run" / "deeper" / "events.out.tfevents.c", (1, "x", 9, 0.0))
    (tmp_path / "run" / "events.out.tfevents.directory").mkdir()
    deeper, run = sorted(find_run_logs(tmp_path), key=lambda log: log.name)
    assert (deeper.name, run.name) == ("deeper", "run")
    assert_frame_equal(run.table, table({1: {"x": 1}, 2: {"x": 20, "y": 5}, 3: {"x": 30}}))
    assert_frame_equal(deeper.table, table({1: {"x": 9}}))
    assert only(tmp_path / "run" / "events.out.tfevents.b").table["x"].tolist() == [1, 2]


def test_scalars_may_be_tensors_of_either_precision(tmp_path):
    write_events(tmp_path / "events.out.tfevents.1", (1, "double", 0.1, 1.0), new_style=True, double_precision=True)
    write_events(tmp_path / "events.out.tfevents.2", (1, "single", 0.25, 1.0), new_style=True)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_tensor("integer", torch.tensor(7), 1)
        writer.add_tensor("not/a/scalar", torch.tensor([1.0, 2.0]), 1)
        writer.add_histogram("not/a/scalar", torch.tensor([1.0, 2.0]), 1)
    assert_frame_equal(only(tmp_path).table, table({1: {"double": 0.1, "integer": 7, "single": 0.25}}))


def test_more_steps_than_tensorboard_shows_are_kept(tmp_path):
    write_events(tmp_path / "events.out.tfevents.1", *((step, "x", step, 1.0) for step in range(1500)))
    assert only(tmp_path).table["x"].tolist() == list(range(1500))


def test_a_directory_without_logs_has_none(tmp_path):
    (tmp_path / "deeper.jsonl").mkdir()
    (tmp_path / "notes.txt").write_text("nothing")
    assert find_run_logs(tmp_path) == []


def test_what_is_not_there_or_not_a_log_is_an_error(tmp_path):
    with pytest.raises(StudyFileError, match="absent: expected a log or a directory, found nothing"):
        find_run_logs(tmp_path / "absent")
    notes = tmp_path / "notes.txt"
    notes.write_text('{"step": 1, "data": {"a": 1}}\n')
    with pytest.raises(StudyFileError, match=r"notes\.txt: expected .*\*\.wandb"):
        find_run_logs(notes)


def test_links_are_not_followed(tmp_path, tracked):
    """Wandb keeps a link to its latest run, which is no second run."""
    shutil.copytree(tracked / "wandb", tmp_path / "wandb", symlinks=True)
    assert (tmp_path / "wandb" / "latest-run").is_symlink()
    assert len(find_run_logs(tmp_path)) == 1

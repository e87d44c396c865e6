"""Files of runs that still grow, that are corrupt, that cannot be read; and how wandb frames its records."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal
from wandb.proto.wandb_internal_pb2 import Record

from tests.study.run_log_files import (
    events_of_three,
    history,
    jsonl_of_three,
    only,
    table,
    wandb_of_three,
    write_wandb,
)
from verl_sis.errors import StudyFileError
from verl_sis.study.run_logs import find_run_logs


# Sizes at which nothing is cut: ends of three lines with and without "\n"; of no, the version's and three records; of
# the header and three records.
@pytest.mark.parametrize(("write", "whole"), [(jsonl_of_three, 6), (events_of_three, 5), (wandb_of_three, 4)])
def test_of_a_growing_file_all_complete_steps_are_read(tmp_path, write, whole):
    """Cut at every byte: the steps grow one by one, and the cut one is counted."""
    path = write(tmp_path)
    content = path.read_bytes()
    seen = []
    for size in range(len(content) + 1):
        path.write_bytes(content[:size])
        logs = find_run_logs(tmp_path)
        # A JSONL file is a log from its first row on.
        seen.append((logs[0].table.index.tolist(), logs[0].skipped) if logs else ([], 1))
        assert not logs or logs[0].table.dtypes.eq("float64").all()
    assert [steps for steps, _ in seen] == sorted(steps for steps, _ in seen)
    assert [steps for steps, skipped in seen if not skipped and steps][-1] == [1, 2, 3]
    assert {tuple(steps) for steps, skipped in seen} == {(), (1,), (1, 2), (1, 2, 3)}
    assert sum(skipped for _, skipped in seen) == len(seen) - whole


@pytest.mark.parametrize("write", [events_of_three, wandb_of_three])
def test_a_flipped_bit_in_the_middle_is_corruption(tmp_path, write):
    """In each record's data; of wandb, a wrong length of the last block looks like a cut tail, which none can tell."""
    path = write(tmp_path)
    content = path.read_bytes()
    places = [place for place in range(len(content) * 2 // 3) if content[place : place + 1].isalpha()]
    assert len(places) > 3
    for place in places:
        broken = bytearray(content)
        broken[place] ^= 1
        path.write_bytes(broken)
        with pytest.raises(StudyFileError, match=f"{path.name}: expected .* found .*Copy the file anew"):
            find_run_logs(tmp_path)


@pytest.mark.parametrize("name", ["events.out.tfevents.1", "run-a.wandb"])
def test_files_of_other_content_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"something else altogether, at some length")
    with pytest.raises(StudyFileError, match=f"{name}: expected"):
        find_run_logs(tmp_path)


def test_checked_records_of_another_kind_are_named(tmp_path):
    path = write_wandb(tmp_path / "run-a.wandb", [b"\xff\xff not a protocol buffer"])
    with pytest.raises(StudyFileError, match="expected records of kind Record"):
        find_run_logs(path)


def test_a_run_that_has_not_logged_yet_is_an_empty_table(tmp_path):
    """As wandb leaves it for the first 32 KiB of a run."""
    log = only(write_wandb(tmp_path / "run-a.wandb", []))
    assert log.table.shape == (0, 0) and log.skipped == 0
    assert log.table.index.name == "step" and log.table.index.dtype == "int64"


@pytest.mark.parametrize("write", [jsonl_of_three, events_of_three, wandb_of_three])
def test_an_unreadable_file_is_named(tmp_path, monkeypatch, write):
    path = write(tmp_path)

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(StudyFileError, match=f"{path.name}: expected a readable file, found Permission denied"):
        find_run_logs(path)


@pytest.mark.parametrize(
    ("write", "module", "package"),
    [
        (events_of_three, "tensorboard.compat.proto.event_pb2", "tensorboard"),
        (wandb_of_three, "wandb.proto.wandb_internal_pb2", "wandb"),
        (jsonl_of_three, "pandas", "pandas"),
    ],
)
def test_a_missing_package_is_named_with_what_to_type(tmp_path, monkeypatch, write, module, package):
    path = write(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StudyFileError, match=rf"{path.name}.*pip install 'verl-sis\[study\]' {package}$"):
        find_run_logs(path)


def test_wandb_records_of_older_releases(tmp_path):
    log = only(write_wandb(tmp_path / "run-abc.wandb", [history(4, as_keys=True, x=1), history(5, as_keys=True, x=2)]))
    assert log.name == "abc"
    assert_frame_equal(log.table, table({4: {"x": 1}, 5: {"x": 2}}))


def filling(left):
    """A record that leaves so many bytes of the first block."""
    excess = len(history(0, text="x" * 32_000)) + left - (32768 - 7 - 7)
    return history(0, text="x" * (32_000 - excess))


def test_wandb_blocks_end_anywhere_in_a_record(tmp_path):
    """Whatever is left of a block: a trailer of up to six zeros, a header without data, a little data."""
    for left in range(12):
        path = write_wandb(tmp_path / "run-a.wandb", [filling(left), history(1, x=1), history(2, x=2)])
        assert_frame_equal(only(path).table, table({1: {"x": 1}, 2: {"x": 2}}))


def test_a_wandb_record_is_cut_at_the_end_of_a_block(tmp_path):
    path = write_wandb(tmp_path / "run-a.wandb", [history(1, x=1), history(2, text="x" * 40_000)])
    path.write_bytes(path.read_bytes()[:32768])
    log = only(path)
    assert log.table.index.tolist() == [1] and log.skipped == 1


def test_wandb_records_that_do_not_continue_are_corruption(tmp_path):
    """A block that starts a record after a block that ends in the middle of one."""
    starts = write_wandb(tmp_path / "starts.wandb", [filling(0), history(2, x=2)]).read_bytes()[32768:]
    path = write_wandb(tmp_path / "run-a.wandb", [filling(0) + history(3, x=3)])
    path.write_bytes(path.read_bytes()[:32768] + starts)
    with pytest.raises(StudyFileError, match="at byte 32768"):
        find_run_logs(path)


def test_a_wandb_length_beyond_its_block_is_corruption(tmp_path):
    path = wandb_of_three(tmp_path)
    content = bytearray(path.read_bytes())
    content[11:13] = b"\xff\xff"
    path.write_bytes(content)
    with pytest.raises(StudyFileError, match="at byte 7"):
        find_run_logs(path)


def test_wandb_values_in_a_later_encoding_are_counted(tmp_path):
    record = Record.FromString(history(1, x=1))
    record.history.item.add(nested_key=["typed"])
    log = only(write_wandb(tmp_path / "run-a.wandb", [record.SerializeToString()]))
    assert_frame_equal(log.table, table({1: {"x": 1}}))
    assert log.skipped == 1


def test_importing_needs_no_reader():
    question = "import sys, verl_sis.study.run_logs; print({'pandas', 'tensorboard', 'wandb'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    assert answer.stdout == "set()\n"

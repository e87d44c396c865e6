"""verl's log becomes one flat object per step, a table, a picture."""

import io
import json

import pytest
from rich.console import Console

from verl_sis.cpu import curves
from verl_sis.cpu.run_metrics import HELD_OUT, format_step, print_table, read_verl_log, write_jsonl


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "verl.jsonl"
    validation = {"val-core/tiny_arithmetic_level1/acc/mean@1": 0.5, "val-core/tiny_arithmetic_level2/acc/mean@1": 0.1}
    records = [
        {"step": 0, "data": validation},
        {"step": 1, "data": {"critic/rewards/mean": 0.25, "actor/sis/accept_rate": 0.9, "note": "text", "nan": None}},
        {"step": 1, "data": {"actor/mismatch/k3": 1e-3}},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_rows_are_flat_merged_and_numeric(log):
    first, second = read_verl_log(log)
    assert first["step"] == 0 and first[HELD_OUT] == pytest.approx(0.3)
    assert second == {"step": 1, "critic/rewards/mean": 0.25, "actor/sis/accept_rate": 0.9, "actor/mismatch/k3": 1e-3}


def test_a_line_that_verl_is_still_writing_is_left_for_later(log):
    with log.open("a") as stream:
        stream.write('{"step": 2, "da')
    assert [row["step"] for row in read_verl_log(log)] == [0, 1]


def test_no_log_no_rows(tmp_path):
    assert read_verl_log(tmp_path / "absent") == []


def test_written_objects_read_back(log, tmp_path):
    rows = read_verl_log(log)
    target = tmp_path / "out" / "metrics.jsonl"
    write_jsonl(rows, target)
    assert [json.loads(line) for line in target.read_text().splitlines()] == rows
    assert [path.name for path in target.parent.iterdir()] == ["metrics.jsonl"]


def test_table_shows_what_is_there_and_marks_what_is_not(log):
    console = Console(file=io.StringIO(), width=140)
    print_table(read_verl_log(log), console)
    line = next(line for line in console.file.getvalue().splitlines() if "0.250" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells[:4] == ["1", "0.250", "-", "0.900"]
    assert cells.count("-") == 10


def test_columns_of_routing_replay_appear_where_it_ran(log):
    console = Console(file=io.StringIO(), width=160)
    rows = read_verl_log(log)
    print_table([*rows, {"step": 2, "actor/mismatch/native/k3": 2e-3, "actor/routing/disagreement": 0.01}], console)
    assert "native" in console.file.getvalue()
    line = next(line for line in console.file.getvalue().splitlines() if "2.0e-03" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")][-3:] == ["2.0e-03", "-", "1.0e-02"]


def test_progress_names_only_what_is_there(log):
    assert format_step(read_verl_log(log)[1]) == "step 1  reward 0.250  accept 0.900  k3 1.0e-03"


def test_curves_of_a_run_without_sis(tmp_path):
    path = tmp_path / "curves.png"
    curves.plot([{"step": 1, "critic/rewards/mean": 0.1}, {"step": 2, "critic/rewards/mean": 0.2}], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [item.name for item in tmp_path.iterdir()] == ["curves.png"]

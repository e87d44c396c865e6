"""The benchmark of reports at a tiny size: it runs, and its record holds the figures of the documents."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def test_a_record_of_time_and_memory(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        module = importlib.import_module("bench_report")
        patch.setattr(module, "ROWS_PER_FILE", 1000)
        path = tmp_path / "new" / "report.json"
        arguments = ["--rows", "1500", "--layers", "2", "--json", str(path)]
        finished = CliRunner().invoke(module.app, arguments, catch_exceptions=False)
    assert finished.exit_code == 0, finished.output
    record = json.loads(path.read_text())
    assert record["rows"] == 1500
    assert record["responses"] == 2 + 1
    assert record["sum_over_read"] == record["sum_s"] / record["read_s"] > 0
    assert 0 < record["report_peak_GB"] < 5

"""``verl-sis data`` as a user types it."""

import pytest
from typer.testing import CliRunner

from tests.data import public_files as public
from verl_sis.__main__ import app


def run(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)], env={"COLUMNS": "120"})


def test_math(tmp_path):
    files = public.math_files(tmp_path / "files")
    result = run("math", "--out", tmp_path / "out", "--source", files, "--allow-count")
    assert result.exit_code == 0, result.output
    lines = [
        [cell.strip() for cell in line.split("│")[1:5]] for line in result.output.splitlines() if ".parquet" in line
    ]
    assert lines == [
        ["train.parquet", "6", "1", "6"],
        ["math500.parquet", "2", "1", "2"],
        ["amc23.parquet", "2", "32", "64"],
        ["aime24.parquet", "1", "32", "32"],
        ["aime25.parquet", "1", "32", "32"],
    ]
    assert "1 training questions are also in an evaluation set; 0 left out" in result.output
    assert "1 texts have several ids with different answers" in result.output
    assert run("verify", tmp_path / "out").exit_code == 0


def test_search_without_what_is_shared(tmp_path):
    files = public.search_files(tmp_path / "files")
    result = run("search", "-o", tmp_path / "out", "--source", files, "--allow-count", "--drop-overlap")
    assert result.exit_code == 0, result.output
    assert "1 training questions are also in an evaluation set; 1 left out" in result.output


@pytest.mark.parametrize("command", ["math", "search"])
def test_errors_are_one_message(tmp_path, command):
    result = run(command, "--out", tmp_path / "out", "--source", tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: {tmp_path}: expected one of the files")
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_verify_fails_where_there_is_nothing(tmp_path):
    result = run("verify", tmp_path)
    assert result.exit_code == 1
    assert "expected the manifest of verl-sis data" in result.output

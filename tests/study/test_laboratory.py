"""The laboratory at a small size: its tables hold what the figures say, and a run leaves whole files only."""

import json

import pandas
import pytest
from typer.testing import CliRunner

from tests.study.context_files import study_of_64
from verl_sis.__main__ import app
from verl_sis.study import laboratory
from verl_sis.study.laboratory_figures import COLLECTED_FIGURES, FIGURES
from verl_sis.study.laboratory_run import COLLECTED_TABLES, TABLES

SMALL = laboratory.Settings(contexts=6, vocabulary=60, drifts=(0.0, 0.1, 1.0), ks=(1, 10), seeds=2)


@pytest.fixture(scope="module")
def tables():
    return {name: make(SMALL) for name, make in TABLES.items()}


def rows(table, **chosen):
    for name, value in chosen.items():
        table = table[table[name] == value]
    return table


def test_one_row_per_estimator_and_drift(tables):
    assert len(tables["side_by_side"]) == 10 * 3
    assert len(tables["by_k"]) == 3 * 3
    assert sorted(set(tables["by_k"]["k"])) == [1, 10, 60]
    assert len(tables["by_sequence"]) == 4 * 3


def test_importance_sampling_is_the_measure_of_all(tables):
    found = rows(tables["side_by_side"], estimator="IS")
    assert (found["relative_bias"] < 1e-12).all()
    for samples in laboratory.SAMPLES:
        assert (found[f"mse_over_is_{samples}"] == 1.0).all()


def test_without_drift_there_is_nothing_to_correct(tables):
    assert (rows(tables["side_by_side"], drift=0.0)["relative_bias"] < 1e-12).all()
    at_rest = rows(tables["by_k"], drift=0.0)
    # Acceptance is then the mass of V_K.
    assert (at_rest["acceptance"] + at_rest["residual_mass"]).tolist() == pytest.approx([1.0] * 3)


def test_the_exact_envelope_has_no_residual_mass(tables):
    assert (rows(tables["by_k"], k=60)["residual_mass"] == 0.0).all()
    falling = rows(tables["by_k"], drift=1.0).sort_values("k")["residual_mass"]
    assert falling.is_monotonic_decreasing


def test_means_over_seeds_have_a_standard_error(tables):
    """Of two seeds: half their distance."""
    single = [
        laboratory.side_by_side(laboratory.Settings(**{**vars(SMALL), "seeds": 1})),
        tables["side_by_side"],
    ]
    first, both = (rows(table, estimator="SIS", drift=1.0)["relative_bias"].item() for table in single)
    error = rows(tables["side_by_side"], estimator="SIS", drift=1.0)["relative_bias_se"].item()
    assert error == pytest.approx(abs(first - both))


def test_the_command_writes_tables_figures_and_a_record(tmp_path, monkeypatch):
    monkeypatch.setattr(laboratory.Settings, "__init__", small_settings(laboratory.Settings.__init__))
    out = tmp_path / "new" / "lab"
    finished = CliRunner().invoke(app, ["study", "estimator", f"--out={out}", "--contexts=3", "--vocabulary=30"])
    assert finished.exit_code == 0, finished.output
    expected = {f"{name}.csv" for name in TABLES} | {f"{figure.name}.png" for figure in FIGURES} | {"laboratory.json"}
    assert {path.name for path in out.iterdir()} == expected
    for figure in FIGURES:
        assert (out / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
        assert len(pandas.read_csv(out / f"{figure.table}.csv"))
    record = json.loads((out / "laboratory.json").read_text())
    assert record["settings"]["contexts"] == 3 and record["settings"]["vocabulary"] == 30
    assert set(record["figures"]) == {figure.name for figure in FIGURES}


def small_settings(initialize):
    """Two drifts and one K, so that the command takes a second."""

    def __init__(self, **changes):
        initialize(self, **{"drifts": (0.1, 1.0), "ks": (1,), **changes})

    return __init__


def test_questions_and_figures_are_one_to_one():
    assert [figure.name.split("_")[0] for figure in FIGURES] == ["q1", "q2", "q4", "q7", "q8"]


def run_command(*arguments):
    return CliRunner().invoke(app, ["study", "estimator", *map(str, arguments)])


def test_the_command_on_collected_policies(tmp_path):
    study, out = study_of_64(tmp_path / "study"), tmp_path / "new" / "lab"
    finished = run_command(study, f"--out={out}", "--seeds=2")
    assert finished.exit_code == 0, finished.output
    assert "engine: 63 of 64 contexts, 1 dropped (filtered), root mean square of log w 0.0" in finished.output
    names = {f"{name}.csv" for name in COLLECTED_TABLES} | {f"{figure.name}.png" for figure in COLLECTED_FIGURES}
    assert {path.name for path in out.iterdir()} == names | {"laboratory.json"}
    assert [figure.name.split("_")[1] for figure in COLLECTED_FIGURES] == ["q1", "q4", "q7", "q8"]
    for figure in COLLECTED_FIGURES:
        assert (out / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
    groups = ["engine", "update, age 0", "update, age 1"]
    by_k = pandas.read_csv(out / "collected_by_k.csv")
    assert list(dict.fromkeys(by_k["policies"])) == groups
    assert sorted(set(by_k["k"])) == [1, 5, 10, 20]
    side_by_side = pandas.read_csv(out / "collected_side_by_side.csv")
    assert len(side_by_side) == 10 * 3
    assert (side_by_side[side_by_side["estimator"] == "IS"]["relative_bias"] < 1e-12).all()
    assert (side_by_side[side_by_side["estimator"] == "SIS"]["relative_bias"] > 1e-3).all()
    record = json.loads((out / "laboratory.json").read_text())
    assert record["study"] == str(study)
    assert [group["policies"] for group in record["groups"]] == groups
    assert [(group["contexts"], group["used"], group["k"]) for group in record["groups"]] == [
        (64, 63, 20),
        (32, 32, 20),
        (32, 32, 20),
    ]
    assert record["groups"][0]["dropped"] == {"not_finite": 0, "filtered": 1, "mass_above_one": 0}
    measured = by_k[by_k["policies"] == "engine"]["log_ratio_rms"].iloc[0]
    assert record["groups"][0]["log_ratio_rms"] == pytest.approx(measured)
    assert "not those of training" in record["advantages"]


class TestErrorsOfCollectedPolicies:
    """Messages of the command."""

    def test_a_directory_without_contexts_says_how_to_get_them(self, tmp_path):
        finished = run_command(tmp_path, "--out", tmp_path / "lab")
        assert finished.exit_code == 1
        assert f"Error: expected policies in {tmp_path / 'contexts'}, found none." in finished.output
        assert "verl-sis study collect ... --contexts 256" in finished.output
        assert "sis.dump.max_contexts" in finished.output
        assert not (tmp_path / "lab").exists()

    def test_a_damaged_file_is_named(self, tmp_path):
        study = study_of_64(tmp_path)
        file = study / "contexts" / "shard-00000-engine.parquet"
        file.write_bytes(file.read_bytes()[:500])
        finished = run_command(study, "--out", tmp_path / "lab")
        assert finished.exit_code == 1
        assert f"Error: {file} is truncated" in finished.output

    def test_collected_policies_have_a_vocabulary(self, tmp_path):
        finished = run_command(tmp_path, "--out", tmp_path / "lab", "--vocabulary=30")
        assert finished.exit_code == 1
        assert "--vocabulary is of synthetic policies" in finished.output

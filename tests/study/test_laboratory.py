"""The laboratory at a small size: its tables hold what the figures say, and a run leaves whole files only."""

import json

import pandas
import pytest
from typer.testing import CliRunner

from verl_sis.__main__ import app
from verl_sis.study import laboratory
from verl_sis.study.laboratory_figures import FIGURES
from verl_sis.study.laboratory_run import TABLES

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

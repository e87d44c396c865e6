"""Cells of the tables by hand, from the recorded runs; answers to single problems.

The runs are composed (``tests.contract.compose``), in the worker that has what Hydra has read.
"""

import json
import math as mathematics

import pytest

from tests.tables.recorded import write_answers
from tests.tables.runs import SIS, make_run, math
from verl_sis.errors import RunComparisonError, StudyFileError
from verl_sis.tables.cells import make_matrix
from verl_sis.tables.curves import HELD_OUT, curves
from verl_sis.tables.paper import paper_value
from verl_sis.tables.paper_tables import table1, table2, table3, table5
from verl_sis.tables.problems import over_problems, problem_means
from verl_sis.tables.questions import answer, question3, question5, question5_correlations, question8
from verl_sis.tables.statistics import Measured, paired

QWEN, TINY = "Qwen3-8B-Base", "VERL_SIS_TINY_WORLD/model"


@pytest.fixture(scope="module")
def matrix(recorded):
    return make_matrix(recorded, "last", (), False)


def row(table, name, model=QWEN, replay="off"):
    """The only row of a method."""
    found = [
        row
        for row in table.rows
        if (row["model"], row["replay"]) == (model, replay)
        and name in (row.get("method"), row.get("variant"), row.get("across"))
    ]
    assert len(found) == 1, [row.get("method") for row in table.rows]
    return found[0]


def test_table1(matrix):
    """GRPO 40, 42, 44; with SIS 43, 44, 48: differences 3, 2, 4."""
    table = table1(matrix)
    base, with_sis = row(table, "GRPO"), row(table, "GRPO + SIS (K=10)")
    assert base["average"] == Measured(pytest.approx(42.0), pytest.approx(2 / mathematics.sqrt(3)), 3)
    assert base["math500"].mean == pytest.approx(67.0)
    assert "gain" not in base
    assert with_sis["gain"] == Measured(pytest.approx(3.0), pytest.approx(1 / mathematics.sqrt(3)), 3)
    assert with_sis["interval"] == pytest.approx((2.0, 4.0))
    assert (with_sis["p"], with_sis["smallest_p"], with_sis["pairs"]) == (0.25, 0.25, 3)
    assert (base["paper"], with_sis["paper"]) == (49.05, 52.59)


def test_the_papers_numbers_stand_beside_its_own_k_model_and_task_only(matrix):
    table = table1(matrix)
    assert "paper" not in row(table, "GRPO + SIS (K=1)")
    assert "paper" not in row(table, "GRPO", replay="R3")
    tiny = row(table, "GRPO + SIS (K=10)", TINY)
    assert "paper" not in tiny
    assert tiny["paper_reference"] == 52.59
    assert [column.header for column in table.columns][-2:] == ["paper", "paper (Qwen3-8B-Base, math)"]


def test_missing_cells_say_what_makes_them(matrix):
    """No GSPO was run; DAPO was, with seeds of which one is common."""
    table = table1(matrix)
    absent = row(table, "GSPO + SIS (K=50)")
    assert "average" not in absent
    assert absent["paper"] == 53.54
    assert any(
        text.startswith("Qwen3-8B-Base, math, N = 2, replay off: GSPO; recipe variant gspo, or")
        for text in table.missing
    )
    r3 = next(text for text in table.missing if "replay R3: GSPO + SIS" in text)
    assert "variant gspo_sis_r3 with" in r3
    assert r3.endswith("+routing_replay@_global_=r3")
    dapo = row(table, "DAPO + SIS (K=30)")
    assert (dapo["gain"].mean, dapo["gain"].se, dapo["pairs"]) == (pytest.approx(4.0), None, 1)
    assert (
        f"{matrix.groups[0]}: seed 1 of DAPO has no counterpart among the seeds of DAPO + SIS (K=30)" in table.missing
    )


def test_an_unknown_combination_has_a_row_of_its_own(matrix):
    other = row(table1(matrix), "other: vanilla, clip 0.3/0.2/3, advantage grpo")
    assert other["average"] == Measured(pytest.approx(20.0), None, 1)
    assert "paper" not in other


def test_table2_is_relative_to_grpo_in_points_and_per_cent(matrix):
    """DAPO 46, 46 against the GRPO of its seeds 40, 42: 5 points of 41. The paper: (51.24 - 49.05) / 49.05."""
    found = row(table2(matrix), "DAPO Clip-Higher (DAPO)")
    assert found["points"].mean == pytest.approx(5.0)
    assert found["percent"] == pytest.approx(500 / 41)
    assert (found["paper_points"], found["paper_percent"]) == pytest.approx((2.19, 100 * 2.19 / 49.05))
    without = row(table2(matrix), "w/o clip")
    assert "average" not in without
    assert (without["paper_points"], without["paper_percent"]) == pytest.approx((-0.92, -1.8756), abs=1e-4)
    vanilla = row(table2(matrix), "SIS vanilla (w/o clip + SIS (K=10))")
    assert (vanilla["points"].mean, vanilla["paper"]) == (pytest.approx(1.0), 51.81)


def test_table3_has_every_k(matrix):
    """Acceptance is pooled over tokens, 0.825 in each seed; (0.002 * 100 + 0.004 * 300) / 400 = 0.0035."""
    table = table3(matrix)
    found = row(table, "GRPO + SIS (K=10)")
    assert found["accept"] == Measured(pytest.approx(0.825), pytest.approx(0.0), 3)
    assert found["residual"].mean == pytest.approx(0.0035)
    assert found["paper"] == 52.59
    methods = [r["method"] for r in table.rows if r["model"] == QWEN and str(r["method"]).startswith("GRPO")]
    assert methods == [f"GRPO + SIS (K={k})" for k in (1, 10, 50, 64, 100)]


def test_table5(matrix):
    """SIS without clip 41 against GRPO's 40, seed 1."""
    found = row(table5(matrix), "GRPO+SIS without clip (K=10)")
    assert (found["gain"].mean, found["paper"], found["pairs"]) == (pytest.approx(1.0), 51.81, 1)


def test_question3_compares_with_the_spread_of_seeds(matrix):
    table = question3(matrix)
    found = row(table, "GRPO + SIS (K=10)")
    assert found["base_sd"] == pytest.approx(2.0)
    assert found["sis_sd"] == pytest.approx(mathematics.sqrt(7))
    assert found["answer"] == "cannot be shown with 3 pairs"
    assert row(table, "GRPO + SIS (K=10)", TINY)["answer"] == "one pair: no answer"
    assert any(text.endswith("no run of w/o clip alone") for text in table.missing)


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([1.0] * 6, "larger"),
        ([-1.0] * 6, "smaller"),
        ([1.0] * 5, "cannot be shown with 5 pairs"),
        ([1.0, 1.0, 1.0, 1.0, 1.0, -1.0], "not shown"),
        ([1.0], "one pair: no answer"),
        ([], "no pair of seeds"),
    ],
)
def test_answers(differences, word):
    assert answer(paired(differences)) == word


def test_question5_relates_divergence_and_result(matrix):
    """D of the seeds: (0.1 + 0.3) / 2 = 0.2 times the seed, and results rise with the seed, too."""
    rows = [r for r in question5(matrix).rows if (r["model"], r["method"]) == (QWEN, "GRPO + SIS (K=10)")]
    assert [r["D"] for r in rows] == pytest.approx([0.2, 0.4, 0.6])
    assert [r["D_sis"] for r in rows] == pytest.approx([0.05, 0.1, 0.15])
    across = row(question5_correlations(matrix), "seeds of GRPO + SIS (K=10)")
    assert (across["n"], across["rho_D"], across["rho_accept"]) == (3, pytest.approx(1.0), None)
    # K = 1, 10, 64, DAPO, w/o clip: D 0.2, 0.4, 0.2, 0.1, 0.1, results 30, 45, 45, 50, 41. Ranks 3.5, 5, 3.5, 1.5, 1.5
    # and 1, 3.5, 3.5, 5, 2, less their mean 3: products sum to -1.25, squares to 9 and 9.5; -1.25 / root of 85.5.
    between = row(question5_correlations(matrix), "methods (means over seeds)")
    assert (between["n"], between["rho_D"]) == (5, pytest.approx(-1.25 / mathematics.sqrt(85.5)))


def test_question8_knows_the_exact_envelope_by_its_residual_mass(matrix):
    table = question8(matrix)
    kinds = {r["method"]: r["kind"] for r in table.rows if r["model"] == QWEN}
    assert kinds["GRPO + SIS (K=1)"] == "K = 1"
    assert kinds["GRPO + SIS (K=10)"] == "usual"
    assert kinds["GRPO + SIS (K=64)"] == "K = V"
    # Against 43 and 44 of the same seeds: 30 - 43.5.
    assert row(table, "GRPO + SIS (K=1)")["gain"].mean == pytest.approx(-13.5)
    assert sum("DAPO + SIS with K = " in text for text in table.missing) == 2


def test_curves_are_over_optimizer_steps(matrix):
    """Means over three seeds at N = 2; what is not finite is counted."""
    shown = [*curves(matrix, "figure2"), *curves(matrix, "figure4")]
    points = {(p.model, p.method, p.metric, p.x): p for p in shown if p.replay == "off"}
    held_out = points[QWEN, "GRPO", HELD_OUT, 4]
    assert (held_out.mean, held_out.n) == (pytest.approx(0.42), 3)
    assert held_out.se == pytest.approx(0.02 / mathematics.sqrt(3))
    norm = points[QWEN, "GRPO", "actor/grad_norm", 2]
    assert (norm.mean, norm.n, norm.not_finite) == (0.25, 2, 1)
    assert points[TINY, "GRPO", HELD_OUT, 0].mean == 0.125
    ages = {
        p.x: p.mean for p in curves(matrix, "figure3") if p.metric.endswith("by_age") and p.method.endswith("(K=1)")
    }
    assert ages == {0: 1.0, 1: 0.0}


def test_single_problems_are_compared_where_both_runs_have_them(matrix):
    """Base: 50 and 50 of two problems; SIS: 100 and 50."""
    base, with_sis = (cell for cell in matrix.cells if cell.group.model == TINY)
    found = over_problems(base, with_sis)
    assert found is not None
    assert (found.gain, found.interval, found.count) == (25.0, (0.0, 50.0), 2)
    found = row(question3(matrix), "GRPO + SIS (K=10)", TINY)
    assert (found["problem_gain"], found["problem_interval"], found["problems"]) == (25.0, (0.0, 50.0), 2)


def test_turns_of_a_dialogue_count_once(tmp_path):
    """Two sessions of one prompt, the first with two turns: (100 + 0) / 2."""
    run = make_run(tmp_path / "a", **{"trainer.validation_data_dir": "answers"})
    (run.path / "answers").mkdir()
    lines = [
        {"input": "q", "gts": "1", "score": score, "output": "a\u2028b", "uid": uid}
        for uid, score in (("7f-1_0_0", 1.0), ("7f-1_0_1", 1.0), ("7f-1_1_0", 0.0))
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (run.path / "answers" / "2.jsonl").write_text(text)
    assert problem_means(run, 4) == {("q", "1"): 50.0}
    assert problem_means(run, 2) is None
    (run.path / "answers" / "2.jsonl").write_text('{"input": "q"}\n')
    with pytest.raises(StudyFileError, match="expected a dump of verl's validation"):
        problem_means(run, 4)


def test_different_problems_are_no_comparison(tmp_path):
    values = {"trainer.validation_data_dir": "answers"}
    runs = [make_run(tmp_path / name, {2: math(0.5)}, groups, **values) for name, groups in (("a", ()), ("b", SIS))]
    for run, count in zip(runs, (2, 4), strict=True):
        write_answers(run.path, [1] * count)
    first, second = make_matrix(runs, "last", (), False).cells
    with pytest.raises(RunComparisonError, match=r"answers to the same problems .* seed 1 differ"):
        over_problems(first, second)


def test_numbers_of_the_paper_have_a_source():
    found = paper_value("Table 3", QWEN, "math", "GSPO+SIS K=50")
    assert found is not None
    assert found.value == 53.54
    assert found.source == "third-party write-up of arXiv:2607.04728v1; model inferred from Table 1 equality"
    assert paper_value("Table 1", QWEN, "math", "CISPO") is None

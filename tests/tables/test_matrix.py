"""Runs become cells, and what is no comparison is refused.

The runs are composed (``tests.contract.compose``), in the worker that has what Hydra has read.
"""

import math as mathematics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables.runs import (
    ACTOR,
    SIS,
    TINY,
    config,
    levels,
    make_run,
    math,
    sis,
    training,
    two_steps,
    write_rows,
    write_run,
)
from verl_sis.errors import RunComparisonError, StudyFileError
from verl_sis.tables.cells import compare, make_matrix, mean_over_steps
from verl_sis.tables.configuration import Configuration
from verl_sis.tables.paper_tables import table1, table2, table3, table5
from verl_sis.tables.protocol import protocol_of
from verl_sis.tables.questions import question3, question5, question5_correlations, question8
from verl_sis.tables.runs import find_runs, model_name, read_run, task_of

EVERY_TABLE = (table1, table2, table3, table5, question3, question5, question5_correlations, question8)


def matrix(*runs, at="last", allow_mixed=(), allow_unfinished=False):
    return make_matrix(runs, at, allow_mixed, allow_unfinished)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("plain") / "one")


@pytest.fixture(scope="module")
def with_sis(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("sis") / "two", None, SIS)


def like(run, rows, seed=1):
    """The same with another log, by step of the trainer (N = 2), and another seed."""
    return replace(run, name=f"seed_{seed}", seed=seed, rows={2 * step: row for step, row in rows.items()})


def test_cells_by_hand(plain):
    """Averages 40, 42, 44: mean 42, squares 4 + 0 + 4 over 2, error 2 / root of 3."""
    runs = [like(plain, {2: math(0.38 + seed / 50)}, seed) for seed in (1, 2, 3)]
    (cell,) = matrix(*runs).cells
    assert (cell.average.mean, cell.average.n) == (pytest.approx(42.0), 3)
    assert cell.average.se == pytest.approx(2 / mathematics.sqrt(3))
    math500 = cell.source("math500")
    assert math500 is not None
    assert math500.mean == pytest.approx(67.0)
    assert (cell.group.model, cell.group.task, cell.group.staleness) == ("Qwen3-8B-Base", "math", 2)
    assert (cell.label, cell.scores[1].step, runs[0].steps) == ("GRPO", 4, 4)


def test_pairs_are_those_of_equal_seeds(plain, with_sis):
    """Seeds 1 and 2 against 2 and 3: one pair, 50 - 42 = 8, whatever the means are."""
    base = [like(plain, {2: math(0.38 + seed / 50)}, seed) for seed in (1, 2)]
    other = [like(with_sis, {2: math(0.46 + seed / 50)}, seed) for seed in (2, 3)]
    first, second = matrix(*base, *other).cells
    result = compare(first, second)
    assert result is not None
    assert (result.gain.mean, result.gain.n, result.gain.se) == (pytest.approx(8.0), 1, None)


def test_tokens_weigh_acceptance_and_steps_weigh_divergence(with_sis):
    """(0.9 * 100 + 0.8 * 300) / 400 = 0.825; (0.1 + 0.3) / 2 = 0.2; a NaN takes no part, nor does a later step."""
    run = like(with_sis, two_steps(math(0.5), sis(0.9, 100, 0, 0.1), sis(0.8, 300, 0, 0.3)))
    assert mean_over_steps(run, "actor/sis/accept_rate", 4) == pytest.approx(0.825)
    assert mean_over_steps(run, "actor/sis/D", 4) == pytest.approx(0.2)
    assert mean_over_steps(run, "actor/sis/D", 2) == pytest.approx(0.1)
    run.rows[4]["actor/sis/D"] = mathematics.nan
    assert mean_over_steps(run, "actor/sis/D", 4) == pytest.approx(0.1)
    assert mean_over_steps(run, "actor/absent", 4) is None


def test_the_reported_step_is_chosen(plain):
    run = like(plain, {0: math(0.3), 1: math(0.6), 2: math(0.5)})
    steps = {at: matrix(run, at=at).cells[0].scores[1].step for at in ("last", "best", "0", "2")}
    assert steps == {"last": 4, "best": 2, "0": 0, "2": 2}
    with pytest.raises(RunComparisonError, match=r"optimizer step 3 \(N = 2\), it has them at 0, 2, 4"):
        matrix(run, at="3")
    with pytest.raises(RunComparisonError, match="--at takes last, best or an optimizer step, got 'first'"):
        matrix(run, at="first")


def test_another_reward_rule_is_refused_or_named(plain, tmp_path):
    one = plain
    two = make_run(tmp_path / "two", **{"reward.custom_reward_function.name": "exact", "data.seed": 2})
    with pytest.raises(
        RunComparisonError, match=r"reward \(Qwen3-8B-Base, math\): .*:exact' in two; .*in one.*--allow-mixed reward:"
    ):
        matrix(one, two)
    (sentence,) = matrix(one, two, allow_mixed=["reward"]).mixed
    assert sentence.startswith("Mixed reward (Qwen3-8B-Base, math): 'pkg://verl_sis.rewards.math:exact' in two; ")
    with pytest.raises(RunComparisonError, match=r"--allow-mixed takes one of reward, .*, got rewards"):
        matrix(one, two, allow_mixed=["rewards"])


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("validation_sampling", {"actor_rollout_ref.rollout.val_kwargs.temperature": 0.6}),
        ("lengths", {"data.max_response_length": 64}),
        ("dtype", {"actor_rollout_ref.rollout.dtype": "float16"}),
        ("training_data", {"data.train_files": "data/math/other.parquet"}),
        ("optimizer", {f"{ACTOR}.optim.lr": 1e-5}),
        ("optimizer_steps", {"trainer.total_training_steps": 1}),
        ("clip", {f"{ACTOR}.clip_ratio_low": 0.1, f"{ACTOR}.clip_ratio_high": 0.1}),
        ("aggregation", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
        ("regularisation", {f"{ACTOR}.entropy_coeff": 0.01}),
    ],
)
def test_runs_that_differ_in_more_than_the_method_are_refused(plain, tmp_path, key, values):
    """A base and the same with SIS."""
    with pytest.raises(RunComparisonError, match=rf"runs differ in {key} \("):
        matrix(plain, make_run(tmp_path / "two", None, SIS, **values))


def test_other_models_and_tasks_are_no_mixture(plain, tmp_path):
    tiny = make_run(tmp_path / "tiny", {2: levels(0.5)}, **TINY)
    groups = matrix(plain, tiny).groups
    assert [(group.model, group.task) for group in groups] == [
        ("Qwen3-8B-Base", "math"),
        ("VERL_SIS_TINY_WORLD/model", "tiny arithmetic"),
    ]


def test_equal_seeds_are_refused(plain):
    one, two = plain, replace(plain, name="two")
    with pytest.raises(RunComparisonError, match=r"of GRPO .* one and two both have data\.seed=1"):
        matrix(one, two)


def test_a_run_that_ended_early_is_refused_or_marked(plain):
    run = like(plain, {1: math(0.5)})
    with pytest.raises(RunComparisonError, match=r"seed_1 \(step 2 of 4\).*--allow-unfinished"):
        matrix(run)
    assert matrix(run, allow_unfinished=True).cells[0].label == "GRPO (+)"


def test_a_run_without_a_validation_at_its_end_is_refused(plain):
    run = like(plain, {1: math(0.5), 2: training(0.5)})
    with pytest.raises(
        RunComparisonError, match=r"after its last optimizer step 4, the last ones are of step 2\. Type --at 2"
    ):
        matrix(run)


@pytest.mark.parametrize("bad", [None, 1.5, -0.5])
def test_a_result_that_is_no_share_is_refused(tmp_path, bad):
    """NaN is null in a log of verl."""
    run = make_run(tmp_path / "a", {2: {**math(0.5), "val-core/amc23/acc/mean@1": bad}})
    with pytest.raises(
        RunComparisonError, match=r"result of amc23 at optimizer step 4 to be a finite number in \[0, 1\]"
    ):
        matrix(run)


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(StudyFileError, match=r"expected a run, .* found none"):
        find_runs([tmp_path])
    run = write_run(tmp_path / "a")
    write_rows(run, {1: training(0.5), 2: training(0.5)})
    with pytest.raises(StudyFileError, match=r"expected held-out results .*trainer\.test_freq"):
        read_run(run, "a")
    write_rows(run, {1: math(0.5), 2: levels(0.5)})
    with pytest.raises(StudyFileError, match="expected the same data sources at every validation"):
        read_run(run, "a")
    write_rows(run, {})
    with pytest.raises(StudyFileError, match=r'expected lines \{"step": n'):
        read_run(run, "a")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(StudyFileError, match="expected the log of verl's logger file"):
        read_run(run, "a")


@pytest.mark.parametrize("key", ["data.seed", "trainer.total_training_steps"])
def test_a_run_that_does_not_say_what_tables_need_is_refused(tmp_path, key):
    with pytest.raises(StudyFileError, match=rf"expected a value for {key}, found none"):
        make_run(tmp_path / "a", **{key: None})


def test_runs_are_named_once_and_from_where_they_were_named(tmp_path):
    for name in ("x/seed_1", "x/seed_2", "y"):
        write_run(tmp_path / name)
    found = find_runs([tmp_path / "x", tmp_path / "y", tmp_path / "x" / "seed_2"])
    assert [run.name for run in found] == ["x/seed_1", "x/seed_2", "y"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B-Base"),
        ("/models/Qwen3-8B-Base/", "Qwen3-8B-Base"),
        ("/hub/models--Qwen--Qwen3-8B-Base/snapshots/0123abc", "Qwen3-8B-Base"),
        ("/runs/tiny_world/4f11/model", "4f11/model"),
    ],
)
def test_names_of_models(path, name):
    assert model_name(path) == name


def test_names_of_tasks():
    assert task_of({"math500"}) == "math"
    assert task_of({"nq", "hotpotqa"}) == "agentic search"
    assert task_of({"b", "a"}) == "other: a, b"


def contents(found):
    return [(table.records, table.missing) for table in (make(found) for make in EVERY_TABLE)]


@given(random=st.randoms())
@settings(max_examples=3, deadline=None)
def test_the_order_of_runs_does_not_matter(recorded, random):
    shuffled = random.sample(recorded, len(recorded))
    assert contents(matrix(*shuffled)) == contents(matrix(*recorded))


@given(seeds=st.permutations([1, 2, 3]))
@settings(max_examples=3, deadline=None)
def test_names_of_seeds_do_not_matter(recorded, seeds):
    """Pairs stay pairs: all runs of a seed get its new name."""
    renamed = [replace(run, seed=seeds[run.seed - 1]) for run in recorded]
    for make in (table1, table2, table3, table5, question3, question8):
        assert make(matrix(*renamed)).records == make(matrix(*recorded)).records


@given(shift=st.sampled_from([0.0625, 0.125, 0.25]))
@settings(max_examples=3, deadline=None)
def test_a_shift_of_all_results_shifts_means_and_no_difference(recorded, shift):
    def shifted(run):
        rows = {
            step: {name: value + shift * name.startswith("val-core/") for name, value in row.items()}
            for step, row in run.rows.items()
        }
        return replace(run, rows=rows)

    runs = [run for run in recorded if run.task == "math"]
    before, after = table1(matrix(*runs)).rows, table1(matrix(*(shifted(run) for run in runs), at="4")).rows
    for old, new in zip(before, after, strict=True):
        assert ("average" in old) == ("average" in new)
        if "average" in old:
            assert new["average"].mean == pytest.approx(old["average"].mean + 100 * shift)
        if "gain" in old:
            assert new["gain"].mean == pytest.approx(old["gain"].mean)
            assert (new["interval"], new["p"]) == (pytest.approx(old["interval"]), old["p"])


def test_arguments_of_the_reward_are_part_of_its_rule():
    tree = config()
    tree["reward"]["custom_reward_function"].update(
        path="/home/rules/own.py", name=None, reward_kwargs={"strict": True}
    )
    found = protocol_of(Configuration(tree, Path("config.yaml")))
    assert found["reward"] == "own.py:compute_score {'strict': True}"
    tree["reward"]["custom_reward_function"]["path"] = None
    assert protocol_of(Configuration(tree, Path("config.yaml")))["reward"] == "verl's default of each data source"


def test_rewards_that_are_no_shares_may_have_any_finite_value(plain):
    name = "val-core/tiny_arithmetic_level1/reward/mean@1"
    rewarded = replace(plain, protocol={**plain.protocol, "evaluation_sets": "tiny_arithmetic_level1 reward/mean@1"})
    assert matrix(like(rewarded, {2: {name: -1.5}})).cells[0].average.mean == -150.0
    with pytest.raises(RunComparisonError, match="to be a finite number, found nan"):
        matrix(like(rewarded, {2: {name: mathematics.nan}}))

"""Collected policies as problems: cases by hand, equality with the whole vocabulary, and what is dropped."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.study.context_files import contexts_of, whole_problem, write_study
from verl_sis.errors import SisShapeError, StudyFileError
from verl_sis.study import estimators as lab
from verl_sis.study import laboratory
from verl_sis.study.collected import RESOLUTION, collected


def only_group(folder, columns):
    (group,) = collected(write_study(folder, engine=columns)).groups
    return group


class TestByHand:
    """Old policy (1/2, 1/8, 1/16) and the rest 5/16, current one (1/4, 1/4, 1/8) and the rest 3/8.

    Ratios are (1/2, 2, 2) and 6/5. The rest is the second-largest column, and not in V_2. Advantages (1, 2, -1, 1/2).
    """

    @pytest.fixture
    def problem(self, tmp_path):
        group = only_group(tmp_path, contexts_of([[1 / 2, 1 / 8, 1 / 16]], [[1 / 4, 1 / 4, 1 / 8]]))
        advantage = torch.tensor([[1.0, 2.0, -1.0, 0.5]], dtype=torch.float64)
        return replace(group.problem(0), advantage=advantage)

    def test_policies(self, problem):
        torch.testing.assert_close(problem.old, torch.tensor([[8, 2, 1, 5]]) / 16.0, check_dtype=False)
        torch.testing.assert_close(problem.current, torch.tensor([[2, 2, 1, 3]]) / 8.0, check_dtype=False)
        assert problem.largest_k == 3

    @pytest.mark.parametrize(
        ("k", "inside", "maximum", "acceptance", "residual_mass"),
        [
            (1, [True, False, False, False], 0.5, [1.0, 0.0, 0.0, 0.0], 0.75),
            (2, [True, True, False, False], 2.0, [0.25, 1.0, 0.0, 0.0], 0.5),
            (3, [True, True, True, False], 2.0, [0.25, 1.0, 1.0, 0.0], 0.375),
        ],
    )
    def test_envelope(self, problem, k, inside, maximum, acceptance, residual_mass):
        found = lab.envelope(problem, k)
        assert found.inside.tolist() == [inside]
        assert found.maximum.item() == pytest.approx(maximum)
        assert found.acceptance[0].tolist() == pytest.approx(acceptance)
        assert found.residual_mass.item() == pytest.approx(residual_mass)
        # E[z] = (1 - xi) / M^
        accepted = (problem.old * found.acceptance).sum().item()
        assert accepted == pytest.approx((1 - residual_mass) / maximum)

    def test_the_other_rule_tries_the_rest_too(self, problem):
        """1.2 / 2."""
        found = lab.envelope(problem, 2, outside_top_k="envelope")
        assert found.acceptance[0].tolist() == pytest.approx([0.25, 1.0, 1.0, 0.6])

    def test_bias_of_sis_at_k_2(self, problem):
        """Coefficients (1/4 + 3/4 * 1/2, 1, 2, 6/5) less w are (1/8, -1, 0, 0).

        Times pi_old A: (1/16, -1/4, 0, 0), summing to -3/16; less pi times that:
        (1/16 + 3/64, -1/4 + 3/64, 3/128, 9/128) = (14, -26, 3, 9) / 128.
        """
        mean, _ = lab.sis(2)(problem)
        assert mean[0].tolist() == pytest.approx([0.625, 1.0, 2.0, 1.2])
        bias = lab.expected_gradient(problem, mean) - lab.target_gradient(problem)
        assert (128 * bias[0]).tolist() == pytest.approx([14, -26, 3, 9], rel=1e-6)
        torch.testing.assert_close(bias, lab.predicted_bias(problem, 2))
        assert lab.quality(problem, lab.sis(2)).bias.item() == pytest.approx(math.sqrt(962) / 128)

    @pytest.mark.parametrize("k", [0, 4])
    def test_the_rest_is_no_token_that_k_could_count(self, problem, k):
        with pytest.raises(SisShapeError, match=rf"K must lie in \[1, 3\], the tokens of the problem, got {k}"):
            lab.envelope(problem, k)


def test_log_ratio_rms_by_hand():
    """(1/2, 1/2) to (1/2, 1/2), and to (1/4, 3/4): half the mean of log(1/2)^2 and log(3/2)^2."""
    halves = torch.full((2, 2), 0.5, dtype=torch.float64)
    moved = torch.tensor([[0.5, 0.5], [0.25, 0.75]], dtype=torch.float64)
    expected = math.sqrt((math.log(0.5) ** 2 + math.log(1.5) ** 2) / 4)
    assert laboratory.log_ratio_rms(lab.Problem(halves, moved, halves)) == pytest.approx(expected)


def sorted_like_contexts(problem):
    """The problem with its columns by decreasing pi_old, as contexts have them."""
    order = problem.old.argsort(dim=1, descending=True, stable=True)
    return lab.Problem(*(p.gather(1, order) for p in (problem.old, problem.current, problem.advantage)))


@pytest.mark.parametrize("name", laboratory.named_estimators(10))
def test_a_rest_without_probability_changes_nothing(name):
    estimator = laboratory.named_estimators(10)[name]
    whole = whole_problem()
    bin_of = torch.full((len(whole.old), 1), 1e-14, dtype=torch.float64)
    columns = ((whole.old, bin_of), (whole.current, bin_of), (whole.advantage, bin_of / bin_of))
    found = lab.quality(lab.Problem(*(torch.cat(pair, dim=1) for pair in columns), lumped=True), estimator)
    expected = lab.quality(whole, estimator)
    for quantity in ("bias", "variance", "target"):
        torch.testing.assert_close(getattr(found, quantity), getattr(expected, quantity), rtol=1e-10, atol=1e-12)


def test_contexts_with_all_of_the_vocabulary_are_the_synthetic_problem(tmp_path):
    """Up to float32 in the file, and to RESOLUTION, which the rest is set to."""
    whole = sorted_like_contexts(whole_problem())
    group = only_group(tmp_path, contexts_of(whole.old, whole.current))
    assert group.floored == len(whole.old)
    assert group.old[:, -1].tolist() == pytest.approx([RESOLUTION] * 6, rel=1e-5)
    advantage = torch.cat([whole.advantage, torch.ones(6, 1, dtype=torch.float64)], dim=1)
    problem = replace(group.problem(0), advantage=advantage)
    for name, estimator in laboratory.named_estimators(10).items():
        found, expected = lab.quality(problem, estimator), lab.quality(whole, estimator)
        for quantity in ("bias", "variance", "target"):
            pair = getattr(found, quantity), getattr(expected, quantity)
            torch.testing.assert_close(*pair, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("k", [1, 4, 10])
def test_a_lumped_tail_is_exact_for_everything_that_looks_at_v_k(tmp_path, k):
    whole = sorted_like_contexts(whole_problem())
    problem = only_group(tmp_path, contexts_of(whole.old, whole.current, k=10)).problem(0)
    found, expected = lab.envelope(problem, k), lab.envelope(whole, k)
    assert not found.inside[:, -1].any() and found.inside.sum() == k * len(whole.old)
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.maximum, expected.maximum, **close)
    torch.testing.assert_close(found.residual_mass, expected.residual_mass, **close)
    torch.testing.assert_close(found.acceptance[:, :10], expected.acceptance[:, :10], **close)
    assert (found.acceptance[:, -1] == 0).all()


def test_a_lumped_tail_bounds_the_second_moment_of_the_ratio_from_below(tmp_path):
    whole = whole_problem()
    problem = only_group(tmp_path, contexts_of(whole.old, whole.current, k=10)).problem(0)
    lumped, exact = ((p.old * p.ratio.square()).sum(-1) for p in (problem, whole))
    assert (lumped < exact).all()


def test_contexts_that_are_no_whole_policies_are_dropped_and_counted(tmp_path):
    """Of twelve, five are used. A row with two faults counts once."""
    whole = whole_problem(contexts=12)
    columns = contexts_of(whole.old, whole.current, k=10)
    old, current = columns["old_log_prob"], columns["current_log_prob"]
    old[0, 3] = np.nan
    # In float64, exp(-800) is 0.
    current[1, 3] = -800.0
    old[2, 9] = -np.inf
    old[3, 8:] = -1e30
    old[4, 9] = current[4, 9] = -np.inf
    old[5] += 1.0
    current[6] += 1.0
    group = only_group(tmp_path, columns)
    assert (group.found, len(group.old)) == (12, 5)
    assert group.dropped == {"not_finite": 3, "filtered": 2, "mass_above_one": 2}
    torch.testing.assert_close(group.old[:, :10], torch.as_tensor(np.exp(old[7:])), rtol=1e-5, atol=1e-7)


def test_mass_above_one_by_rounding_is_used_with_the_smallest_rest(tmp_path):
    old = [[0.6, 0.4 + 3e-6], [0.6, 0.4 - 3e-6], [0.6, 0.3]]
    group = only_group(tmp_path, contexts_of(old, [[0.5, 0.4], [0.5, 0.4], [0.5, 0.5 + 3e-6]]))
    assert group.floored == 2
    assert group.old[:, 2].tolist() == pytest.approx([RESOLUTION, 3e-6, 0.1], rel=0.1)
    assert group.current[:, 2].tolist() == pytest.approx([0.1, 0.1, RESOLUTION], rel=1e-5)


def test_old_log_probs_in_bfloat16_are_told(tmp_path):
    whole = whole_problem()
    columns = contexts_of(whole.old, whole.current, k=10)
    assert not only_group(tmp_path / "float32", columns).bfloat16
    sampled = torch.as_tensor(columns["old_log_prob"][:, 0])
    columns["old_log_prob"][:, 0] = sampled.bfloat16().double().numpy()
    assert only_group(tmp_path / "bfloat16", columns).bfloat16
    # A log-prob of 0 tells nothing.
    certain = contexts_of([[1.0, 1e-7]], [[1.0, 1e-7]])
    assert not only_group(tmp_path / "certain", certain).bfloat16


def test_the_policies_of_updates_are_told_apart_by_age(tmp_path):
    whole = whole_problem()
    updates = contexts_of(whole.old, whole.current, k=10, age=[2, 0, 2, 0, 2, 1])
    engine = contexts_of(whole.old, whole.current, k=10)
    study = collected(write_study(tmp_path, update=updates, engine=engine))
    assert [group.name for group in study.groups] == ["engine", "update, age 0", "update, age 1", "update, age 2"]
    assert [group.found for group in study.groups] == [6, 2, 1, 3]
    probabilities = np.exp(updates["old_log_prob"][[0, 2, 4]])
    torch.testing.assert_close(study.groups[3].old[:, :10], torch.as_tensor(probabilities), rtol=1e-5, atol=1e-7)


def test_at_most_so_many_contexts_of_a_group_are_used(tmp_path):
    whole = whole_problem(contexts=12)
    columns = contexts_of(whole.old, whole.current, k=10)
    study = write_study(tmp_path, engine=columns, floor=columns)
    first, second = collected(study, most=5).groups
    assert (first.found, len(first.old)) == (5, 5)
    assert torch.equal(first.old, second.old)
    assert len(collected(study, most=100).groups[0].old) == 12


def test_draws_of_advantages_are_common_to_pairs_and_differ_among_seeds(tmp_path):
    whole = whole_problem()
    columns = contexts_of(whole.old, whole.current, k=10)
    study = collected(write_study(tmp_path, engine=columns, floor=columns), seeds=2)
    drawn = {(name, seed): problem.advantage for name, seed, problem in study.problems()}
    assert len(drawn) == 4
    assert torch.equal(drawn["engine", 0], drawn["floor", 0])
    assert not torch.equal(drawn["engine", 0], drawn["engine", 1])


def test_a_k_below_that_of_the_comparison_is_used_as_it_is(tmp_path):
    whole = whole_problem()
    study = collected(write_study(tmp_path, engine=contexts_of(whole.old, whole.current, k=3)), seeds=2)
    assert set(laboratory.side_by_side(study)["k"]) == {3}
    assert laboratory.by_k(study)["k"].tolist() == [1, 3]


def test_a_group_that_cannot_be_used_is_left_out_of_the_tables_only(tmp_path):
    whole = whole_problem()
    filtered = contexts_of(whole.old, whole.current, k=10)
    filtered["old_log_prob"][:, 9] = -np.inf
    pairs = {"engine": filtered, "floor": contexts_of(whole.old, whole.current, k=10)}
    study = collected(write_study(tmp_path, **pairs), seeds=2)
    assert set(laboratory.by_k(study)["policies"]) == {"floor"}
    assert study.groups[0].record() == {
        "policies": "engine",
        "contexts": 6,
        "used": 0,
        "dropped": {"not_finite": 0, "filtered": 6, "mass_above_one": 0},
        "k": 10,
        "log_ratio_rms": None,
        "mean_rest": None,
        "rest_set_to_resolution": 0,
        "old_log_prob_is_bfloat16": False,
    }
    (tmp_path / "contexts" / "shard-00000-floor.parquet").unlink()
    with pytest.raises(StudyFileError, match=r"none of them is: \{'engine': .*'filtered': 6.* top_p or top_k"):
        collected(tmp_path)


def test_contexts_without_rows_are_none(tmp_path):
    whole = whole_problem()
    empty = {name: values[:0] for name, values in contexts_of(whole.old, whole.current, k=10).items()}
    with pytest.raises(StudyFileError, match="found none"):
        collected(write_study(tmp_path, update=empty, engine=empty))

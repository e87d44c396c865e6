"""The acceptance rule and the transformed old log-probs."""

import math

import pytest
import torch

from verl_sis.core.acceptance import OUTSIDE_TOP_K, accept, acceptance_log_prob, transformed_old_log_prob

INF, NAN = math.inf, math.nan
LAST_UNIFORM = 1 - 2.0**-24


def log_acceptance(w: float, envelope: float, inside: bool, rule: str = "reject") -> float:
    return float(
        acceptance_log_prob(
            torch.tensor([w]).log(), torch.tensor([envelope]).log(), torch.tensor([inside]), outside_top_k=rule
        )
    )


def test_token_of_top_k_has_ratio_over_envelope():
    # w = 0.6, M^ = 1.2: a = 1/2.
    assert math.exp(log_acceptance(0.6, 1.2, True)) == pytest.approx(0.5, rel=1e-6)


def test_outside_top_k_reject_rejects_what_the_released_rule_always_accepts():
    # Fault 2 of the release: y outside V_K, w = 1.5, M^ = 1.2. Released code: min(1, 1.5 / 1.2) = 1.
    assert log_acceptance(1.5, 1.2, False, "reject") == -INF
    assert log_acceptance(1.5, 1.2, False, "envelope") == 0.0
    uniforms = torch.linspace(0, LAST_UNIFORM, 1000)
    for rule, share in (("reject", 0.0), ("envelope", 1.0)):
        log_a = torch.full_like(uniforms, log_acceptance(1.5, 1.2, False, rule))
        assert float(accept(log_a, uniforms).float().mean()) == share


def test_outside_top_k_below_the_envelope_is_tested_by_the_released_rule():
    assert math.exp(log_acceptance(0.3, 1.2, False, "envelope")) == pytest.approx(0.25, rel=1e-6)
    assert log_acceptance(0.3, 1.2, False, "reject") == -INF


@pytest.mark.parametrize("rule", OUTSIDE_TOP_K)
def test_rules_agree_inside_top_k(rule):
    assert math.exp(log_acceptance(0.9, 1.2, True, rule)) == pytest.approx(0.75, rel=1e-6)


def test_unknown_rule_raises_and_names_the_known_ones():
    with pytest.raises(ValueError, match=r"reject.*envelope.*'keep'"):
        log_acceptance(1.0, 1.0, True, "keep")


def test_certain_acceptance_always_and_impossible_never():
    uniforms = torch.tensor([0.0, 0.5, LAST_UNIFORM])
    assert accept(torch.zeros(3), uniforms).tolist() == [True] * 3
    assert accept(torch.full((3,), -INF), uniforms).tolist() == [False] * 3


def test_ratio_of_exactly_one_is_no_special_case():
    # Fault 3 of the release: w == 1 was always accepted. Here M^ = 4, so a = 1/4.
    assert math.exp(log_acceptance(1.0, 4.0, True)) == pytest.approx(0.25, rel=1e-6)


def test_acceptance_compares_strictly():
    # P(u < a) = a on the grid of u: u = 1/2 does not pass a = 1/2.
    log_half = torch.log(torch.tensor([0.5]))
    assert not bool(accept(log_half, torch.tensor([0.5])))
    assert bool(accept(log_half, torch.tensor([0.5 - 2.0**-24])))


@pytest.mark.parametrize("rule", OUTSIDE_TOP_K)
@pytest.mark.parametrize(
    ("log_ratio", "log_envelope"),
    [(NAN, 0.0), (0.0, NAN), (INF, 0.0), (-INF, 0.0), (0.0, INF), (0.0, -INF), (INF, INF)],
)
def test_undefined_ratios_never_accept(log_ratio, log_envelope, rule):
    log_a = acceptance_log_prob(
        torch.tensor([log_ratio]), torch.tensor([log_envelope]), torch.tensor([True]), outside_top_k=rule
    )
    assert float(log_a) == -INF
    assert not bool(accept(log_a, torch.tensor([0.0])))


def test_common_normaliser_cancels():
    log_ratio, log_envelope, inside = torch.tensor([-0.5, 0.25]), torch.tensor([0.5, 0.25]), torch.tensor([True, True])
    shifted = acceptance_log_prob(log_ratio + 8.0, log_envelope + 8.0, inside)
    assert torch.equal(shifted, acceptance_log_prob(log_ratio, log_envelope, inside))
    assert shifted.tolist() == [-1.0, 0.0]


def test_transformed_old_log_prob_gives_ratio_1_and_gradient_of_log_pi_to_accepted_tokens():
    log_prob = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    old = torch.tensor([[-1.5, -1.7]])
    transformed = transformed_old_log_prob(torch.tensor([[True, False]]), log_prob, old)
    assert not transformed.requires_grad
    assert torch.equal(transformed, torch.tensor([[-1.0, -1.7]]))
    ratio = torch.exp(log_prob - transformed)
    ratio.sum().backward()
    # Accepted: ratio 1, d ratio / d log pi = 1. Rejected: ratio e^-0.3 and its own derivative.
    assert ratio[0].tolist() == pytest.approx([1.0, math.exp(-0.3)])
    assert log_prob.grad[0].tolist() == pytest.approx([1.0, math.exp(-0.3)])


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_accepted_token_forgets_a_broken_old_log_prob(broken):
    transformed = transformed_old_log_prob(torch.tensor([True]), torch.tensor([-1.0]), torch.tensor([broken]))
    assert transformed.tolist() == [-1.0]

"""The enumeration of sequences against autograd and against a loop over all of them."""

from itertools import product

import pytest
import torch

from verl_sis.study import estimators as lab
from verl_sis.study import sequences


def probability(tables, tokens):
    total, row = 1.0, 0
    for rows, token in zip(tables, tokens, strict=True):
        total *= rows[row, token].item()
        row = row * rows.shape[1] + token
    return total


@pytest.fixture
def language():
    return sequences.random_language(3, 3, 0.8, seed=1)


def test_the_policy_gradient_is_autograds(language):
    """Gradient of E_pi[R] with respect to the logits of every prefix."""
    logits = [rows.log().requires_grad_() for rows in language.current]
    tables = [rows.softmax(-1) for rows in logits]
    reach = sequences.prefix_probabilities(tables)
    value = ((reach[-1][:, None] * tables[-1]).reshape(-1) * language.reward).sum()
    expected = torch.autograd.grad(value, logits)
    torch.testing.assert_close(
        sequences.policy_gradient(language), torch.cat([part.reshape(-1) for part in expected]), rtol=1e-9, atol=1e-14
    )


@pytest.mark.parametrize("name", ["is", "sis", "sis expected"])
def test_an_estimator_against_a_loop_over_all_sequences(language, name):
    estimator = {
        "is": lab.importance_sampling,
        "sis": lab.sis(2),
        "sis expected": lab.sis(2, estimator="expected"),
    }[name]
    baseline = sum(
        probability(language.old, y) * language.reward[9 * y[0] + 3 * y[1] + y[2]].item()
        for y in product(range(3), repeat=3)
    )
    blocks = [torch.zeros(3**t, 3, dtype=torch.float64) for t in range(3)]
    for y in product(range(3), repeat=3):
        advantage = language.reward[9 * y[0] + 3 * y[1] + y[2]].item() - baseline
        row = 0
        for t, token in enumerate(y):
            problem = lab.Problem(
                language.old[t][row : row + 1], language.current[t][row : row + 1], torch.ones(1, 3).double()
            )
            coefficient = estimator(problem)[0][0, token].item()
            score = torch.nn.functional.one_hot(torch.tensor(token), 3) - language.current[t][row]
            blocks[t][row] += probability(language.old, y) * coefficient * advantage * score
            row = 3 * row + token
    expected = torch.cat([block.reshape(-1) for block in blocks])
    torch.testing.assert_close(sequences.estimated_gradient(language, estimator), expected, rtol=1e-9, atol=1e-13)


def test_token_level_importance_sampling_meets_the_surrogate_and_not_the_policy_gradient(language):
    found = sequences.estimated_gradient(language, lab.importance_sampling)
    torch.testing.assert_close(found, sequences.surrogate_gradient(language), rtol=1e-12, atol=1e-15)
    distance = (found - sequences.policy_gradient(language)).norm() / sequences.policy_gradient(language).norm()
    assert distance > 0.05


def test_on_policy_all_three_are_one():
    language = sequences.random_language(3, 3, 0.0, seed=2)
    target = sequences.policy_gradient(language)
    for found in (sequences.surrogate_gradient(language), sequences.estimated_gradient(language, lab.sis(2))):
        torch.testing.assert_close(found, target, rtol=1e-12, atol=1e-15)

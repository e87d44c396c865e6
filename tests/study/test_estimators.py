"""The laboratory against hand-computed cases, a slow loop, sampling, and the identities of SIS."""

import pytest
import torch

from verl_sis.errors import SisShapeError
from verl_sis.study import estimators as lab


def random_problem(contexts=5, vocabulary=7, drift=0.7, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(contexts, vocabulary, generator=generator, dtype=torch.float64)

    logits = 2 * noise()
    return lab.Problem(torch.softmax(logits, -1), torch.softmax(logits + drift * noise(), -1), noise())


def by_hand():
    """pi_old = (1/2, 1/4, 1/4), pi = (1/4, 1/2, 1/4), so w = (1/2, 2, 1); A = (1, 2, -1)."""
    rows = ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [1.0, 2.0, -1.0])
    return lab.Problem(*(torch.tensor([row], dtype=torch.float64) for row in rows))


class TestByHand:
    """Three tokens, every number worked out in the docstrings."""

    def test_target(self):
        """With pi A = (1/4, 1, -1/4), summing to 1; minus pi times that: (0, 1/2, -1/2)."""
        assert lab.target_gradient(by_hand()).tolist() == [[0.0, 0.5, -0.5]]

    def test_importance_sampling_has_no_bias(self):
        assert lab.quality(by_hand(), lab.importance_sampling).bias.item() == pytest.approx(0.0, abs=1e-15)

    def test_variance_of_importance_sampling(self):
        """Second moment 117/64, less |target|^2 = 1/2.

        With |onehot - pi|^2 = 1 - 2 pi + 3/8 = (7/8, 3/8, 7/8), the sum of pi_old w^2 A^2 times it is
        1/2 * 1/4 * 1 * 7/8 + 1/4 * 4 * 4 * 3/8 + 1/4 * 1 * 1 * 7/8 = 7/64 + 96/64 + 14/64.
        """
        assert lab.quality(by_hand(), lab.importance_sampling).variance.item() == pytest.approx(117 / 64 - 1 / 2)

    def test_acceptance_at_k_2(self):
        """V_2 holds token 0 and one of the two ties, token 1: M^ = 2, a = (1/4, 1, 0), xi = 1/4."""
        found = lab.envelope(by_hand(), 2)
        assert found.maximum.item() == 2.0
        assert found.acceptance.tolist() == [[0.25, 1.0, 0.0]]
        assert found.residual_mass.item() == 0.25
        assert lab.envelope(by_hand(), 2, outside_top_k="envelope").acceptance.tolist() == [[0.25, 1.0, 0.5]]

    def test_sis_coefficients_at_k_2(self):
        """E[c|y] = a + (1 - a) w = (1/4 + 3/8, 1, 1); E[c^2|y] = a + (1 - a) w^2 = (1/4 + 3/16, 1, 1)."""
        mean, square = lab.sis(2)(by_hand())
        assert mean.tolist() == [[0.625, 1.0, 1.0]]
        assert square.tolist() == [[0.4375, 1.0, 1.0]]
        mean, square = lab.sis(2, estimator="expected")(by_hand())
        assert square.tolist() == [[0.625**2, 1.0, 1.0]]

    def test_the_others(self):
        """A = (1, 2, -1): PPO's clip is active for token 1 only (A > 0, w = 2)."""
        problem = by_hand()
        assert lab.clipped(problem)[0].tolist() == [[0.5, 0.0, 1.0]]
        assert lab.truncated(problem)[0].tolist() == [[0.5, 2.0, 1.0]]
        assert lab.cispo(problem)[0].tolist() == [[0.5, 1.2, 1.0]]
        assert lab.icepop(problem)[0].tolist() == [[0.5, 2.0, 1.0]]
        assert lab.uncorrected(problem)[0].tolist() == [[1.0, 1.0, 1.0]]


ESTIMATORS = {
    "uncorrected": lab.uncorrected,
    "is": lab.importance_sampling,
    "clipped": lab.clipped,
    "tis": lab.truncated,
    "cispo": lab.cispo,
    "icepop": lab.icepop,
    "sis": lab.sis(3),
    "sis expected": lab.sis(3, estimator="expected"),
    "sis envelope": lab.sis(3, outside_top_k="envelope"),
    "sis over clipped": lab.sis(3, on="clipped"),
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_against_a_loop_over_tokens(name):
    """Moments of the gradient, context by context and token by token, in Python floats."""
    problem = random_problem()
    mean, square = ESTIMATORS[name](problem)
    found = lab.quality(problem, ESTIMATORS[name])
    for row in range(5):
        q, p, advantage = (t[row].tolist() for t in (problem.old, problem.current, problem.advantage))
        expected, target, second = [0.0] * 7, [0.0] * 7, 0.0
        for y in range(7):
            for v in range(7):
                score = (v == y) - p[v]
                expected[v] += q[y] * mean[row, y].item() * advantage[y] * score
                target[v] += p[y] * advantage[y] * score
                second += q[y] * square[row, y].item() * advantage[y] ** 2 * score**2
        bias = sum((e - t) ** 2 for e, t in zip(expected, target, strict=True)) ** 0.5
        assert found.bias[row].item() == pytest.approx(bias, abs=1e-14)
        assert found.variance[row].item() == pytest.approx(second - sum(e * e for e in expected))
        assert found.target[row].item() == pytest.approx(sum(t * t for t in target) ** 0.5)


def test_against_sampling():
    """A million samples of the gradient with drawn z: mean and variance within five standard errors."""
    problem = random_problem(contexts=1)
    generator = torch.Generator().manual_seed(1)
    count = 1_000_000
    y = torch.multinomial(problem.old[0], count, replacement=True, generator=generator)
    a = lab.envelope(problem, 3).acceptance[0, y]
    z = torch.rand(count, generator=generator, dtype=torch.float64) < a
    c = torch.where(z, 1.0, problem.ratio[0, y])
    score = torch.nn.functional.one_hot(y, 7) - problem.current[0]
    samples = (c * problem.advantage[0, y])[:, None] * score
    mean, _ = lab.sis(3)(problem)
    expected = lab.expected_gradient(problem, mean)[0]
    error = samples.std(0) / count**0.5
    assert bool(((samples.mean(0) - expected).abs() < 5 * error).all())
    spread = (samples - expected).square().sum(-1)
    found = lab.quality(problem, lab.sis(3)).variance.item()
    assert abs(spread.mean().item() - found) < 5 * spread.std().item() / count**0.5


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_the_bias_of_sis_is_the_closed_form(k, seed):
    problem = random_problem(seed=seed)
    mean, _ = lab.sis(k)(problem)
    bias = lab.expected_gradient(problem, mean) - lab.target_gradient(problem)
    torch.testing.assert_close(bias, lab.predicted_bias(problem, k), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_expected_acceptance(k):
    """E[z] = (1 - xi_K) / M^ under pi_old."""
    problem = random_problem()
    found = lab.envelope(problem, k)
    accepted = (problem.old * found.acceptance).sum(-1)
    torch.testing.assert_close(accepted, (1 - found.residual_mass) / found.maximum.squeeze(-1))


def test_expected_has_the_bias_of_sampled_and_no_more_variance():
    problem = random_problem(contexts=50)
    sampled, expected = (lab.quality(problem, lab.sis(3, estimator=name)) for name in ("sampled", "expected"))
    torch.testing.assert_close(expected.bias, sampled.bias)
    assert bool((expected.variance <= sampled.variance + 1e-12).all())


def test_on_policy_all_agree():
    """Where pi = pi_old, w = 1, and neither bias nor any difference in variance is left."""
    problem = random_problem(drift=0.0)
    reference = lab.quality(problem, lab.importance_sampling)
    for name, estimator in ESTIMATORS.items():
        found = lab.quality(problem, estimator)
        assert float(found.bias.max()) < 1e-14, name
        torch.testing.assert_close(found.variance, reference.variance)


def test_mean_squared_error_falls_to_the_bias():
    found = lab.quality(random_problem(), lab.sis(3))
    torch.testing.assert_close(found.mean_squared_error(1), found.bias.square() + found.variance)
    assert bool((found.mean_squared_error(10**9) - found.bias.square() < 1e-6).all())


@pytest.mark.parametrize(
    "tensors",
    [
        (torch.ones(2, 3) / 3, torch.ones(2, 3) / 3, torch.ones(2, 3)),
        (torch.ones(2, 3).double() / 3, torch.ones(2, 4).double() / 4, torch.ones(2, 3).double()),
        (torch.ones(2, 3).double(), torch.ones(2, 3).double() / 3, torch.ones(2, 3).double()),
    ],
    ids=["float32", "other vocabularies", "no probabilities"],
)
def test_what_is_no_problem_is_refused(tensors):
    with pytest.raises(SisShapeError):
        lab.Problem(*tensors)

"""The estimator laboratory: experiments by exact enumeration on synthetic or collected policies, as tables.

    verl-sis study estimator --out OUT          synthetic policies
    verl-sis study estimator DIR --out OUT      those of a study or a training run (verl_sis.study.collected)

Every table is the data of figures of ``verl_sis.study.laboratory_figures``. Rates are relative to the norm of the
target gradient, pooled over contexts (root of mean squares), then averaged over seeds with their standard error.
``log_ratio_rms`` says how far apart two policies are, synthetic or not.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import pandas
import torch

from verl_sis.study import estimators as lab
from verl_sis.study import sequences

SAMPLES = (16, 256, 4096)
"""Numbers of samples in a gradient estimate at which mean squared errors are compared."""

K = 10
"""K of SIS where estimators stand side by side."""

KS = (1, 5, 10, 20, 50, 100, 500)
"""Sizes of V_K."""


class Policies(Protocol):
    """Pairs of an old and a current policy, in groups that tables and figures compare."""

    @property
    def across(self) -> str:
        """Column of the tables that tells the groups apart."""
        ...

    @property
    def ks(self) -> tuple[int, ...]:
        """Sizes of V_K; the largest that a problem allows is added, larger ones are left out."""
        ...

    def problems(self) -> Iterator[tuple[float | str, int, lab.Problem]]:
        """Every group's value of the column ``across``, with every seed, and the problem."""
        ...


@dataclass(frozen=True)
class Settings:
    """Size of the laboratory on synthetic policies.

    Attributes:
        contexts: Contexts per seed.
        vocabulary: V.
        drifts: Standard deviations of the difference in logits between pi_old and pi.
        ks: Sizes of V_K; V itself is added.
        seeds: Number of seeds.
        zipf: Exponent of the old policy's distribution over ranks.
    """

    across: ClassVar[str] = "drift"

    contexts: int = 128
    vocabulary: int = 2048
    drifts: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    ks: tuple[int, ...] = KS
    seeds: int = 3
    zipf: float = 1.5

    def problems(self) -> Iterator[tuple[float, int, lab.Problem]]:
        """Every drift with every seed, and the problem."""
        for drift in self.drifts:
            for seed in range(self.seeds):
                yield drift, seed, synthetic_problem(self, drift, seed)


def synthetic_problem(settings: Settings, drift: float, seed: int) -> lab.Problem:
    """Contexts with a Zipf-like old policy, a current one of independently moved logits, and random advantages."""
    generator = torch.Generator().manual_seed(seed)
    shape = (settings.contexts, settings.vocabulary)

    def noise() -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ranks = torch.arange(1, settings.vocabulary + 1, dtype=torch.float64)
    logits = -settings.zipf * ranks.log() + 0.5 * noise()
    return lab.Problem(logits.softmax(-1), (logits + drift * noise()).softmax(-1), noise())


def named_estimators(k: int) -> dict[str, lab.Estimator]:
    """Every estimator under its name, SIS at one K."""
    return {
        "uncorrected": lab.uncorrected,
        "IS": lab.importance_sampling,
        "PPO clip": lab.clipped,
        "TIS": lab.truncated,
        "CISPO": lab.cispo,
        "IcePop": lab.icepop,
        "SIS": lab.sis(k),
        "SIS, expected": lab.sis(k, estimator="expected"),
        "SIS, envelope rule": lab.sis(k, outside_top_k="envelope"),
        "SIS over PPO clip": lab.sis(k, on="clipped"),
    }


def side_by_side(policies: Policies) -> pandas.DataFrame:
    """Every estimator on every group: bias, spread, and mean squared error over that of IS; SIS at ``K``."""
    rows = []
    for group, seed, problem in policies.problems():
        k = min(K, problem.largest_k)
        common = {"k": k, policies.across: group, "seed": seed, "log_ratio_rms": log_ratio_rms(problem)}
        reference = lab.quality(problem, lab.importance_sampling)
        for name, estimator in named_estimators(k).items():
            rows.append({"estimator": name, **common, **_measured(lab.quality(problem, estimator), reference)})
    return _over_seeds(rows, ["estimator", "k", policies.across])


def by_k(policies: Policies) -> pandas.DataFrame:
    """SIS at every K on every group: residual mass, acceptance, bias, mean squared error over that of IS."""
    rows = []
    for group, seed, problem in policies.problems():
        common = {policies.across: group, "seed": seed, "log_ratio_rms": log_ratio_rms(problem)}
        reference = lab.quality(problem, lab.importance_sampling)
        for k in (*(k for k in policies.ks if k < problem.largest_k), problem.largest_k):
            found = lab.envelope(problem, k)
            accepted = (problem.old * found.acceptance).sum(-1)
            rows.append(
                {
                    "k": k,
                    **common,
                    "residual_mass": float(found.residual_mass.mean()),
                    "residual_mass_p95": float(found.residual_mass.quantile(0.95)),
                    "acceptance": float(accepted.mean()),
                    **_measured(lab.quality(problem, lab.sis(k)), reference),
                }
            )
    return _over_seeds(rows, ["k", policies.across])


def by_sequence(settings: Settings, vocabulary: int = 5, length: int = 4) -> pandas.DataFrame:
    """Distance of expected gradients from the policy gradient and from the token-level surrogate, all enumerated."""
    rows = []
    estimators = {
        "IS": lab.importance_sampling,
        "SIS, K = 2": lab.sis(2),
        "SIS, K = V": lab.sis(vocabulary),
        "uncorrected": lab.uncorrected,
    }
    for drift in settings.drifts:
        for seed in range(8 * settings.seeds):
            language = sequences.random_language(vocabulary, length, drift, seed)
            target = sequences.policy_gradient(language)
            surrogate = sequences.surrogate_gradient(language)
            for name, estimator in estimators.items():
                found = sequences.estimated_gradient(language, estimator)
                rows.append(
                    {
                        "estimator": name,
                        "drift": drift,
                        "seed": seed,
                        "to_policy_gradient": float((found - target).norm() / target.norm()),
                        "to_surrogate": float((found - surrogate).norm() / surrogate.norm()),
                    }
                )
    return _over_seeds(rows, ["estimator", "drift"])


def log_ratio_rms(problem: lab.Problem) -> float:
    """How far the current policy is from the old one: ``sqrt(E_old[(log w)^2])``, nats, the mean over contexts too.

    Of synthetic policies this is close to the drift, of collected ones it places them on the same scale.
    """
    return float((problem.old * problem.ratio.log().square()).sum(-1).mean().sqrt())


def _measured(found: lab.Quality, reference: lab.Quality) -> dict[str, float]:
    """Figures of one batch of contexts, pooled over them once."""
    target = found.target.square().mean().sqrt()
    errors = {
        f"mse_over_is_{n}": float(found.mean_squared_error(n).mean() / reference.mean_squared_error(n).mean())
        for n in SAMPLES
    }
    return {
        "relative_bias": float(found.bias.square().mean().sqrt() / target),
        "relative_deviation": float(found.variance.mean().sqrt() / target),
        **errors,
    }


def _over_seeds(rows: Iterable[dict[str, object]], keys: list[str]) -> pandas.DataFrame:
    """Mean of each figure over seeds, and its standard error in a column ``..._se``."""
    grouped = pandas.DataFrame(rows).drop(columns="seed").groupby(keys, sort=False)
    # The stubs of pandas let an aggregate be a scalar.
    mean: Any = grouped.mean()
    error: Any = grouped.sem()
    return mean.join(error.add_suffix("_se")).reset_index()

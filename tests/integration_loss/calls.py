"""One call of a loss as verl makes it, with verl's own configuration; under SIS with a hand-made micro-batch."""

from dataclasses import dataclass, field
from typing import Any

import torch
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config.actor import FSDPActorConfig

from verl_sis.config import SisConfig, SisPolicyLossConfig
from verl_sis.integration.policy_loss import CURRENT, MicroBatch, sis_policy_loss
from verl_sis.run_facts import ACTIVATION_MODULE, SisRunFacts

TOKEN_LOSSES = ("vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl", "kl_cov", "dro")
"""Base losses that are sums over tokens."""
BASE_LOSSES = (*TOKEN_LOSSES, "gspo", "geo_mean", "clip_cov")
CERTAIN = 0.0
NEVER = -torch.inf


def sis_config(**settings: Any) -> SisConfig:
    """Settings of SIS in a run that activates it."""
    return SisConfig(run=SisRunFacts(external_lib=ACTIVATION_MODULE), **settings)


def actor_config(**settings: Any) -> FSDPActorConfig:
    """Actor configuration of verl with SIS chosen; ``dro`` needs a beta, the covariance losses a share of tokens."""
    policy_loss = SisPolicyLossConfig(
        sis=sis_config(), dro_beta=0.1, kl_cov_ratio=0.34, clip_cov_ratio=0.34, clip_cov_lb=0.0, ppo_kl_coef=0.5
    )
    defaults = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 4, "policy_loss": policy_loss}
    return FSDPActorConfig(**{**defaults, **settings})


@dataclass
class Batch:
    """Arguments of a policy loss, ``[B, T]`` each."""

    log_prob: torch.Tensor
    old_log_prob: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor | None = None
    config: FSDPActorConfig = field(default_factory=actor_config)

    def arguments(self, log_prob: torch.Tensor) -> dict[str, Any]:
        """Keyword arguments as ``ppo_loss`` passes them."""
        return {
            "old_log_prob": self.old_log_prob,
            "log_prob": log_prob,
            "advantages": self.advantages,
            "response_mask": self.mask,
            "loss_agg_mode": self.config.loss_agg_mode,
            "config": self.config,
            "rollout_is_weights": self.weights,
        }


@dataclass
class Outcome:
    """Value, gradient by ``log_prob`` and metrics of one call."""

    value: torch.Tensor
    gradient: torch.Tensor
    metrics: dict[str, Any]


def call(loss: Any, batch: Batch) -> Outcome:
    """Call a registered loss (by name or function) and differentiate it."""
    log_prob = batch.log_prob.clone().requires_grad_()
    function = POLICY_LOSS_REGISTRY[loss] if isinstance(loss, str) else loss
    value, metrics = function(**batch.arguments(log_prob))
    return Outcome(value.detach(), torch.autograd.grad(value, log_prob)[0], metrics)


def micro_batch(base: str, log_acceptance: torch.Tensor, **columns: Any) -> MicroBatch:
    """What the worker would set: everything but the acceptance is filled with harmless values."""
    zeros = torch.zeros_like(log_acceptance)
    defaults = {
        "base_loss": POLICY_LOSS_REGISTRY[base],
        "estimator": "sampled",
        "acceptance_log_prob": log_acceptance,
        "uniforms": zeros + 0.5,
        "contains_sampled": log_acceptance > NEVER,
        "log_expected": zeros - 1.0,
        "normalized": torch.ones_like(zeros, dtype=torch.bool),
        "log_envelope": zeros + 1.0,
        "residual_mass": zeros,
        "stored_log_prob": zeros,
        "sample_key": torch.arange(log_acceptance.shape[0]),
        "rollout_log_prob": None,
    }
    return MicroBatch(**{**defaults, **columns})


def call_under_sis(batch: Batch, current: MicroBatch) -> Outcome:
    """Call the registered loss ``sis`` with ``current`` as the micro-batch in progress."""
    token = CURRENT.set(current)
    try:
        return call(sis_policy_loss, batch)
    finally:
        CURRENT.reset(token)


def decided(accepted: torch.Tensor) -> torch.Tensor:
    """Log-acceptance of tokens whose z is certain."""
    return torch.where(accepted, CERTAIN, NEVER)


def random_batch(rows: int = 2, width: int = 3, seed: int = 0, **settings: Any) -> Batch:
    """Ratios inside and outside of clip ranges, advantages of both signs, a ragged mask."""
    generator = torch.Generator().manual_seed(seed)
    log_prob = -3 * torch.rand(rows, width, generator=generator) - 0.05
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[-1, -1] = False
    return Batch(
        log_prob=log_prob,
        old_log_prob=log_prob - 0.4 * torch.randn(rows, width, generator=generator),
        advantages=torch.randn(rows, width, generator=generator),
        mask=mask,
        config=actor_config(**settings),
    )

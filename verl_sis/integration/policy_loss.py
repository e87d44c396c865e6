"""The policy loss ``sis``: acceptance, then the base loss on the transformed old log-probs.

verl calls a registered loss with seven fixed arguments, none of them a top-K. So the worker puts what it knows of the
micro-batch into ``CURRENT`` around verl's ``ppo_loss``, and the registered loss takes it from there.
"""

from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from verl_sis.config import LOSS_MODE
from verl_sis.core import acceptance
from verl_sis.core.statistics import PooledStatistics, acceptance_statistics, mismatch_statistics
from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.integration.base_loss import PolicyLoss


@dataclass
class MicroBatch:
    """What the worker knows of the micro-batch whose loss is being computed.

    Attributes:
        base_loss: The registered policy loss to call.
        estimator: ``sampled`` or ``expected``.
        acceptance_log_prob: ``[B, T]`` float32, log a.
        uniforms: ``[B, T]`` float32, u.
        contains_sampled: ``[B, T]`` bool, y in V_K.
        log_expected: ``[B, T]`` float32, ``log((1 - xi_K) / M^)``.
        normalized: ``[B, T]`` bool, tokens whose M^ and xi_K are known.
        log_envelope: ``[B, T]`` float32, log M^.
        residual_mass: ``[B, T]`` float32, xi_K.
        stored_log_prob: ``[B, T]`` float32, log pi_old kept beside the top-K.
        sample_key: ``[B]`` int64.
        rollout_log_prob: ``[B, T]`` float32 of the rollout engine, or None if the run does not report it.
        statistics: Filled by the loss.
    """

    base_loss: PolicyLoss
    estimator: str
    acceptance_log_prob: torch.Tensor
    uniforms: torch.Tensor
    contains_sampled: torch.Tensor
    log_expected: torch.Tensor
    normalized: torch.Tensor
    log_envelope: torch.Tensor
    residual_mass: torch.Tensor
    stored_log_prob: torch.Tensor
    sample_key: torch.Tensor
    rollout_log_prob: torch.Tensor | None
    statistics: PooledStatistics = field(default_factory=PooledStatistics)


CURRENT: ContextVar[MicroBatch] = ContextVar("verl_sis_micro_batch")
"""The micro-batch of the loss call in progress, set by the worker."""


def sis_policy_loss(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Selective Importance Sampling over a base loss; registered as ``sis``.

    ``sampled``: the base loss of ``old_log_prob' = where(z, stop_gradient(log_prob), old_log_prob)``. ``expected``: the
    expectation of that over z, ``a * L(ratio 1) + (1 - a) * L(ratio w)``, by calling the base loss twice with a and
    1 - a as token weights; its metrics are then those of the second call, at ratio w.

    Args:
        old_log_prob: ``[B, T]`` log pi_old of the sampled tokens, from the trainer.
        log_prob: ``[B, T]`` log pi of the sampled tokens.
        advantages: ``[B, T]``.
        response_mask: ``[B, T]`` bool, tokens that bear loss.
        loss_agg_mode: Passed through.
        config: verl's actor configuration, passed through.
        rollout_is_weights: ``[B, T]`` weights of verl's rollout correction, or None.

    Returns:
        The base loss's value and metrics.

    Raises:
        SisStateError: If no worker of verl_sis is active around this call.
    """
    micro_batch = CURRENT.get(None)
    if micro_batch is None:
        raise SisStateError(
            "the policy loss 'sis' was called outside of verl_sis's worker, so there is no top-K to test against. "
            "Choose SIS by a preset, +sis@_global_=grpo, not by policy_loss.loss_mode=sis alone"
        )
    accepted = acceptance.accept(micro_batch.acceptance_log_prob, micro_batch.uniforms)
    _collect_statistics(micro_batch, accepted, log_prob.detach(), old_log_prob, response_mask.bool())
    arguments = {
        "log_prob": log_prob,
        "advantages": advantages,
        "response_mask": response_mask,
        "loss_agg_mode": loss_agg_mode,
        "config": config,
    }
    if micro_batch.estimator == "sampled":
        return micro_batch.base_loss(
            old_log_prob=acceptance.transformed_old_log_prob(accepted, log_prob, old_log_prob),
            rollout_is_weights=rollout_is_weights,
            **arguments,
        )
    weight = torch.exp(micro_batch.acceptance_log_prob)
    outer = torch.ones_like(weight) if rollout_is_weights is None else rollout_is_weights
    at_one, _ = micro_batch.base_loss(old_log_prob=log_prob.detach(), rollout_is_weights=outer * weight, **arguments)
    # A token that is certain to be accepted has no part in this term; 0 * inf would give it one.
    old_where_possible = acceptance.transformed_old_log_prob(weight >= 1.0, log_prob, old_log_prob)
    at_ratio, metrics = micro_batch.base_loss(
        old_log_prob=old_where_possible, rollout_is_weights=outer * (1.0 - weight), **arguments
    )
    return at_one + at_ratio, metrics


def _collect_statistics(
    micro_batch: MicroBatch,
    accepted: torch.Tensor,
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    mask: torch.Tensor,
) -> None:
    micro_batch.statistics = acceptance_statistics(
        mask=mask,
        accepted=accepted,
        contains_sampled=micro_batch.contains_sampled,
        log_ratio=log_prob.float() - old_log_prob.float(),
        log_expected=micro_batch.log_expected,
        normalized=micro_batch.normalized,
        log_envelope=micro_batch.log_envelope,
        residual_mass=micro_batch.residual_mass,
        stored_gap=(micro_batch.stored_log_prob - old_log_prob.float()).abs(),
        sample_key=micro_batch.sample_key,
    )
    if micro_batch.rollout_log_prob is not None:
        micro_batch.statistics.merge(
            mismatch_statistics(
                mask=mask, old_log_prob=old_log_prob.float(), rollout_log_prob=micro_batch.rollout_log_prob.float()
            )
        )


def claim_policy_loss(core_algos: ModuleType) -> None:
    """Put ``sis`` into verl's registry of policy losses, or fail if another plugin has taken the name.

    Args:
        core_algos: The module ``verl.trainer.ppo.core_algos``.

    Raises:
        SisConfigError: If the name belongs to another function.
    """
    registered = core_algos.POLICY_LOSS_REGISTRY.get(LOSS_MODE, sis_policy_loss)
    if registered is not sis_policy_loss:
        raise SisConfigError(
            f"another plugin has registered the policy loss {LOSS_MODE!r}: {registered.__module__}."
            f"{registered.__qualname__}. Uninstall one of the two, or exclude it with "
            "VERL_USE_EXTERNAL_PLUGINS=verl_sis"
        )
    core_algos.register_policy_loss(LOSS_MODE)(sis_policy_loss)

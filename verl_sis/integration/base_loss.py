"""The policy loss under SIS: any loss of verl's registry that works on ``log_prob - old_log_prob``."""

from collections.abc import Callable
from typing import Any

import torch

from verl_sis.config import LOSS_MODE, SisConfig
from verl_sis.errors import SisConfigError

PolicyLoss = Callable[..., tuple[torch.Tensor, dict[str, Any]]]

_NEVER_A_BASE = {
    LOSS_MODE: "it is SIS itself",
    "bypass_mode": "it takes the rollout engine's log-probs for the old policy's",
}

_SUMS_OVER_TOKENS = ("vanilla", "cispo", "sapo", "dppo_tv", "dppo_kl", "kl_cov", "dro")
"""Losses of verl that are sums over tokens of a function of each token's own ratio: their expectation over z is
``a_t * L(1) + (1 - a_t) * L(w_t)``. (kl_cov selects tokens by advantage and log-prob, not by ratio.)"""

_NOT_A_SUM_OVER_TOKENS = {
    "gspo": "its ratio is one exponential of a mean over the response, so the expectation over the z of all tokens has "
    "no closed form",
    "geo_mean": "its ratio is one exponential of a mean over the response, so the expectation over the z of all tokens "
    "has no closed form",
    "clip_cov": "it draws the tokens to leave out at random, among those that their ratio does not clip",
}


def resolve_base_loss(config: SisConfig) -> PolicyLoss:
    """Look up ``sis.base_loss`` in verl's registry and check it against ``sis.estimator``.

    Args:
        config: Settings of SIS.

    Returns:
        The registered function, unchanged.

    Raises:
        SisConfigError: If the loss is missing, cannot be a base, or has no closed form under ``expected``.
    """
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    name = config.base_loss
    usable = sorted(set(POLICY_LOSS_REGISTRY) - set(_NEVER_A_BASE))
    if name in _NEVER_A_BASE:
        raise SisConfigError(
            f"policy_loss.sis.base_loss={name!r} cannot run under SIS: {_NEVER_A_BASE[name]}. Choose one of {usable}"
        )
    if name not in POLICY_LOSS_REGISTRY:
        raise SisConfigError(
            f"policy_loss.sis.base_loss={name!r} is not a registered policy loss. Choose one of {usable}, or register "
            "yours in a module named in actor_rollout_ref.model.external_lib"
        )
    if config.estimator == "expected" and name not in _SUMS_OVER_TOKENS:
        reason = _NOT_A_SUM_OVER_TOKENS.get(name, "verl_sis does not know it to be a sum over tokens")
        raise SisConfigError(
            f"policy_loss.sis.estimator='expected' does not exist for base_loss={name!r}: {reason}. Type "
            "actor_rollout_ref.actor.policy_loss.sis.estimator=sampled"
        )
    return POLICY_LOSS_REGISTRY[name]


def check_uses_ratio(name: str, loss: PolicyLoss, actor_config: Any) -> None:
    """Refuse a base loss whose gradient does not depend on the old log-probs: SIS would change nothing.

    Args:
        name: Its name, for the message.
        loss: The registered function.
        actor_config: The run's actor configuration, which the loss reads.

    Raises:
        SisConfigError: If two different ``old_log_prob`` give the same gradient.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        log_prob = torch.linspace(-2.0, -0.5, 8).view(2, 4).requires_grad_()
        # Ratios inside and outside of usual clip ranges, for both signs of the advantage.
        shift = torch.tensor([[0.0001, -0.0002, 0.05, -0.6], [0.0001, -0.0002, -0.05, 0.6]])
        advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
        gradients = []
        for old_log_prob in (log_prob.detach(), log_prob.detach() - shift):
            value, _ = loss(
                old_log_prob=old_log_prob,
                log_prob=log_prob,
                advantages=advantages,
                response_mask=torch.ones(2, 4, dtype=torch.bool),
                loss_agg_mode=actor_config.loss_agg_mode,
                config=actor_config,
                rollout_is_weights=None,
            )
            gradients.append(torch.autograd.grad(value, log_prob)[0])
    if torch.equal(gradients[0], gradients[1]):
        raise SisConfigError(
            f"policy_loss.sis.base_loss={name!r} cannot run under SIS: its gradient does not depend on old_log_prob, "
            "so it has no importance ratio for SIS to replace"
        )

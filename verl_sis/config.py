"""Validated configuration: the only home of SIS defaults, and the refusals that need no worker.

verl builds ``actor_rollout_ref.actor.policy_loss`` by its ``_target_``, first in the driver (``validate_config``,
seconds after start) and again in each worker. So everything that can be refused from configuration alone is refused in
the ``__post_init__`` methods here, before any process is started.
"""

from dataclasses import dataclass, field

from verl.base_config import BaseConfig
from verl.workers.config.actor import PolicyLossConfig

from verl_sis.core.acceptance import OUTSIDE_TOP_K
from verl_sis.dump_config import SisDumpConfig, check_integer
from verl_sis.errors import SisConfigError
from verl_sis.run_facts import SisRunFacts

LOSS_MODE = "sis"
"""Name of the policy loss in verl's registry."""

ESTIMATORS = ("sampled", "expected")
BEHAVIORS = ("old",)


@dataclass
class SisConfig(BaseConfig):
    """Settings of SIS, at ``actor_rollout_ref.actor.policy_loss.sis``.

    Args:
        base_loss (str): The registered policy loss that gets the transformed old log-probs.
        top_k (int): K, size of the old policy's token set V_K; at most the vocabulary size, which is the exact
            envelope of Proposition 1.
        estimator (str): ``sampled`` draws z (the paper); ``expected`` uses the closed form over z, for base losses that
            are sums over tokens.
        outside_top_k (str): ``reject`` a sampled token outside V_K (the paper), or test it against the ``envelope``
            (the authors' released code).
        behavior (str): Whose top-K: ``old``, the trainer's recomputed old policy (the paper).
        seed (int): Seed of the acceptance uniforms.
        chunk_tokens (int): Tokens whose logits are worked on at a time; bounds the extra memory. With fused kernels the
            logits of one of verl's own chunks (512 tokens) come on top.
        normalizer_share (float): Share of the tokens whose residual mass and envelope are reported where verl's
            log-probs are bfloat16 (bfloat16 logits without flash-attention), so that these two need a float32
            log-sum-exp of their own. Acceptance, its expected rate and kappa do without. Elsewhere all are reported.
        dump (SisDumpConfig): Per-token tables of every n-th rollout; off by default.
        run (SisRunFacts): Facts of the run, filled by the presets.
    """

    base_loss: str = "vanilla"
    top_k: int = 10
    estimator: str = "sampled"
    outside_top_k: str = "reject"
    behavior: str = "old"
    seed: int = 0
    chunk_tokens: int = 256
    normalizer_share: float = 0.125
    dump: SisDumpConfig = field(default_factory=SisDumpConfig)
    run: SisRunFacts = field(default_factory=SisRunFacts)

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            SisConfigError: If a value is not allowed.
        """
        _check_choice("estimator", self.estimator, ESTIMATORS)
        _check_choice("outside_top_k", self.outside_top_k, OUTSIDE_TOP_K)
        _check_choice("behavior", self.behavior, BEHAVIORS)
        for name in ("top_k", "chunk_tokens"):
            check_integer(name, getattr(self, name), 1)
        if not isinstance(self.normalizer_share, int | float) or not 0.0 < self.normalizer_share <= 1.0:
            raise SisConfigError(
                f"policy_loss.sis.normalizer_share must be a number in (0, 1], got {self.normalizer_share!r}"
            )
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed < 2**63:
            raise SisConfigError(f"policy_loss.sis.seed must be an integer in [0, 2^63), got {self.seed!r}")
        if self.dump.every:
            self._check_dump()

    def _check_dump(self) -> None:
        """A dump writes ranks as int16, reads whole distributions, and runs one more forward pass in train mode."""
        if self.run.strategy == "megatron":
            raise SisConfigError(
                "policy_loss.sis.dump reads whole distributions, which no rank of verl's Megatron engine holds. Type "
                "actor_rollout_ref.actor.policy_loss.sis.dump.every=0"
            )
        if self.run.strategy == "veomni" and self.run.replay_mode == "R2":
            raise SisConfigError(
                "policy_loss.sis.dump runs the model once more before the update, and in R2 verl's VeOmni engine would "
                "record new routes there instead of replaying those of the old pass. Type "
                "+routing_replay@_global_=r3_veomni or actor_rollout_ref.actor.policy_loss.sis.dump.every=0"
            )
        if self.top_k >= 2**15:
            raise SisConfigError(
                f"policy_loss.sis.dump holds ranks up to {2**15 - 1}, got policy_loss.sis.top_k={self.top_k}. Type a "
                "smaller top_k, or actor_rollout_ref.actor.policy_loss.sis.dump.every=0"
            )
        for name, active in {
            "model.enable_activation_offload": self.run.activation_offload,
            "actor.fsdp_config.qat.enable": self.run.quantization_aware,
            "actor.veomni.enable_async_activation_offload": self.run.async_activation_offload,
        }.items():
            if active:
                raise SisConfigError(
                    f"policy_loss.sis.dump runs the model once more in train mode, which would change the state that "
                    f"actor_rollout_ref.{name}=True keeps there. Type actor_rollout_ref.{name}=False or "
                    "actor_rollout_ref.actor.policy_loss.sis.dump.every=0"
                )


@dataclass
class SisPolicyLossConfig(PolicyLossConfig):
    """verl's policy-loss section with SIS chosen. Built by ``_target_`` from the presets ``+sis@_global_=...``.

    Args:
        loss_mode (str): Always ``sis``.
        sis (SisConfig): Settings of SIS.
    """

    loss_mode: str = LOSS_MODE
    sis: SisConfig = field(default_factory=SisConfig)

    def __post_init__(self) -> None:
        """Refuse half-set flags.

        Raises:
            SisConfigError: If another loss was chosen over the preset's.
        """
        if self.loss_mode != LOSS_MODE:
            raise SisConfigError(
                f"policy_loss.loss_mode is {self.loss_mode!r}, but a preset +sis@_global_=... was chosen, so SIS would "
                f"be silently off. To run this loss under SIS, type actor_rollout_ref.actor.policy_loss.loss_mode=sis "
                f"actor_rollout_ref.actor.policy_loss.sis.base_loss={self.loss_mode}; to run it alone, drop the preset."
            )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise SisConfigError(f"policy_loss.sis.{name} must be one of {', '.join(choices)}, got {value!r}")

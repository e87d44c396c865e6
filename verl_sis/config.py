"""Validated configuration: the only home of SIS defaults, and the refusals that need no worker.

verl builds ``actor_rollout_ref.actor.policy_loss`` by its ``_target_``, first in the driver (``validate_config``,
seconds after start) and again in each worker. So everything that can be refused from configuration alone is refused in
the ``__post_init__`` methods here, before any process is started.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config.actor import PolicyLossConfig

from verl_sis.core.acceptance import OUTSIDE_TOP_K
from verl_sis.dump_config import SisDumpConfig, check_integer
from verl_sis.errors import SisConfigError

LOSS_MODE = "sis"
"""Name of the policy loss in verl's registry."""

ACTIVATION_MODULE = "verl_sis.integration.activate"
"""The module that ``actor_rollout_ref.model.external_lib`` must name: importing it makes verl's actor use SIS."""

ESTIMATORS = ("sampled", "expected")
BEHAVIORS = ("old",)
SUPPORTED_STRATEGIES = ("fsdp", "fsdp2", "megatron")
FUSED_KERNELS_BACKENDS = ("torch", "triton", "liger")
"""verl's names. ``torch`` was run; the log-probs of the others are compared with hidden states times LM head."""


@dataclass
class SisRunFacts(BaseConfig):
    """Settings of other sections of verl's configuration that decide whether SIS is valid.

    The presets fill each field by interpolation, so it follows whatever the user types elsewhere.

    Args:
        external_lib (Any): ``actor_rollout_ref.model.external_lib``, a module name or a list of them.
        strategy (str): ``actor_rollout_ref.actor.strategy``.
        bypass_mode (bool): ``algorithm.rollout_correction.bypass_mode``.
        temperature (float): ``actor_rollout_ref.rollout.temperature``.
        top_p (float): ``actor_rollout_ref.rollout.top_p``.
        top_k (int): ``actor_rollout_ref.rollout.top_k``.
        min_p (float): ``actor_rollout_ref.rollout.min_p``.
        repetition_penalty (float): ``actor_rollout_ref.rollout.repetition_penalty``.
        logprobs_mode (str): ``actor_rollout_ref.rollout.logprobs_mode``.
        use_fused_kernels (bool): ``actor_rollout_ref.model.use_fused_kernels``.
        fused_kernels_backend (Any): ``actor_rollout_ref.model.fused_kernel_options.impl_backend``, a name or None.
        pad_to_length (bool): ``pad_to_length`` of the actor's engine section, ``fsdp_config`` or ``megatron``.
        dynamic_context_parallel (bool): ``actor_rollout_ref.actor.megatron.dynamic_context_parallel``.
        multi_token_prediction (bool): ``actor_rollout_ref.model.mtp.enable``.
        distillation (bool): ``distillation.enabled``.
        return_routes (bool): ``actor_rollout_ref.rollout.enable_rollout_routing_replay``.
        replay_mode (str): ``router_replay.mode`` of the actor's engine section.
        moe_metrics_interval (int): ``actor_rollout_ref.rollout.moe_load_balance_metrics_interval``, the other user of
            the rollout engine's routes.
        activation_offload (bool): ``actor_rollout_ref.model.enable_activation_offload``.
        quantization_aware (bool): ``qat.enable`` of the actor's FSDP section.
    """

    external_lib: Any = None
    strategy: str = "fsdp"
    bypass_mode: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logprobs_mode: str = "processed_logprobs"
    use_fused_kernels: bool = False
    fused_kernels_backend: Any = None
    pad_to_length: bool = False
    dynamic_context_parallel: bool = False
    multi_token_prediction: bool = False
    distillation: bool = False
    return_routes: bool = False
    replay_mode: str = "disabled"
    moe_metrics_interval: int = 0
    activation_offload: bool = False
    quantization_aware: bool = False

    def __post_init__(self) -> None:
        """Refuse what SIS cannot honour.

        Raises:
            SisConfigError: With what was expected, what came, and what to type.
        """
        self._check_activation()
        self._check_behavior_policy()
        self._check_logits()
        self._check_routes()
        if self.strategy == "megatron":
            self._check_megatron()

    @property
    def _section(self) -> str:
        return "megatron" if self.strategy == "megatron" else "fsdp_config"

    def _check_activation(self) -> None:
        libs = self.external_lib if isinstance(self.external_lib, str | None) else list(self.external_lib)
        if ACTIVATION_MODULE not in (libs if isinstance(libs, list) else [libs]):
            raise SisConfigError(
                "SIS is chosen but would not be active: actor_rollout_ref.model.external_lib must name "
                f"{ACTIVATION_MODULE}, got {self.external_lib!r}. To keep your own library too, type "
                f"actor_rollout_ref.model.external_lib=[{ACTIVATION_MODULE},your.module]"
            )
        if self.strategy not in SUPPORTED_STRATEGIES:
            raise SisConfigError(
                f"SIS supports the engines {SUPPORTED_STRATEGIES}, got actor_rollout_ref.actor.strategy="
                f"{self.strategy!r}. Type actor_rollout_ref.actor.strategy=fsdp2 or model_engine=megatron, or train "
                "without SIS."
            )

    def _check_megatron(self) -> None:
        if self.dynamic_context_parallel:
            raise SisConfigError(
                "SIS keeps the old policy's top-K on the ranks that scored a sample, and dynamic context parallelism "
                "moves samples between ranks from pass to pass. Type "
                "actor_rollout_ref.actor.megatron.dynamic_context_parallel=False"
            )
        if self.multi_token_prediction:
            raise SisConfigError(
                "SIS on verl's Megatron engine was never run with multi-token prediction, which replaces the step that "
                "makes the logits. Type actor_rollout_ref.model.mtp.enable=False"
            )

    def _check_behavior_policy(self) -> None:
        """The sampled token must come from the full distribution whose top-K is tested (Propositions 1 and 2)."""
        if self.bypass_mode:
            raise SisConfigError(
                "SIS needs the trainer's recomputed old policy, but algorithm.rollout_correction.bypass_mode=True "
                "skips that pass, and no top-K of the rollout engine is kept. Type "
                "algorithm.rollout_correction.bypass_mode=False"
            )
        filters = {
            "top_p": (self.top_p, self.top_p == 1.0, "1.0"),
            "top_k": (self.top_k, self.top_k in (-1, 0), "-1"),
            "min_p": (self.min_p, self.min_p == 0.0, "0.0"),
            "repetition_penalty": (self.repetition_penalty, self.repetition_penalty == 1.0, "1.0"),
        }
        for name, (value, neutral, expected) in filters.items():
            if not neutral:
                raise SisConfigError(
                    f"SIS needs rollouts from the unfiltered policy: actor_rollout_ref.rollout.{name} must be "
                    f"{expected}, got {value}. A filter or penalty changes the distribution that tokens are drawn "
                    f"from, and acceptance is then tested against the wrong one. Type "
                    f"actor_rollout_ref.rollout.{name}={expected}"
                )
        if self.logprobs_mode.startswith("raw") and self.temperature != 1.0:
            raise SisConfigError(
                f"actor_rollout_ref.rollout.logprobs_mode={self.logprobs_mode!r} reports log-probs before temperature, "
                f"but rollout.temperature is {self.temperature}: mismatch metrics would compare two temperatures. Type "
                "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
            )

    def _check_routes(self) -> None:
        if self.return_routes and self.replay_mode == "disabled" and self.moe_metrics_interval <= 0:
            raise SisConfigError(
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True makes the rollout engine return its "
                "routes, but nothing replays them. Type +routing_replay@_global_=r3"
                f"{'_megatron' if self.strategy == 'megatron' else ''} to do so, or "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )

    def _check_logits(self) -> None:
        if self.use_fused_kernels and self.strategy == "megatron":
            raise SisConfigError(
                "SIS reads the logits, which fused kernels never materialise, and looks at hidden states instead on "
                "verl's FSDP engines only. Type actor_rollout_ref.model.use_fused_kernels=False"
            )
        if self.use_fused_kernels and self.fused_kernels_backend not in FUSED_KERNELS_BACKENDS:
            raise SisConfigError(
                f"SIS supports the fused kernels {', '.join(FUSED_KERNELS_BACKENDS)}, got actor_rollout_ref.model."
                f"fused_kernel_options.impl_backend={self.fused_kernels_backend!r}, with which verl leaves the model "
                "as it is. Type actor_rollout_ref.model.fused_kernel_options.impl_backend=torch, or "
                "actor_rollout_ref.model.use_fused_kernels=False"
            )
        if self.pad_to_length:
            raise SisConfigError(
                "SIS uses verl's per-token logits hook, which verl refuses together with static padding. Type "
                f"actor_rollout_ref.actor.{self._section}.pad_to_length=False"
            )
        if self.distillation:
            raise SisConfigError(
                "SIS and distillation both need verl's per-token logits hook. Type distillation.enabled=False"
            )


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
        if self.top_k >= 2**15:
            raise SisConfigError(
                f"policy_loss.sis.dump holds ranks up to {2**15 - 1}, got policy_loss.sis.top_k={self.top_k}. Type a "
                "smaller top_k, or actor_rollout_ref.actor.policy_loss.sis.dump.every=0"
            )
        for name, active in {
            "model.enable_activation_offload": self.run.activation_offload,
            "actor.fsdp_config.qat.enable": self.run.quantization_aware,
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

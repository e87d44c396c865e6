"""Settings of other sections of verl's configuration that decide whether SIS is valid; part of ``verl_sis.config``."""

from dataclasses import dataclass
from typing import Any

from verl.base_config import BaseConfig

from verl_sis.errors import SisConfigError

ACTIVATION_MODULE = "verl_sis.integration.activate"
"""The module that ``actor_rollout_ref.model.external_lib`` must name: importing it makes verl's actor use SIS."""

SUPPORTED_STRATEGIES = ("fsdp", "fsdp2", "megatron", "veomni")
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
        pad_to_length (bool): Of the actor's engine section: ``fsdp_config``, ``megatron`` or ``veomni``.
        dynamic_context_parallel (bool): ``actor_rollout_ref.actor.megatron.dynamic_context_parallel``.
        multi_token_prediction (bool): ``actor_rollout_ref.model.mtp.enable``.
        distillation (bool): ``distillation.enabled``.
        return_routes (bool): ``actor_rollout_ref.rollout.enable_rollout_routing_replay``.
        replay_mode (str): ``router_replay.mode`` of the actor's engine section.
        moe_metrics_interval (int): ``actor_rollout_ref.rollout.moe_load_balance_metrics_interval``, the other user of
            the rollout engine's routes.
        activation_offload (bool): ``actor_rollout_ref.model.enable_activation_offload``.
        quantization_aware (bool): ``qat.enable`` of the actor's FSDP section.
        async_activation_offload (bool): ``actor_rollout_ref.actor.veomni.enable_async_activation_offload``.
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
    async_activation_offload: bool = False

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
        return self.strategy if self.strategy in ("megatron", "veomni") else "fsdp_config"

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
                f"{self.strategy!r}. Type actor_rollout_ref.actor.strategy=fsdp2, model_engine=megatron or "
                "model_engine=veomni, or train without SIS."
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
                f"{'' if self._section == 'fsdp_config' else f'_{self._section}'} to do so, or "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=False"
            )

    def _check_logits(self) -> None:
        if self.use_fused_kernels and self._section != "fsdp_config":
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

"""Validated configuration of routing replay, and the refusals that need no worker.

verl's engine configurations have a section ``router_replay`` (``mode: disabled, R2, R3``), which its Megatron and
VeOmni engines read and its FSDP engine ignores. The presets ``+routing_replay@_global_=...`` put
``RoutingReplayConfig``, a subclass of what verl expects there, in that section of the engine in use, and set the
rollout side with it.
"""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config.engine import EngineRouterReplayConfig

from verl_sis.errors import SisConfigError
from verl_sis.run_facts import ACTIVATION_MODULE

SECTIONS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}
"""Section of the actor's configuration that holds ``router_replay``, by ``actor.strategy``."""

_SUFFIX = {"fsdp_config": "", "megatron": "_megatron", "veomni": "_veomni"}
_RETURN_ROUTES = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


@dataclass
class RoutingReplayRunFacts(BaseConfig):
    """Settings of other sections of verl's configuration that decide whether routing replay is valid.

    The presets fill each field by interpolation, so it follows whatever the user types elsewhere.

    Args:
        section (str): Section of the actor's configuration that the preset has written to, a value of ``SECTIONS``.
        external_lib (Any): ``actor_rollout_ref.model.external_lib``, a module name or a list of them.
        strategy (str): ``actor_rollout_ref.actor.strategy``.
        rollout_name (str): ``actor_rollout_ref.rollout.name``.
        return_routes (bool): ``actor_rollout_ref.rollout.enable_rollout_routing_replay``.
        bypass_mode (bool): ``algorithm.rollout_correction.bypass_mode``.
        temperature (float): ``actor_rollout_ref.rollout.temperature``.
        logprobs_mode (str): ``actor_rollout_ref.rollout.logprobs_mode``.
    """

    section: str = "fsdp_config"
    external_lib: Any = None
    strategy: str = "fsdp"
    rollout_name: str = "vllm"
    return_routes: bool = False
    bypass_mode: bool = False
    temperature: float = 1.0
    logprobs_mode: str = "processed_logprobs"


@dataclass
class RoutingReplayConfig(EngineRouterReplayConfig):
    """Settings of routing replay, at ``actor_rollout_ref.actor.fsdp_config.router_replay`` (FSDP).

    Args:
        mode (str): ``R3`` replays the rollout engine's choices, ``R2`` those of the trainer's own old-log-prob pass,
            ``disabled`` none.
        min_agreement (float): Least chance-corrected agreement of native and replayed choices, in any layer, of prompt
            or response, in the pass at equal weights. Less means that routes belong to other tokens or layers, and
            stops the run. 0 switches the alarm off. R3 on FSDP only.
        native_pass_every (int): Every so many steps the old-log-prob pass is also run twice without replay, the second
            time with the samples in reverse order: ``mismatch/native/*`` is the mismatch that replay removes,
            ``mismatch/floor/*`` the trainer's own noise. 0 for never. FSDP only.
        run (RoutingReplayRunFacts): Facts of the run, filled by the presets.
    """

    mode: str = "disabled"
    min_agreement: float = 0.5
    native_pass_every: int = 0
    run: RoutingReplayRunFacts = field(default_factory=RoutingReplayRunFacts)

    def __post_init__(self) -> None:
        """Check each value, and both sides against each other.

        Raises:
            SisConfigError: With what was expected, what came, and what to type.
        """
        super().__post_init__()
        if not isinstance(self.min_agreement, int | float) or not 0.0 <= self.min_agreement < 1.0:
            raise SisConfigError(f"router_replay.min_agreement must be a number in [0, 1), got {self.min_agreement!r}")
        every = self.native_pass_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise SisConfigError(f"router_replay.native_pass_every must be an integer of at least 0, got {every!r}")
        if self.mode == "disabled":
            return
        self._check_engine()
        self._check_sides()
        self._check_log_probs()

    @property
    def on_fsdp(self) -> bool:
        """Whether verl_sis replays; on the other engines verl does."""
        return self.run.section == "fsdp_config"

    def _check_engine(self) -> None:
        run, name = self.run, self.mode.lower()
        section = SECTIONS.get(run.strategy)
        if section is None:
            raise SisConfigError(
                f"routing replay supports the engines {tuple(SECTIONS)}, got actor_rollout_ref.actor.strategy="
                f"{run.strategy!r}. Type actor_rollout_ref.actor.strategy=fsdp2, or train without routing replay"
            )
        if section != run.section:
            raise SisConfigError(
                f"the preset chosen writes to actor.{run.section}, but actor_rollout_ref.actor.strategy is "
                f"{run.strategy!r}. Type +routing_replay@_global_={name}{_SUFFIX[section]} instead of "
                f"{name}{_SUFFIX.get(run.section, '')}"
            )
        libs = run.external_lib if isinstance(run.external_lib, str | None) else list(run.external_lib)
        if self.on_fsdp and ACTIVATION_MODULE not in (libs if isinstance(libs, list) else [libs]):
            raise SisConfigError(
                "routing replay is chosen but would not be active: actor_rollout_ref.model.external_lib must name "
                f"{ACTIVATION_MODULE}, got {run.external_lib!r}. To keep your own library too, type "
                f"actor_rollout_ref.model.external_lib=[{ACTIVATION_MODULE},your.module]"
            )

    def _check_sides(self) -> None:
        run = self.run
        if self.mode == "R3" and not run.return_routes:
            raise SisConfigError(
                f"R3 replays the rollout engine's choices, but {_RETURN_ROUTES} is False, so it returns none. Type "
                f"{_RETURN_ROUTES}=True"
            )
        if self.mode == "R3" and run.rollout_name not in ("vllm", "sglang"):
            raise SisConfigError(
                "R3 needs a rollout engine that returns its routes, vllm or sglang, got "
                f"actor_rollout_ref.rollout.name={run.rollout_name!r}"
            )
        if self.mode == "R2" and run.return_routes:
            raise SisConfigError(
                f"R2 replays the trainer's own choices, but {_RETURN_ROUTES} is True, so the rollout engine's would be "
                f"carried along unused. Type {_RETURN_ROUTES}=False, or +routing_replay@_global_=r3"
            )
        if self.mode == "R2" and run.bypass_mode:
            raise SisConfigError(
                "R2 records the routes of the old-log-prob pass, which algorithm.rollout_correction.bypass_mode=True "
                "skips. Type algorithm.rollout_correction.bypass_mode=False, or +routing_replay@_global_=r3"
            )
        if self.native_pass_every and run.bypass_mode:
            raise SisConfigError(
                "router_replay.native_pass_every repeats the old-log-prob pass, which "
                "algorithm.rollout_correction.bypass_mode=True skips. Type native_pass_every=0"
            )

    def _check_log_probs(self) -> None:
        run = self.run
        if run.logprobs_mode.startswith("raw") and run.temperature != 1.0:
            raise SisConfigError(
                f"actor_rollout_ref.rollout.logprobs_mode={run.logprobs_mode!r} reports log-probs before temperature, "
                f"but rollout.temperature is {run.temperature}: mismatch metrics would compare two temperatures. Type "
                "actor_rollout_ref.rollout.logprobs_mode=processed_logprobs"
            )

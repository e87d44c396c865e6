"""Checks of the installed verl, of the process, and of what verl hands to the worker."""

import importlib.metadata
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_sis.errors import SisConfigError, VerlContractError
from verl_sis.verl_compat import contract, fused_contract
from verl_sis.verl_compat.contract import Touchpoint
from verl_sis.verl_compat.megatron import MEGATRON_CONTRACT, check_megatron_engine, is_megatron_engine
from verl_sis.verl_compat.veomni import VEOMNI_CONTRACT, check_veomni_engine, is_veomni_engine

CONTRACT = contract.CONTRACT + fused_contract.CONTRACT
SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
PLUGIN_NAME = "verl_sis"
"""Name of the ``verl.plugins`` entry point, as ``VERL_USE_EXTERNAL_PLUGINS`` spells it."""


def installed_verl() -> str:
    """Version of the installed verl distribution."""
    return importlib.metadata.version("verl")


def check_version() -> None:
    """Check that verl is one that verl_sis was tested with. Cheap; runs when the plugin loads.

    Raises:
        VerlContractError: If it is not.
    """
    version = installed_verl()
    if not SUPPORTED_VERL.contains(version, prereleases=True):
        raise VerlContractError(
            f"verl_sis supports verl {SUPPORTED_VERL}, found {version}. Type: pip install 'verl{SUPPORTED_VERL}'"
        )


def contract_problems(contract: tuple[Touchpoint, ...] | None = None) -> list[str]:
    """All differences between a contract, ``CONTRACT`` if None, and the installed verl, in words."""
    return [problem for touchpoint in contract or CONTRACT for problem in touchpoint.problems()]


def check_contract(contract: tuple[Touchpoint, ...] | None = None) -> None:
    """Check everything that verl_sis builds on. Imports verl's workers.

    Args:
        contract: What to check instead of ``CONTRACT``.

    Raises:
        VerlContractError: With every difference found.
    """
    problems = contract_problems(contract)
    if problems:
        raise VerlContractError(
            f"verl {installed_verl()} is not what verl_sis was built for:\n  " + "\n  ".join(problems) + "\n"
            "Type: pip install verl==0.9.1"
        )


def check_plugin_policy() -> None:
    """Check that ``VERL_USE_EXTERNAL_PLUGINS`` lets verl load this plugin in this process.

    Raises:
        SisConfigError: If the variable excludes it.
    """
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and PLUGIN_NAME not in {name.strip() for name in policy.split(",")}:
        raise SisConfigError(
            f"VERL_USE_EXTERNAL_PLUGINS={policy!r} keeps verl from loading {PLUGIN_NAME!r} in this process, but the "
            f"run chose SIS. Unset it, or type VERL_USE_EXTERNAL_PLUGINS={PLUGIN_NAME}"
        )


def vocab_size(model_config: Any) -> int:
    """Vocabulary size of the model that a worker trains.

    Args:
        model_config: verl's ``HFModelConfig``.
    """
    return int(model_config.hf_config.get_text_config().vocab_size)


def check_registered_loss() -> None:
    """Check that verl's registry still holds our loss ``sis``: a plugin that loads later overwrites silently.

    Raises:
        SisConfigError: If the name belongs to another function by now.
    """
    from verl.trainer.ppo import core_algos

    from verl_sis.integration.policy_loss import claim_policy_loss

    claim_policy_loss(core_algos)


def is_fsdp_engine(engine: Any) -> bool:
    """Whether an engine is verl's FSDP engine for language models. VeOmni's derives from it and is not."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    fsdp: Any = FSDPEngineWithLMHead  # verl's registration decorator hides its class from type checkers
    return isinstance(engine, fsdp) and engine.engine_config.strategy in ("fsdp", "fsdp2")


def check_engine(engine: Any) -> None:
    """Check that an engine calls the logits hook as ``CONTRACT`` says, or that engine's own contract beside it.

    Raises:
        SisConfigError: If it is none of verl's FSDP, Megatron and VeOmni engines for language models, or if it is
            configured in a way that SIS does not support.
        VerlContractError: If verl's Megatron or VeOmni engine is not what verl_sis was built for.
    """
    if is_megatron_engine(engine):
        check_contract(MEGATRON_CONTRACT)
        check_megatron_engine(engine)
    elif is_veomni_engine(engine):
        check_contract(VEOMNI_CONTRACT)
        check_veomni_engine(engine)
    elif not is_fsdp_engine(engine):
        raise SisConfigError(
            f"SIS supports verl's FSDP, Megatron and VeOmni engines, found {type(engine).__module__}."
            f"{type(engine).__qualname__}. Type actor_rollout_ref.actor.strategy=fsdp2"
        )


def actor_config_of(loss_fn: Callable) -> Any:
    """The actor configuration bound in the loss function that verl gives its actor.

    verl builds ``partial(ppo_loss, config=actor_config)`` in ``ActorRolloutRefWorker.init_model``.

    Raises:
        VerlContractError: If the loss function is something else, e.g. that of distillation.
    """
    from verl.workers.utils.losses import ppo_loss

    if isinstance(loss_fn, partial) and loss_fn.func is ppo_loss and "config" in loss_fn.keywords:
        return loss_fn.keywords["config"]
    raise VerlContractError(
        f"SIS wraps verl's ppo_loss with its config bound, but the actor was given {loss_fn!r}. SIS works with verl's "
        "PPO trainers only; train without +sis@_global_=... here"
    )

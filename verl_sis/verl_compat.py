"""The only file that knows verl's versions, private names and data layout.

``CONTRACT`` lists what verl_sis builds on. Each entry says where it is, what is expected of it and why; ``check_contract``
compares it with the installed verl, in every process that uses SIS and in ``verl-sis doctor``. Nothing of verl is
replaced by this file: SIS uses hooks that verl offers (see ``verl_sis/integration``).
"""

import functools
import importlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from tensordict import TensorDict

from verl_sis.errors import SisConfigError, VerlContractError

SUPPORTED_VERL = SpecifierSet(">=0.9.1,<0.10")
PLUGIN_NAME = "verl_sis"
"""Name of the ``verl.plugins`` entry point, as ``VERL_USE_EXTERNAL_PLUGINS`` spells it."""

LOGITS_HOOK_FLAG = "distillation_use_topk"
"""Non-tensor flag of a batch under which verl's engines call the loss function with ``student_logits=`` first."""

_SOURCE = "https://github.com/verl-project/verl/blob/v0.9.1/"


@dataclass(frozen=True)
class Touchpoint:
    """One thing of verl that verl_sis builds on.

    Attributes:
        module: Module that holds it.
        name: Dotted name inside the module.
        why: What SIS uses it for, and when the entry can go.
        parameters: Parameter names that must exist, in this order.
        fragments: Pieces of source text that must be there, for behaviour that no signature shows.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    fragments: tuple[str, ...] = ()

    @property
    def upstream(self) -> str:
        """Address of the source at the version that was read."""
        return _SOURCE + self.module.replace(".", "/") + ".py"

    def problems(self) -> list[str]:
        """What differs in the installed verl, in words; empty if nothing does."""
        where = f"{self.module}.{self.name}"
        try:
            target: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            return [f"{where} is missing ({error})"]
        found = []
        if self.parameters:
            names = tuple(inspect.signature(target).parameters)
            if tuple(name for name in names if name in self.parameters) != self.parameters:
                found.append(f"{where}: expected the parameters {self.parameters}, found {names}")
        if self.fragments:
            source = inspect.getsource(target)
            found += [f"{where}: its source no longer has {text!r}" for text in self.fragments if text not in source]
        return found


_LOSS_PARAMETERS = (
    "old_log_prob",
    "log_prob",
    "advantages",
    "response_mask",
    "loss_agg_mode",
    "config",
    "rollout_is_weights",
)

CONTRACT: tuple[Touchpoint, ...] = (
    Touchpoint(
        "verl.trainer.ppo.core_algos",
        "compute_policy_loss_vanilla",
        "The signature that every registered policy loss shares; ours has it, and calls the base loss with it.",
        parameters=_LOSS_PARAMETERS,
    ),
    Touchpoint(
        "verl.trainer.ppo.core_algos",
        "register_policy_loss",
        "Registration of the loss 'sis'. It overwrites silently, so the registry is read before.",
        fragments=("POLICY_LOSS_REGISTRY[name] = func",),
    ),
    Touchpoint(
        "verl.workers.utils.losses",
        "ppo_loss",
        "Calls the registered loss; the worker wraps it. It must pass these and look the loss up by name.",
        parameters=("config", "model_output", "data", "dp_group"),
        fragments=("policy_loss_fn = get_policy_loss_fn(loss_mode)", "old_log_prob=old_log_prob", "log_prob=log_prob"),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "ActorRolloutRefWorker.init_model",
        "Reads actor_worker_cls after the model configuration imported external_lib, and hands it partial(ppo_loss).",
        fragments=("self.actor_worker_cls(config=", "partial(ppo_loss, config=actor_config)", "set_loss_fn(self.loss_fn)"),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.infer_batch",
        "The old pass: overridden to give the engine a capturing loss function.",
        parameters=("self", "data"),
        fragments=("loss_function = self.loss_fn if compute_loss else None", 'key="no_lora_adapter"'),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.train_mini_batch",
        "The update: overridden to pool statistics over mini-batches. It must call train_batch for each of them.",
        parameters=("self", "data"),
        fragments=("self.train_batch(mini_batch_td)", "append_to_dict(metrics, output)"),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.train_batch",
        "One optimizer update: overridden to count it and to attach sample keys.",
        parameters=("self", "data"),
        fragments=("loss_function=self.loss_fn",),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.save_checkpoint",
        "Overridden to store the update counter beside verl's checkpoint.",
        parameters=("self", "local_path", "hdfs_path", "global_step", "max_ckpt_to_keep"),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.load_checkpoint",
        "Overridden to restore the update counter.",
        parameters=("self", "local_path", "hdfs_path", "del_local_after_load"),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.prepare_model_outputs",
        "The logits hook: called on temperature-scaled logits, its 1-D results gathered over Ulysses and nested.",
        parameters=("self", "output", "output_args", "micro_batch", "logits_processor_func"),
        fragments=(
            "logits_processor_func(student_logits=logits_rmpad.unsqueeze(0), data=micro_batch)",
            "self._gather_and_unpad_packed(v, output_args[",
        ),
    ),
    Touchpoint(
        "verl.workers.utils.padding",
        "no_padding_2_padding",
        "Slices the response part, shifted by one, out of per-token outputs.",
        parameters=("tensor", "data"),
    ),
    Touchpoint(
        "verl.utils.ulysses",
        "gather_outputs_and_unpad",
        "Collects top-K columns over the sequence-parallel group in the old pass.",
        parameters=("x", "gather_dim", "unpad_dim", "padding_size"),
    ),
    Touchpoint(
        "verl.utils.torch_functional",
        "allgather_dict_into_dict",
        "Brings the statistics of all data-parallel ranks together, inside verl's own metric exchange.",
        parameters=("data", "group"),
    ),
)


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


def contract_problems() -> list[str]:
    """All differences between ``CONTRACT`` and the installed verl, in words."""
    return [problem for touchpoint in CONTRACT for problem in touchpoint.problems()]


def check_contract() -> None:
    """Check everything that verl_sis builds on. Imports verl's workers.

    Raises:
        VerlContractError: With every difference found.
    """
    problems = contract_problems()
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
            f"VERL_USE_EXTERNAL_PLUGINS={policy!r} keeps verl from loading {PLUGIN_NAME!r} in this process, but the run "
            f"chose SIS. Unset it, or type VERL_USE_EXTERNAL_PLUGINS={PLUGIN_NAME}"
        )


def response_lengths(data: TensorDict) -> list[int]:
    """Number of response tokens of each row, by the rule of verl's ``no_padding_2_padding``.

    Args:
        data: Micro-batch whose ``responses`` are nested (default trainer) or padded with an attention mask (legacy).
    """
    responses = data["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return data["attention_mask"][:, data["prompts"].shape[1] :].sum(dim=1).tolist()


def response_width(data: TensorDict) -> int:
    """Width ``T`` of the padded responses that verl's ``ppo_loss`` works on, by the rule of ``no_padding_2_padding``."""
    from verl.utils import tensordict_utils as tu

    width = tu.get_non_tensor_data(data=data, key="max_response_len", default=-1)
    if not data["responses"].is_nested:
        return data["responses"].shape[1]
    return width if width >= 0 else max(response_lengths(data))


def padded(data: TensorDict, name: str) -> torch.Tensor:
    """A per-response column as ``[B, T]``, padded with zeros exactly as verl's ``ppo_loss`` pads its own columns."""
    return data.select(name).to_padded_tensor()[name]


def sequence_parallel_size() -> int:
    """Number of Ulysses sequence-parallel ranks of the engine that is running; 1 without."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_world_size

    return 1 if get_ulysses_sequence_parallel_group() is None else get_ulysses_sequence_parallel_world_size()


def sequence_parallel_rank() -> int:
    """Rank in the Ulysses sequence-parallel group of the engine that is running; 0 without."""
    from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_rank

    return 0 if get_ulysses_sequence_parallel_group() is None else get_ulysses_sequence_parallel_rank()


def gather_packed(local: torch.Tensor) -> torch.Tensor:
    """Concatenate the slices ``[local_size, ...]`` of all Ulysses ranks along the packed axis, padding included."""
    from verl.utils.ulysses import gather_outputs_and_unpad

    return gather_outputs_and_unpad(local, gather_dim=0)


@functools.cache
def log_probs_keep_float32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether verl's log-probs of logits of this dtype are float32-accurate here.

    They are for float32 logits, and for bfloat16 logits under flash-attention's cross-entropy. Without flash-attention
    bfloat16 logits give bfloat16 log-probs, off by up to 2^-9 of their value: no basis for a residual mass. verl offers
    no way to ask, so a small case is computed and compared with float64.
    """
    from verl.utils.torch_functional import logprobs_from_logits

    with torch.no_grad():
        logits = torch.linspace(-4.0, 4.0, 8 * 64, device=device).sin().mul(5).view(8, 64).to(dtype)
        labels = torch.arange(8, device=device) * 7
        exact = torch.log_softmax(logits.double(), dim=-1).gather(1, labels[:, None]).squeeze(1)
        return bool((logprobs_from_logits(logits, labels).double() - exact).abs().max() < 1e-5)


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


def check_engine(engine: Any) -> None:
    """Check that an engine calls the logits hook as ``CONTRACT`` says.

    Raises:
        SisConfigError: If it is not one of verl's FSDP engines for language models.
    """
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    if not isinstance(engine, FSDPEngineWithLMHead):
        raise SisConfigError(
            f"SIS supports verl's FSDP engines, found {type(engine).__module__}.{type(engine).__qualname__}. Type "
            "actor_rollout_ref.actor.strategy=fsdp2"
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

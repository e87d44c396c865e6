"""What verl_sis builds on, as a table: where it is, what is expected of it, and why."""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

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
        fragments=(
            "self.actor_worker_cls(config=",
            "partial(ppo_loss, config=actor_config)",
            "set_loss_fn(self.loss_fn)",
        ),
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
        "TrainingWorker.train_batch",
        "A dump's pass before the first update runs on the micro-batches of the update: the same defaults.",
        fragments=(
            'use_remove_padding=self.model_config.get("use_remove_padding", False)',
            "use_dynamic_bsz=self.engine_config.use_dynamic_bsz",
            "max_token_len_per_gpu=self.engine_config.max_token_len_per_gpu",
            "micro_batch_size_per_gpu=self.engine_config.micro_batch_size_per_gpu",
            "use_fused_kernels=self.engine_config.use_fused_kernels",
        ),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.train_mini_batch",
        "A dump enters train mode around it, and has its own, inner one move no weights.",
        fragments=(
            'disable_auto_offload = tu.pop(data, key="disable_auto_offload", default=False)',
            'epochs = tu.pop(data, key="epochs", default=1)',
            "self.engine.train_mode(disable_auto_offload=disable_auto_offload)",
        ),
    ),
    Touchpoint(
        "verl.workers.engine.base",
        "BaseEngineCtx._context_switch",
        "A dump nests train modes as verl itself does: the inner one moves no weights.",
        fragments=("if self.disable_auto_offload:\n            return",),
    ),
    Touchpoint(
        "verl.workers.engine.base",
        "BaseEngine.infer_batch",
        "A dump's pass before the first update: forward only, in the mode that the engine is in.",
        parameters=("self", "data", "loss_function"),
        fragments=("with torch.no_grad():", "forward_only=True"),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._build_fsdp_module",
        "A dump says in which dtype the model ran.",
        fragments=("self._autocast_dtype = param_dtype",),
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
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.prepare_model_inputs",
        "Routing replay: framed to arm each micro-batch's routes. The steps that lay out the tokens are repeated on "
        "their indices (verl_compat.engine.model_rows), so they must be these, in this order.",
        parameters=("self", "micro_batch"),
        fragments=(
            "static_pad_size = self._get_packed_pad_size(input_ids_rmpad.size(-1))",
            "ulysses_pad_and_slice_inputs(",
            "torch.nested.to_padded_tensor(",
        ),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.forward_step",
        "Routing replay: the model must run once between the two framed methods, which are called by keyword.",
        fragments=(
            "self.prepare_model_inputs(micro_batch=micro_batch)",
            "raw_output = self.module(",
            "self.prepare_model_outputs(\n                output=raw_output, output_args=output_args, "
            "micro_batch=micro_batch, logits_processor_func=loss_function",
        ),
    ),
    Touchpoint(
        "verl.workers.engine.utils",
        "pad_packed_inputs",
        "Routing replay: static padding of token indices, as verl pads the tokens.",
        parameters=("input_ids_rmpad", "position_ids_rmpad", "pad_size", "pad_value"),
    ),
    Touchpoint(
        "verl.utils.ulysses",
        "ulysses_pad_and_slice_inputs",
        "Routing replay: the slice of token indices of a sequence-parallel rank.",
        parameters=("input_ids_rmpad", "position_ids_rmpad", "sp_size", "pad_value"),
    ),
    Touchpoint(
        "verl.workers.config.engine",
        "EngineConfig",
        "Routing replay: the section of every engine's configuration that the presets fill. Ours goes when verl's FSDP "
        "engine replays routes itself (https://github.com/verl-project/verl/issues/5392).",
        parameters=("router_replay",),
    ),
    Touchpoint(
        "verl.experimental.agent_loop.agent_loop",
        "AgentLoopOutput.as_dict",
        "Routing replay: the rollout engine's routes by absolute position, missing rows as zeros, in int16.",
        fragments=(
            'output["routed_experts"] = aligned',
            "aligned = routed_experts.new_zeros((total_length,",
            "torch.int16",
        ),
    ),
    Touchpoint(
        "verl.utils.tensordict_utils",
        "index_select_tensor_dict",
        "Routing replay: the samples of a comparison pass in reverse order.",
        parameters=("batch", "indices"),
    ),
    Touchpoint(
        "verl.workers.config.engine",
        "TrainingWorkerConfig",
        "Studies: a training worker outside of a run.",
        parameters=("model_type", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    ),
    Touchpoint(
        "verl.workers.config.engine",
        "FSDPEngineConfig",
        "Studies: the forward pass of an actor, in its dtype and with packed dynamic micro-batches.",
        parameters=(
            "strategy",
            "use_dynamic_bsz",
            "max_token_len_per_gpu",
            "infer_max_token_len_per_gpu",
            "model_dtype",
            "mixed_precision",
            "use_torch_compile",
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

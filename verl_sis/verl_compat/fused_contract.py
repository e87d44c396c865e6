"""What ``verl_sis.verl_compat.fused`` builds on. All of it can go when verl's engine hands hidden states to a hook."""

from verl_sis.verl_compat.contract import Touchpoint

CONTRACT: tuple[Touchpoint, ...] = (
    Touchpoint(
        "verl.models.transformers.dense_common",
        "forward_with_torch_backend",
        "Fused kernels: the forward in which SIS looks. The decoder is self.model; its first output times the weight "
        "of lm_head, over the temperature, gives the logits; the engine passes the temperature by keyword.",
        parameters=("self", "temperature", "shift_labels"),
        fragments=(
            "outputs = forward_base_model(",
            "hidden_states = outputs[0]",
            "hidden_states=hidden_states,",
            "vocab_weights=self.lm_head.weight,",
            "temperature=temperature,",
        ),
    ),
    Touchpoint(
        "verl.models.transformers.dense_common",
        "forward_with_triton_backend",
        "Fused kernels: the same for Triton's kernel. Read, not run.",
        parameters=("self", "temperature", "shift_labels"),
        fragments=("outputs = forward_base_model(", "hidden_states = outputs[0]", "self.lm_head.weight,"),
    ),
    Touchpoint(
        "verl.models.transformers.dense_common",
        "forward_base_model",
        "Fused kernels: the call of the decoder, whose output a hook of torch keeps.",
        fragments=("outputs = self.model(",),
    ),
    Touchpoint(
        "verl.models.transformers.monkey_patch",
        "patch_forward_with_backends",
        "Fused kernels: the forward is replaced on the model's class, by which it is recognised.",
        fragments=(
            "from verl.models.transformers.dense_common import forward_with_torch_backend, forward_with_triton_backend",
            "model.__class__.forward = forward_with_torch_backend_function",
            'fused_kernels_backend not in ["triton", "torch", "liger"]',
        ),
    ),
    Touchpoint(
        "verl.utils.experimental.torch_functional",
        "FusedLinearForPPO",
        "Fused kernels: chunk_size, the blocks in which SIS repeats the product.",
        fragments=("self.chunk_size = chunk_size",),
    ),
    Touchpoint(
        "verl.utils.experimental.torch_functional",
        "_fused_linear_for_ppo_fwd",
        "Fused kernels: product, division, then float32, in this order; core.linear_head does the same, so that the "
        "sampled token's logit is that of verl's log-prob, bit for bit.",
        fragments=(
            "logits = (hidden_states @ vocab_weights.t()) / temperature\n",
            "logits = logits.to(torch.float32)",
        ),
    ),
    Touchpoint(
        "verl.utils.fsdp_utils",
        "_select_fsdp2_wrap_targets",
        "Fused kernels: FSDP2 shards an untied lm_head on its own, and the fused forward reads its weight without "
        "calling it, so verl 0.9.1 fails there (https://github.com/verl-project/verl/pull/7427). SIS's look needs the "
        "gathered weight too and calls FSDP2's own unshard() before the forward. That goes when verl keeps such a "
        "head in the root unit.",
        fragments=('{"embed_tokens", "lm_head"}',),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.forward_backward_batch",
        "Fused kernels: forward_step is wrapped on the instance to see the loss function.",
        fragments=("self.forward_step(micro_batch, loss_function=loss_function, forward_only=forward_only)",),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.prepare_model_inputs",
        "Fused kernels: one temperature for the batch, passed to the forward.",
        fragments=('extra_args["temperature"] = temperature_item', "not isinstance(temperature, torch.Tensor)"),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.prepare_model_outputs",
        "Fused kernels: log-probs come from the output, and the look's results are gathered as the hook's are.",
        fragments=("log_probs = output.log_probs.squeeze(0)", "log_probs = output.log_probs[mask]"),
    ),
    Touchpoint(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine._gather_and_unpad_packed",
        "Fused kernels: brings the look's per-token results together.",
        parameters=("self", "tensor", "pad_size"),
    ),
    Touchpoint(
        "verl.workers.engine_workers",
        "TrainingWorker.__init__",
        "Fused kernels: the engine's setting is the model's.",
        fragments=('self.engine_config.use_fused_kernels = self.model_config.get("use_fused_kernels", False)',),
    ),
)

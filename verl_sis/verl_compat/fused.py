"""verl's fused kernels on FSDP: SIS sees the hidden states and the LM head inside the model's forward.

With ``use_fused_kernels`` verl replaces the model's ``forward`` by one that multiplies the final hidden states with
``lm_head.weight`` chunk by chunk and returns log-probs; logits never exist as a whole, and the engine's logits hook is
not called. FSDP holds the weight as shards and gathers it for the forward only, so a look at it must happen there. Two
hooks of torch on the model do that (none of verl's functions is replaced): one keeps the decoder's output, one runs
when the forward is done and before FSDP frees the weight. Gone when verl's engine calls its logits hook, or one like
it, with fused kernels too: https://github.com/verl-project/verl/blob/v0.9.1/verl/workers/engine/fsdp/transformer_impl.py
"""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_sis.core.linear_head import LinearHead, Logits
from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.verl_compat.batch import LOGITS_HOOK_FLAG

_WITHOUT = "actor_rollout_ref.model.use_fused_kernels=False"


def packed_rows(student_logits: Logits) -> Logits:
    """The rows of what verl's logits hook (``[1, n, V]``) or a look inside the forward hands over."""
    return student_logits if isinstance(student_logits, LinearHead) else student_logits.squeeze(0)


def look_inside_forward(engine: Any) -> None:
    """Have the logits hook called with fused kernels: from inside the model's forward, on a ``LinearHead``.

    A loss function is then called as the engine calls it without fused kernels: ``loss(student_logits=head, data=...)``
    where the micro-batch carries ``LOGITS_HOOK_FLAG``, its per-token results gathered and nested into ``model_output``.
    The methods of the engine are wrapped on the instance, so other engines of the process are untouched.

    Args:
        engine: verl's FSDP engine, its model built.

    Raises:
        SisConfigError: If the model's forward or head is not one whose numbers are known.
    """
    model = _fused_model(engine)
    look = _Look(engine)
    model.model.register_forward_hook(look.keep_hidden)
    model.register_forward_pre_hook(look.gather_head)
    # Before FSDP's own hook, which frees the gathered weights.
    model.register_forward_hook(look.call, prepend=True, with_kwargs=True)
    engine.forward_step = look.forward_step
    engine.prepare_model_inputs = look.prepare_model_inputs
    engine.prepare_model_outputs = look.prepare_model_outputs


def _fused_model(engine: Any) -> Any:
    """The transformers model inside whatever wraps it, once it is known that its head is ``lm_head.weight`` alone."""
    from verl.models.transformers import dense_common

    known = (dense_common.forward_with_torch_backend, dense_common.forward_with_triton_backend)
    model: Any = next((part for part in engine.module.modules() if type(part).forward in known), None)
    if model is None:
        raise SisConfigError(
            "SIS with fused kernels knows the forward that verl gives to text models, and no module of "
            f"{type(engine.module).__qualname__} has it: a vision-language model, or model code of its own. Type "
            f"{_WITHOUT}"
        )
    head = model.lm_head
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        raise SisConfigError(
            f"verl's fused forward reads lm_head.weight and nothing else of the LM head, found {head!r}: an adapter or "
            "a bias there would be left out of every log-prob. Keep lm_head out of "
            f"actor_rollout_ref.model.target_modules, or type {_WITHOUT}"
        )
    return model


class _Look:
    """The forward pass in progress of one engine: who wants to look, at what, and what came of it."""

    def __init__(self, engine: Any) -> None:
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        self._engine = engine
        self._step, self._inputs = engine.forward_step, engine.prepare_model_inputs
        self._outputs = engine.prepare_model_outputs
        # The same blocks as in verl's own function, so that every row is rounded as it is there.
        self._chunk_tokens: int = FusedLinearForPPO().chunk_size
        self._forget()

    def _forget(self) -> None:
        self._loss: Callable[..., Any] | None = None
        self._data: TensorDict | None = None
        self._hidden: torch.Tensor | None = None
        self._results: dict[str, torch.Tensor] = {}

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """The engine's ``forward_step``; remembers the loss function if the micro-batch asks for a look."""
        from verl.utils import tensordict_utils as tu

        flags = (LOGITS_HOOK_FLAG, "use_fused_kernels")
        if loss_function is not None and all(tu.get_non_tensor_data(micro_batch, flag, False) for flag in flags):
            self._loss = loss_function
        try:
            return self._step(micro_batch, loss_function=loss_function, forward_only=forward_only)
        finally:
            self._forget()

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """The engine's own; remembers the micro-batch, which is on the engine's device by now."""
        self._data = micro_batch
        return self._inputs(micro_batch=micro_batch)

    def gather_head(self, model: Any, _args: Any) -> None:
        """Gather a head that FSDP2 shards on its own (see ``fused_contract``); its backward frees it."""
        if isinstance(model.lm_head, FSDPModule):
            model.lm_head.unshard()

    def keep_hidden(self, _decoder: Any, _args: Any, output: Any) -> None:
        """Keep the final hidden states, which the fused forward multiplies with the head."""
        if self._loss is not None:
            self._hidden = output[0].detach()

    def call(self, model: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
        """Call the loss function on the head, whose weight is gathered here."""
        if self._loss is not None:
            if self._hidden is None or self._data is None:
                raise SisStateError("the model ran without its decoder or without verl's inputs: no hidden states seen")
            weight = model.lm_head.weight.detach()
            if isinstance(weight, DTensor):
                raise SisStateError("lm_head.weight is still a shard inside the model's forward, expected it gathered")
            head = LinearHead(self._packed(self._hidden), weight, kwargs["temperature"], self._chunk_tokens)
            with torch.no_grad():
                self._results = self._loss(student_logits=head, data=self._data)
            self._hidden = None
        if isinstance(model.lm_head, FSDPModule) and not torch.is_grad_enabled():
            model.lm_head.reshard()

    def prepare_model_outputs(
        self, *, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        """The engine's own, and the results of the look, gathered and nested as those of the logits hook are."""
        model_output = self._outputs(
            output=output,
            output_args=output_args,
            micro_batch=micro_batch,
            logits_processor_func=logits_processor_func,
        )
        tokens: Any = micro_batch["input_ids"]
        for name, values in self._results.items():
            packed = values.squeeze(0)
            if "pad_size" in output_args:
                packed = self._engine._gather_and_unpad_packed(packed, output_args["pad_size"])
            model_output[name] = torch.nested.nested_tensor_from_jagged(packed, tokens.offsets())
        return model_output

    def _packed(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, H]`` of this rank's rows, out of ``[1, n, H]`` (packed) or ``[B, j, H]`` (padded on the right)."""
        from verl.utils import tensordict_utils as tu

        if tu.get_non_tensor_data(self._data, "use_remove_padding", True):
            return hidden.squeeze(0)
        assert self._data is not None
        tokens: Any = self._data["input_ids"]
        lengths = tokens.offsets().diff()
        return hidden[torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]]

"""Repairs of vLLM's CPU backend, installed by vLLM itself (entry point ``vllm.general_plugins``) in its processes.

vLLM loads a model once. Reinforcement learning loads new weights after every step, and wants to know which experts a
token took; the CPU backend of vLLM 0.28 was not made for either.
"""

import functools
from typing import Any

from verl_sis.cpu.ledger import Patch, install_all, is_cpu_platform, replace_on_import


def _keep_weight(dispatch: Any) -> Any:
    """V1: keep the plain weight beside the packed one, so that there is something to load into."""

    @functools.wraps(dispatch)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        dispatch(layer, remove_weight=False)

    return dispatch_cpu_unquantized_gemm


def _pack_on_update(setup_kernel: Any) -> Any:
    """V2: pack expert weights on every load, not on the first one only."""

    @functools.wraps(setup_kernel)
    def _setup_kernel(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

        is_update = self.moe_kernel is not None
        setup_kernel(self, layer, w13, w2)
        if is_update and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    return _setup_kernel


def _report_routes(select_experts: Any) -> Any:
    """V3: hand the chosen experts to the capture function, which the base class offers and this kernel ignores."""

    @functools.wraps(select_experts)
    def _select_experts(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select_experts(self, *args, **kwargs)
        if self.routing_replay_capture_fn is not None:
            self.routing_replay_capture_fn(ids)
        return weights, ids

    return _select_experts


def _claim_capture(experts_class: Any) -> Any:
    """V3: declare what `_report_routes` provides; the class is changed in place because others derive from it."""

    def supports_routing_replay_capture(self: Any) -> bool:
        return True

    def set_capture_fn(self: Any, capture_fn: Any) -> None:
        # The base class also allocates a buffer for kernels that write ids themselves; this one has them at hand.
        self.routing_replay_capture_fn = capture_fn

    experts_class._select_experts = _report_routes(experts_class._select_experts)
    experts_class.supports_routing_replay_capture = supports_routing_replay_capture
    experts_class.set_capture_fn = set_capture_fn
    return experts_class


VLLM_PATCHES = (
    Patch(
        id="V1",
        target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        why="a linear weight is dropped once it is packed; new weights then fail with \"'Parameter' object has no "
        "attribute 'weight_loader'\"",
        upstream="vLLM 0.28.0, vllm/model_executor/layers/linear.py:202 (remove_weight=True)",
        remove_when="vLLM's CPU linear layers can be loaded a second time",
        install=replace_on_import(_keep_weight),
    ),
    Patch(
        id="V2",
        target="vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod._setup_kernel",
        why="expert weights are packed on the first load only: no error, but after an update the policy is wrong",
        upstream="https://github.com/vllm-project/vllm/issues/42821 (same defect on GPU backends); for the CPU, "
        "vLLM 0.28.0, unquantized_fused_moe_method.py:149",
        remove_when="vLLM packs CPU expert weights on every load, e.g. by https://github.com/vllm-project/vllm/pull/42823",
        install=replace_on_import(_pack_on_update),
    ),
    Patch(
        id="V3",
        target="vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts",
        why='vLLM refuses to return routes: "Routed-experts capture is not supported with monolithic MoE kernel '
        'CPUUnquantizedExperts"',
        upstream="vLLM 0.28.0, vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:167",
        remove_when="CPUUnquantizedExperts.supports_routing_replay_capture() returns True",
        install=replace_on_import(_claim_capture),
    ),
)


def register() -> None:
    """Install vLLM's patches in this process.

    vLLM calls this in its API, engine and worker processes, several times in some. Without ``VERL_PLATFORM=cpu``, or on
    a vLLM that runs on an accelerator, it does nothing.
    """
    if not is_cpu_platform():
        return
    import vllm.platforms  # imported by vLLM already; not a dependency of this package

    if vllm.platforms.current_platform.is_cpu():
        install_all(VLLM_PATCHES)

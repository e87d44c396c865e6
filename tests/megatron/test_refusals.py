"""What SIS cannot honour on verl's Megatron engine is refused when the actor is built; verl's contract holds."""

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core", reason="Type: pip install 'megatron-core>=0.16'")

from verl_sis import verl_compat
from verl_sis.errors import SisConfigError

OVERRIDE = r"~actor_rollout_ref.actor.megatron.override_transformer_config"
REFUSED = {
    "dynamic context parallelism": (
        {"engine": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}},
        "moves samples between ranks.*megatron.dynamic_context_parallel=False",
    ),
    "static padding": ({"engine": {"pad_to_length": True}}, "megatron.pad_to_length=False"),
    "fused kernels": ({"engine": {"use_fused_kernels": True}}, "model.use_fused_kernels=False"),
    "fp8": ({"transformer": {"fp8": "hybrid"}}, f"another rule. Type {OVERRIDE}.fp8"),
    "overlapped expert communication": (
        {"transformer": {"overlap_moe_expert_parallel_comm": True}},
        f"one after the other. Type {OVERRIDE}.overlap_moe_expert_parallel_comm",
    ),
    "multi-token prediction": ({"mtp": True}, "never run. Type actor_rollout_ref.model.mtp.enable=False"),
    "replay in the padded layout": (
        {"engine": {"use_remove_padding": False, "mode": "R3"}},
        "for packed sequences only. Type actor_rollout_ref.model.use_remove_padding=True",
    ),
    "replay without sequence parallelism": (
        {"engine": {"tensor_model_parallel_size": 2, "sequence_parallel": False, "mode": "R2"}},
        "Type actor_rollout_ref.actor.megatron.sequence_parallel=True",
    ),
}


def engine(settings):
    """What the check reads of an engine: verl's and megatron-core's own configurations."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from verl.workers.config import McoreEngineConfig, MtpConfig
    from verl.workers.config.engine import EngineRouterReplayConfig

    of_engine = {"mode": "disabled", **settings.get("engine", {})}
    replay = EngineRouterReplayConfig(mode=of_engine.pop("mode"))
    transformer = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    for name, value in settings.get("transformer", {}).items():
        setattr(transformer, name, value)
    return SimpleNamespace(
        engine_config=McoreEngineConfig(router_replay=replay, **of_engine),
        tf_config=transformer,
        model_config=SimpleNamespace(mtp=MtpConfig(enable=settings.get("mtp", False))),
    )


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(SisConfigError, match=f"SIS on verl's Megatron engine: .*{message}"):
        verl_compat.check_megatron_engine(engine(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": {"use_remove_padding": False}},
        {"engine": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "mode": "R3"}},
        {"engine": {"context_parallel_size": 2, "pipeline_model_parallel_size": 2, "mode": "R3"}},
    ],
)
def test_accepted(settings):
    verl_compat.check_megatron_engine(engine(settings))


@pytest.mark.parametrize("touchpoint", verl_compat.MEGATRON_CONTRACT, ids=lambda touchpoint: touchpoint.name)
def test_installed_verl_keeps_the_contract(touchpoint):
    assert touchpoint.problems() == []
    assert touchpoint.why

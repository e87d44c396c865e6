"""What SIS cannot honour is refused in the driver, before any process starts, saying what to type."""

import pytest
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from tests.contract.compose import ENOUGH, actor_config, compose_run

SIS = "actor_rollout_ref.actor.policy_loss.sis"
ROLLOUT = "actor_rollout_ref.rollout"

REFUSED = {
    "bypass mode": (
        ["algorithm.rollout_correction.bypass_mode=True"],
        "Type algorithm.rollout_correction.bypass_mode=False",
    ),
    "top-p": ([f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p must be 1.0, got 0.9.*Type {ROLLOUT}.top_p=1.0"),
    "top-k": ([f"{ROLLOUT}.top_k=20"], f"{ROLLOUT}.top_k must be -1, got 20"),
    "min-p": ([f"+{ROLLOUT}.min_p=0.05"], f"{ROLLOUT}.min_p must be 0.0, got 0.05"),
    "repetition penalty": ([f"+{ROLLOUT}.repetition_penalty=1.1"], f"{ROLLOUT}.repetition_penalty must be 1.0"),
    "raw log-probs": (
        [f"{ROLLOUT}.logprobs_mode=raw_logprobs", f"{ROLLOUT}.temperature=0.8"],
        f"Type {ROLLOUT}.logprobs_mode=processed_logprobs",
    ),
    "fused kernels without a backend": (
        [
            "actor_rollout_ref.model.use_fused_kernels=True",
            "actor_rollout_ref.model.fused_kernel_options.impl_backend=null",
        ],
        "supports the fused kernels torch, triton, liger, got .*impl_backend=None, with which verl leaves the model as "
        "it is.*Type actor_rollout_ref.model.fused_kernel_options.impl_backend=torch, or "
        "actor_rollout_ref.model.use_fused_kernels=False",
    ),
    "static padding": (
        ["actor_rollout_ref.actor.fsdp_config.pad_to_length=True"],
        "Type actor_rollout_ref.actor.fsdp_config.pad_to_length=False",
    ),
    "distillation": (["distillation.enabled=True"], "Type distillation.enabled=False"),
    "an engine without support": (
        ["actor_rollout_ref.actor.strategy=torchtitan"],
        r"supports the engines \('fsdp', 'fsdp2', 'megatron', 'veomni'\), got .*'torchtitan'.*"
        "Type actor_rollout_ref.actor.strategy=fsdp2, model_engine=megatron or model_engine=veomni",
    ),
    "activation replaced": (
        ["actor_rollout_ref.model.external_lib=my_models"],
        "external_lib must name verl_sis.integration.activate, got 'my_models'.*"
        r"external_lib=\[verl_sis.integration.activate,your.module\]",
    ),
    "activation removed": (["actor_rollout_ref.model.external_lib=null"], "SIS is chosen but would not be active"),
    "another loss": (
        ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        "SIS would be silently off.*sis.base_loss=gspo",
    ),
    "estimator": ([f"{SIS}.estimator=mean"], "estimator must be one of sampled, expected, got 'mean'"),
    "outside rule": ([f"{SIS}.outside_top_k=keep"], "outside_top_k must be one of reject, envelope, got 'keep'"),
    "behavior": ([f"{SIS}.behavior=rollout"], "behavior must be one of old, got 'rollout'"),
    "K of zero": ([f"{SIS}.top_k=0"], "top_k must be an integer of at least 1, got 0"),
    "K of half": ([f"{SIS}.top_k=1.5"], "top_k must be an integer of at least 1, got 1.5"),
    "share 0": ([f"{SIS}.normalizer_share=0"], r"normalizer_share must be a number in \(0, 1\], got 0"),
    "share above 1": ([f"{SIS}.normalizer_share=1.5"], r"normalizer_share must be a number in \(0, 1\], got 1.5"),
    "chunk": ([f"{SIS}.chunk_tokens=-1"], "chunk_tokens must be an integer of at least 1"),
    "seed": ([f"{SIS}.seed=a"], r"seed must be an integer in \[0, 2\^63\), got 'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_the_driver(case):
    overrides, message = REFUSED[case]
    config = compose_run("+sis@_global_=grpo", *overrides, *ENOUGH)
    with pytest.raises(InstantiationException, match=f"(?s)SisConfigError.*{message}"):
        actor_config(config)


MEGATRON = "actor_rollout_ref.actor.megatron"
REFUSED_ON_MEGATRON = {
    "static padding": ([f"{MEGATRON}.pad_to_length=True"], f"Type {MEGATRON}.pad_to_length=False"),
    "dynamic context parallelism": (
        [f"{MEGATRON}.dynamic_context_parallel=True", f"{MEGATRON}.max_seqlen_per_dp_cp_rank=64"],
        f"moves samples between ranks.*Type {MEGATRON}.dynamic_context_parallel=False",
    ),
    "multi-token prediction": (
        ["actor_rollout_ref.model.mtp.enable=True"],
        "never run with multi-token prediction.*Type actor_rollout_ref.model.mtp.enable=False",
    ),
    "a dump": ([f"{SIS}.dump.every=1"], f"no rank of verl's Megatron engine holds. Type {SIS}.dump.every=0"),
    "fused kernels": (
        ["actor_rollout_ref.model.use_fused_kernels=True"],
        "Type actor_rollout_ref.model.use_fused_kernels=False",
    ),
    "routes that nobody replays": (
        [f"{ROLLOUT}.enable_rollout_routing_replay=True"],
        r"Type \+routing_replay@_global_=r3_megatron",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ON_MEGATRON)
def test_refused_on_megatron(case):
    overrides, message = REFUSED_ON_MEGATRON[case]
    config = compose_run("+sis@_global_=grpo", "model_engine=megatron", *overrides, *ENOUGH)
    with pytest.raises(InstantiationException, match=f"(?s)SisConfigError.*{message}"):
        actor_config(config)


@pytest.mark.parametrize(
    "groups", [[], ["+routing_replay@_global_=r3_megatron"], ["+routing_replay@_global_=r2_megatron"]]
)
def test_sis_on_megatron_is_accepted(groups):
    config = compose_run("+sis@_global_=grpo", *groups, "model_engine=megatron", *ENOUGH)
    actor = actor_config(config)
    run = actor.policy_loss.sis.run
    assert (run.strategy, run.pad_to_length, run.dynamic_context_parallel) == ("megatron", False, False)
    assert run.replay_mode == actor.engine.router_replay.mode


VEOMNI = "actor_rollout_ref.actor.veomni"
REFUSED_ON_VEOMNI = {
    "static padding": (["actor_rollout_ref.actor.pad_to_length=True"], f"Type {VEOMNI}.pad_to_length=False"),
    "fused kernels": (
        ["actor_rollout_ref.model.use_fused_kernels=True"],
        "Type actor_rollout_ref.model.use_fused_kernels=False",
    ),
    "a dump beside asynchronous offloading": (
        [f"{SIS}.dump.every=1", f"{VEOMNI}.enable_async_activation_offload=True"],
        f"Type {VEOMNI}.enable_async_activation_offload=False or {SIS}.dump.every=0",
    ),
    "a dump in R2": (
        [f"{SIS}.dump.every=1", "+routing_replay@_global_=r2_veomni"],
        rf"record new routes.*Type \+routing_replay@_global_=r3_veomni or {SIS}.dump.every=0",
    ),
    "routes that nobody replays": (
        [f"{ROLLOUT}.enable_rollout_routing_replay=True"],
        r"Type \+routing_replay@_global_=r3_veomni",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ON_VEOMNI)
def test_refused_on_veomni(case):
    overrides, message = REFUSED_ON_VEOMNI[case]
    config = compose_run("+sis@_global_=grpo", "model_engine=veomni", *overrides, *ENOUGH)
    with pytest.raises(InstantiationException, match=f"(?s)SisConfigError.*{message}"):
        actor_config(config)


@pytest.mark.parametrize("groups", [[], ["+routing_replay@_global_=r3_veomni"], ["+routing_replay@_global_=r2_veomni"]])
def test_sis_on_veomni_is_accepted(groups):
    config = compose_run("+sis@_global_=grpo", *groups, "model_engine=veomni", *ENOUGH)
    actor = actor_config(config)
    run = actor.policy_loss.sis.run
    assert (run.strategy, run.pad_to_length, run.async_activation_offload) == ("veomni", False, False)
    assert run.replay_mode == actor.engine.router_replay.mode


def test_a_list_of_libraries_may_hold_the_activation():
    libs = "actor_rollout_ref.model.external_lib=[verl_sis.integration.activate,json]"
    assert actor_config(compose_run("+sis@_global_=grpo", libs, *ENOUGH)).policy_loss.loss_mode == "sis"


def test_fused_kernels_with_verls_default_backend_are_fine():
    config = compose_run("+sis@_global_=grpo", "actor_rollout_ref.model.use_fused_kernels=True", *ENOUGH)
    run = actor_config(config).policy_loss.sis.run
    assert (run.use_fused_kernels, run.fused_kernels_backend) == (True, "torch")


def test_what_a_dump_cannot_have_is_refused_with_one_only():
    """One composition, changed step by step."""
    in_the_way = {"model.enable_activation_offload": True, "actor.fsdp_config.qat.enable": True}
    config = compose_run(
        "+sis@_global_=grpo",
        "trainer.default_local_dir=/runs/one",
        *(f"actor_rollout_ref.{name}={value}" for name, value in in_the_way.items()),
        *ENOUGH,
    )
    sis = config.actor_rollout_ref.actor.policy_loss.sis
    assert actor_config(config).policy_loss.sis.dump.every == 0

    def refused(message):
        with pytest.raises(InstantiationException, match=f"(?s)SisConfigError.*{message}"):
            actor_config(config)

    sis.dump.every = 1
    for name in in_the_way:
        refused(f"Type actor_rollout_ref.{name}=False or {SIS}.dump.every=0")
        OmegaConf.update(config, f"actor_rollout_ref.{name}", False)
    sis.top_k = 2**15
    refused(f"ranks up to 32767, got policy_loss.sis.top_k=32768.*{SIS}.dump.every=0")
    sis.top_k = 2**15 - 1
    assert actor_config(config).policy_loss.sis.dump.directory == "/runs/one/sis_dump"
    sis.dump.directory = ""
    refused(f"dump.every=1 needs a directory.*Type {SIS}.dump.directory=")
    for name, least in {"every": 0, "max_tokens": 1, "max_mb": 1, "max_contexts": 0}.items():
        kept, sis.dump[name] = sis.dump[name], least - 1
        refused(f"policy_loss.sis.dump.{name} must be an integer of at least {least}, got {least - 1}")
        sis.dump[name] = kept


def test_raw_log_probs_at_temperature_one_are_fine():
    config = compose_run("+sis@_global_=grpo", f"{ROLLOUT}.logprobs_mode=raw_logprobs", *ENOUGH)
    assert actor_config(config).policy_loss.loss_mode == "sis"


def test_main_ppo_checks_the_actor_before_ray_starts():
    """Verl's own order, on which the refusals above rest."""
    import inspect

    from verl.trainer import main_ppo

    source = inspect.getsource(main_ppo.main)
    assert source.index("validate_config(") < source.index("run_ppo(")

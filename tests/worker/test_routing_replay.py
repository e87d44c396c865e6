"""Routing replay in a real worker: identities, token identity in every layout, alarms, and nothing left behind."""

import math

import pytest
import torch

from tests.worker import harness, routes
from verl_sis.errors import SisConfigError, SisStateError

LAYOUTS = {
    "packed": {},
    "packed, micro-batches of two": {"micro_batch_size": 2},
    "dynamic micro-batches": {"max_tokens": 24},
    "padded layout": {"model_overrides": {"use_remove_padding": False}},
    "static padding": {"engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
    "gradient checkpointing": {"model_overrides": {"enable_gradient_checkpointing": True}},
}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    harness.prepare_environment()
    return routes.build_wide_model_folder(tmp_path_factory.mktemp("wide"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_takes_its_own_route(wide_model, layout):
    """Unique ids per (sample, position, layer), above 255, dense first layer: each arrives where it belongs."""
    replay = {"min_agreement": 0.0}
    worker = harness.build_worker(harness.Settings(model=wide_model, sis=None, replay=replay, **LAYOUTS[layout]))
    rollout = routes.with_labels(routes.distinct_tokens([5, 1, 9, 4, 7, 2, 3, 6]))
    seen = routes.watch(worker)
    old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
    count = sum(len(sequence) for sequence in rollout.sequences())
    assert routes.assert_labels_arrived(seen, rollout) == count
    metrics = harness.update(worker, rollout, old, mini_batch_size=4, columns={"rollout_log_probs": old})
    assert routes.assert_labels_arrived(seen, rollout) == 2 * count
    assert metrics["routing/tokens"] == [37.0]
    assert metrics["routing/fallback_fraction"] == [8 / count]
    assert metrics["routing/missing_tokens"] == [0.0]
    # int16, the dense layer's column included; padding rows carry ids too.
    assert metrics["routing/bytes_per_token"][0] >= routes.LAYERS * 2 * 2
    assert metrics["mismatch/tokens"] == [37.0]


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replaying_the_own_routes_changes_nothing(build, layout, mode):
    """Old pass, loss, gradients and weights of two steps are those of a run without replay."""
    found = []
    for replay in (None, {"mode": mode}):
        worker = build(sis=None, replay=replay, **{"micro_batch_size": 8, **LAYOUTS[layout]})
        rollout = harness.made_up_rollout([5, 1, 9, 4, 7, 2, 3, 6])
        steps = []
        for _ in range(2):
            if replay is not None and mode == "R3":
                routes.native_routes(worker, rollout)
            output = harness.old_pass(worker, rollout)
            metrics = harness.update(worker, rollout, harness.response_log_probs(output, rollout))
            steps.append((output["log_probs"].values(), metrics))
        found.append((steps, [p.full_tensor().detach() for p in worker.engine.module.parameters()]))
    (native, native_weights), (replayed, replayed_weights) = found
    for (native_output, native_metrics), (output, metrics) in zip(native, replayed, strict=True):
        torch.testing.assert_close(output, native_output, rtol=0, atol=2e-6)
        assert metrics["grad_norm"] == pytest.approx(native_metrics["grad_norm"], rel=1e-4)
        assert metrics["routing/disagreement"][0] == 0.0
    for first, second in zip(native_weights, replayed_weights, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sis", [None, {}], ids=["verl alone", "with SIS"])
def test_choices_that_differ_are_counted(build, sis):
    worker = build(sis=sis, replay={"native_pass_every": 1}, micro_batch_size=8)
    rollout = harness.sampled_rollout(worker, 32, length=8)
    routes.flipped(routes.native_routes(worker, rollout), 0.1, experts=4)
    extra = {"rollout_log_probs": harness.response_log_probs(harness.old_pass(build(sis=None), rollout), rollout)}
    old = harness.response_log_probs(harness.old_pass(worker, rollout, columns=extra), rollout)
    metrics = harness.update(worker, rollout, old, mini_batch_size=8, columns=extra)
    assert metrics["routing/tokens"] == [256.0]
    assert 0.05 < metrics["routing/disagreement"][0] < 0.25
    rate = metrics["routing/disagreement"][0]
    assert metrics["routing/layers_per_token"][0] == pytest.approx(2 * rate)
    assert rate <= metrics["routing/tokens_any_difference"][0] <= 2 * rate
    layers = [metrics[f"routing/disagreement_layer/{layer}"][0] for layer in range(2)]
    assert sum(layers) / 2 == pytest.approx(rate)
    assert metrics["routing/disagreement_by_age/0"][0] == pytest.approx(rate, rel=0.7)
    # The rollout engine is the trainer itself here, natively routed: its mismatch without replay is float noise.
    assert metrics["mismatch/native/k3"][0] < 1e-10
    assert metrics["mismatch/floor/k3"][0] < 1e-10
    assert metrics["mismatch/k3"][0] > 1e-6
    assert (
        metrics["mismatch/tokens"] == metrics["mismatch/native/tokens"] == metrics["mismatch/floor/tokens"] == [256.0]
    )
    if sis is not None:
        assert metrics["sis/accept_rate_by_age/0"] == metrics["sis/in_topk_rate_by_age/0"]


MISALIGNED = {
    "rows off by one": lambda rows, prompt: rows.roll(1, 0),
    "layers off by one": lambda rows, prompt: rows.roll(1, 1),
    "prompt rows filled": lambda rows, prompt: torch.cat(
        [torch.tensor([0, 1], dtype=torch.int16).expand_as(rows[:prompt]), rows[prompt:]]
    ),
}


@pytest.mark.parametrize("fault", MISALIGNED)
@pytest.mark.parametrize("bypass", [False, True], ids=["old pass", "bypass mode"])
def test_misaligned_routes_stop_the_run(build, fault, bypass):
    worker = build(sis=None, replay={"run": {"bypass_mode": bypass}}, micro_batch_size=64)
    rollout = routes.native_routes(worker, harness.made_up_rollout([16] * 64))
    rollout.prompts = [torch.cat([prompt, prompt]) for prompt in rollout.prompts]
    routes.native_routes(worker, rollout)
    harness.old_pass(worker, rollout)
    rollout.routes = [
        MISALIGNED[fault](rows, len(prompt)) for rows, prompt in zip(rollout.routes, rollout.prompts, strict=True)
    ]
    for rows in rollout.routes:
        rows[-1] = 0
    old = harness.nested([torch.zeros(16)] * 64)
    with pytest.raises(
        SisStateError, match=r"agree with the trainer's own by .* They belong to other tokens or layers"
    ):
        if bypass:
            harness.update(worker, rollout, old, columns={"rollout_log_probs": old})
        else:
            harness.old_pass(worker, rollout)
    assert not worker._passes.replay.active


class TestWrongRoutes:
    """Routes that do not fit are refused by name, in the old pass, and the worker goes on."""

    @pytest.fixture
    def worker(self, build):
        return build(sis=None, replay={"min_agreement": 0.0})

    @pytest.fixture
    def rollout(self, worker):
        return routes.native_routes(worker, harness.made_up_rollout([5, 1, 4, 7]))

    def refused(self, worker, rollout, message):
        with pytest.raises(SisStateError, match=message):
            harness.old_pass(worker, rollout)
        assert not worker._passes.replay.active
        # The worker is usable afterwards.
        harness.old_pass(worker, routes.native_routes(worker, rollout))

    def test_none_at_all(self, worker, rollout):
        rollout.routes = []
        self.refused(worker, rollout, "the batch has no 'routed_experts'")

    def test_missing_before_a_token_with_loss(self, worker, rollout):
        prompt = len(rollout.prompts[2])
        rollout.routes[2][prompt + 1] = 0
        self.refused(worker, rollout, f"no route for 1 tokens that bear loss.* position {prompt + 2} of sample 2")

    def test_missing_before_a_token_without_loss_is_counted(self, worker, rollout):
        """Tool text at the end, and its neighbours, have no routes: verl leaves zeros there."""
        rollout.masks[3][4:] = 0
        rollout.routes[3][len(rollout.prompts[3]) + 3 :] = 0
        old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
        metrics = harness.update(worker, rollout, old)
        assert metrics["routing/missing_tokens"] == [3.0]
        assert metrics["routing/tokens"] == [14.0]

    def test_truncated(self, worker, rollout):
        rollout.routes[1] = rollout.routes[1][:-1]
        length = len(rollout.sequences()[1])
        self.refused(worker, rollout, f"sample 1 .* has {length} tokens but {length - 1} rows of routes")

    def test_an_expert_twice(self, worker, rollout):
        rollout.routes[0][1, 1] = torch.tensor([3, 3])
        self.refused(worker, rollout, r"sample 0, position 1, decoder layer 1 is \[3, 3\]")

    def test_an_expert_beyond_the_last(self, worker, rollout):
        rollout.routes[0][1, 1] = torch.tensor([3, 4])
        self.refused(worker, rollout, r"\[3, 4\], which are not 2 distinct experts of 4")

    def test_another_number_of_layers_or_experts(self, worker, rollout):
        rollout.routes = [rows[:, :1] for rows in rollout.routes]
        self.refused(worker, rollout, r"have shape \(1, 2\) per token, expected \(2, 2\)")


def test_the_reference_pass_under_lora_routes_natively(build):
    lora = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    worker = build(sis=None, replay={"min_agreement": 0.0}, model_overrides=lora)
    rollout = routes.native_routes(worker, harness.made_up_rollout([5, 1, 4, 7]))
    native = harness.old_pass(worker, rollout, no_lora_adapter=True)["log_probs"].values()
    routes.flipped(rollout, 0.9, experts=4)
    assert torch.equal(harness.old_pass(worker, rollout, no_lora_adapter=True)["log_probs"].values(), native)
    assert not torch.equal(harness.old_pass(worker, rollout)["log_probs"].values(), native)


def test_r2_replays_what_the_old_pass_chose(build):
    """The update moves the routers; the routes of the old pass are kept through all mini-batches, then freed."""
    worker = build(sis=None, replay={"mode": "R2"}, learning_rate=3e-2, max_tokens=40)
    rollout = harness.made_up_rollout([5, 1, 9, 4, 7, 2, 3, 6])
    output = harness.old_pass(worker, rollout)
    store = worker._passes.store
    assert len(store) == 8
    metrics = harness.update(worker, rollout, harness.response_log_probs(output, rollout), mini_batch_size=2)
    assert metrics["routing/disagreement_by_age/0"][0] == 0.0
    assert max(metrics[f"routing/disagreement_by_age/{age}"][0] for age in range(1, 4)) > 0.0
    assert len(store) == 0
    with pytest.raises(SisStateError, match="no routes of the old pass for"):
        harness.update(worker, rollout, harness.response_log_probs(output, rollout), mini_batch_size=2)


def test_bypass_mode_has_its_metrics_without_an_old_pass(build):
    worker = build(sis=None, replay={"run": {"bypass_mode": True}}, micro_batch_size=8)
    rollout = harness.sampled_rollout(worker, 32, length=8)
    routes.native_routes(worker, rollout)
    rollout_log_probs = harness.response_log_probs(harness.old_pass(build(sis=None), rollout), rollout)
    metrics = harness.update(
        worker, rollout, rollout_log_probs, mini_batch_size=8, columns={"rollout_log_probs": rollout_log_probs}
    )
    # Of the first mini-batch, which meets the weights that sampled.
    assert metrics["routing/tokens"] == metrics["mismatch/tokens"] == [64.0]
    assert metrics["routing/disagreement"] == [0.0]
    assert metrics["mismatch/k3"][0] < 1e-10
    assert metrics["routing/agreement"][0] == pytest.approx(1.0) or math.isnan(metrics["routing/agreement"][0])


def test_an_exception_in_the_middle_of_an_update_leaves_no_state(build, monkeypatch):
    worker = build(sis=None, replay={}, micro_batch_size=2)
    rollout = routes.native_routes(worker, harness.made_up_rollout([5, 1, 4, 7]))
    old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
    with monkeypatch.context() as patched:
        patched.setattr(worker.engine, "optimizer_step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            harness.update(worker, rollout, old)
    assert not worker._passes.replay.active
    assert worker._passes.statistics.layers == ()
    metrics = harness.step(worker, rollout)
    assert metrics["routing/tokens"] == [17.0]


def test_nothing_of_the_routes_leaves_the_worker(build):
    worker = build(sis=None, replay={"mode": "R2"})
    rollout = harness.made_up_rollout([5, 1, 4, 7])
    assert set(harness.old_pass(worker, rollout).keys()) == {"log_probs", "entropy", "metrics"}


class TestRefusedWhenTheActorIsBuilt:
    """Before the first rollout, each with what to type."""

    def test_one_expert_per_token_under_r3(self, tmp_path):
        harness.prepare_environment()
        model = harness.build_model_folder(tmp_path, experts_per_token=1)
        with pytest.raises(SisConfigError, match=r"one expert per token.*Type \+routing_replay@_global_=r2"):
            harness.build_worker(harness.Settings(model=model, sis=None, replay={}))
        # R2 knows of every row whether it has a route.
        worker = harness.build_worker(harness.Settings(model=model, sis=None, replay={"mode": "R2"}))
        assert harness.step(worker, harness.made_up_rollout([5, 1, 4, 7]))["routing/disagreement"] == [0.0]

    def test_verls_own_setting_without_the_preset(self, build):
        from verl.workers.config.engine import EngineRouterReplayConfig

        with pytest.raises(SisConfigError, match=r"set by hand.*Type \+routing_replay@_global_=r3"):
            build(engine={"router_replay": EngineRouterReplayConfig(mode="R3")})


def test_a_second_loss_function_does_not_hook_twice(build):
    worker = build(sis=None, replay={})
    worker.set_loss_fn(worker.loss_fn._loss_fn)
    rollout = routes.native_routes(worker, harness.made_up_rollout([5, 1, 4, 7]))
    assert harness.step(worker, rollout)["routing/tokens"] == [17.0]

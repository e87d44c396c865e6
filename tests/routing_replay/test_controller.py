"""The life of a micro-batch: forward, recomputation, backward, and what may go wrong between them."""

import pytest
import torch
from torch.utils.checkpoint import CheckpointError

from tests.routing_replay import models, running
from verl_sis.errors import SisConfigError, SisStateError
from verl_sis.routing_replay.routers import find_routers

EXPERTS = ("eager", "batched_mm", "grouped_mm")


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model, tokens):
    """The loss of next-token prediction."""
    model.zero_grad()
    return torch.log_softmax(running.forward(model, tokens).float(), -1)[0, :-1].gather(1, tokens[0, 1:, None]).mean()


@pytest.fixture
def checkpointed():
    def build(family="Qwen3-MoE", **settings):
        model = models.build(family, **settings).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return build


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("family", ["Qwen3-MoE", "gpt-oss", "DeepSeek-V3"])
def test_gradients_with_and_without_checkpointing(checkpointed, family, experts):
    tokens = models.tokens()
    found = []
    for model in (models.build(family, experts=experts).train(), checkpointed(family, experts=experts)):
        replay = running.install(model)
        replay.arm(running.targets(replay, running.random_ids(replay, 24)), count=False)
        loss = train(model, tokens)
        observer = replay.finish_forward()
        before = observer.packed()
        loss.backward()
        assert torch.equal(observer.packed(), before), "the recomputation was counted"
        found.append(gradients(model))
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    for name in plain:
        torch.testing.assert_close(recomputed[name], plain[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_a_stale_target_is_caught_in_the_recomputation(checkpointed, experts):
    """Without the check these experts raise nothing, and the gradients are wrong."""
    model = checkpointed(experts=experts)
    replay = running.install(model)
    first, second = (running.targets(replay, running.random_ids(replay, 24, seed)) for seed in (0, 1))
    replay.arm(first, count=False)
    loss = train(model, models.tokens())
    replay.finish_forward()
    replay.arm(second, count=False)
    with pytest.raises(SisStateError, match="recomputed for the backward pass with other routes"):
        loss.backward()


def test_a_target_gone_before_the_backward_pass_is_caught(checkpointed):
    model = checkpointed(experts="grouped_mm")
    replay = running.install(model)
    replay.arm(running.targets(replay, running.random_ids(replay, 24)), count=False)
    loss = train(model, models.tokens())
    replay.finish_forward()
    replay.disarm()
    # torch notices by itself here: native routing saves fewer tensors.
    with pytest.raises((SisStateError, CheckpointError)):
        loss.backward()


def test_native_training_under_checkpointing_is_left_alone(checkpointed):
    model = checkpointed()
    train(model, models.tokens()).backward()
    expected = gradients(model)
    replay = running.install(model)
    train(model, models.tokens()).backward()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, expected[name])
    # ... and leaves nothing that a replayed micro-batch would trip over.
    replay.arm(running.targets(replay, running.random_ids(replay, 24)), count=False)
    loss = train(model, models.tokens())
    replay.finish_forward()
    loss.backward()


def test_rows_without_a_route_go_native():
    model = models.build("Qwen3-MoE", num_hidden_layers=1)
    tokens = models.tokens()
    replay = running.install(model)
    valid = torch.arange(24) % 3 != 0
    native = running.record(model, replay, tokens)
    ids = running.random_ids(replay, 24)
    seen = []
    replay.routers[0].module.register_forward_hook(lambda _m, _a, output: seen.append(output[2]))
    statistics = running.observed(replay, model, tokens, running.targets(replay, ids, valid))
    assert torch.equal(seen[0], torch.where(valid[:, None], ids[:, 0], native[:, 0].long()))
    assert statistics.sums["tokens"] == 16


def test_hooks_come_off():
    for family in ("Qwen3-MoE", "DeepSeek-V3"):
        model = models.build(family).eval()
        tokens = models.tokens()
        native = running.forward(model, tokens)
        replay = running.install(model)
        running.replayed(model, replay, tokens, running.targets(replay, running.random_ids(replay, 24)))
        replay.remove()
        assert torch.equal(running.forward(model, tokens), native)
        for router in replay.routers:
            assert not router.module._forward_hooks
            assert "route_tokens_to_experts" not in vars(router.module)


def test_another_number_of_rows_is_refused():
    model = models.build("Qwen3-MoE")
    replay = running.install(model)
    replay.arm(running.targets(replay, running.random_ids(replay, 20)), count=False)
    with pytest.raises(SisStateError, match=r"chose for \(24, 2\).*expected \(20, 2\)"):
        running.forward(model, models.tokens())


def test_a_router_that_runs_twice_or_never_is_refused():
    model = models.build("Qwen3-MoE")
    replay = running.install(model)
    replay.arm(running.targets(replay, running.random_ids(replay, 24)), count=False)
    with pytest.raises(SisStateError, match=r"\{0: 0, 1: 0, 2: 0\}"):
        replay.finish_forward()
    running.forward(model, models.tokens())
    running.forward(model, models.tokens())
    with pytest.raises(SisStateError, match=r"\{0: 2, 1: 2, 2: 2\}"):
        replay.finish_forward()


class TestCoverage:
    """Which modules are routers of the decoder."""

    def find(self, model):
        return find_routers(model, model.config.get_text_config(), torch.device("cpu"))

    def test_a_dense_model_is_refused(self):
        model = models.build("Qwen3-MoE", mlp_only_layers=[0, 1, 2])
        with pytest.raises(SisConfigError, match="no mixture of experts that it knows"):
            self.find(model)

    def test_an_unknown_router_beside_known_ones_is_refused(self):
        class Unknown(torch.nn.Module):
            pass

        model = models.build("Qwen3-MoE")
        model.model.layers[1].mlp.gate = Unknown()
        with pytest.raises(SisConfigError, match=r"found none of them beside model\.layers\.1\.mlp\.experts"):
            self.find(model)

    def test_two_routers_in_one_layer_are_refused(self):
        model = models.build("Qwen3-MoE")
        model.model.layers[1].second = model.model.layers[2].mlp.gate
        with pytest.raises(SisConfigError, match="two routers in decoder layer 1"):
            self.find(model)

    def test_heads_for_more_tokens_and_layers_beyond_the_decoder_are_left_out(self):
        """They restart or continue the numbering of layers, and the rollout engine's routes do not hold them."""
        model = models.build("Qwen3-MoE")
        extra = models.build("Qwen3-MoE")
        model.mtp = extra.model
        model.model.layers.append(extra.model.layers[0])
        found = self.find(model)
        assert [router.name for router in found] == [f"model.layers.{layer}.mlp.gate" for layer in range(3)]

    def test_a_decoder_inside_a_vision_language_model(self):
        """Its tower has layers and attention of its own, and no experts."""
        model = models.build("Qwen3-MoE")
        outer = torch.nn.Module()
        outer.model = torch.nn.ModuleDict({"language_model": model.model})
        outer.visual = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
        found = find_routers(outer, model.config, torch.device("cpu"))
        assert [router.name for router in found] == [f"model.language_model.layers.{i}.mlp.gate" for i in range(3)]

    def test_routers_are_keyed_by_absolute_layer(self):
        found = self.find(models.build("Qwen3-MoE, first layer dense"))
        assert [(router.layer, router.name) for router in found] == [
            (1, "model.layers.1.mlp.gate"),
            (2, "model.layers.2.mlp.gate"),
        ]

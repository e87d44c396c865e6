"""Each router family: its own choice replayed is bit-equal, any other choice gets the weights that its paper says."""

import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

from tests.routing_replay import models, running
from verl_sis.errors import SisConfigError
from verl_sis.routing_replay.families import FAMILIES, choose_weights, class_of, family_of, proven_families

EXPERTS = ("eager", "batched_mm", "grouped_mm")


@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_replaying_its_own_choice_is_bit_equal(family, dtype, experts):
    model = models.build(family, dtype=dtype, experts=experts).eval()
    assert model.config.get_text_config()._experts_implementation == experts
    tokens = models.tokens()
    with torch.no_grad():
        native = running.forward(model, tokens)
        replay = running.install(model)
        assert replay.layers == models.SPARSE[family]
        ids = running.record(model, replay, tokens)
        again = running.replayed(model, replay, tokens, running.targets(replay, ids))
        other = running.replayed(model, replay, tokens, running.targets(replay, running.random_ids(replay, 24)))
    assert torch.isfinite(native).all()
    assert torch.equal(again, native)
    assert not torch.equal(other, native)


def expected_weights(family, scores, ids, module):
    """Float64, from the papers' formulas, of router logits ``[n, E]`` and any ids."""
    scores = scores.double()
    if family == "gpt-oss":
        return torch.softmax(scores.gather(1, ids), dim=1)
    if family in ("DeepSeek-V3", "GLM-4-MoE"):
        chosen = torch.sigmoid(scores).gather(1, ids)
        return module.routed_scaling_factor * chosen / chosen.sum(1, keepdim=True)
    chosen = torch.softmax(scores, dim=1).gather(1, ids)
    normalized = family in ("Mixtral", "Qwen3.5-MoE", "Qwen3-MoE")
    return chosen / chosen.sum(1, keepdim=True) if normalized else chosen


@pytest.mark.parametrize("family", [name for name in models.FAMILIES if "dense" not in name])
def test_any_choice_gets_the_weights_of_the_live_scores(family):
    model = models.build(family)
    (first, *_) = running.install(model).routers
    scores = torch.randn(40, first.experts, generator=torch.Generator().manual_seed(1))
    ids = torch.rand(40, first.experts, generator=torch.Generator().manual_seed(2)).topk(2).indices
    expected = expected_weights(family, scores, ids, first.module)
    torch.testing.assert_close(first.weights(first.module, scores, ids).double(), expected, rtol=1e-6, atol=1e-7)


def test_hand_computed_weights_of_qwen3():
    """Logits log(1, 2, 3, 4): softmax 0.1, 0.2, 0.3, 0.4; experts 0 and 2 chosen: 0.1 / 0.4 and 0.3 / 0.4."""
    (first, *_) = running.install(models.build("Qwen3-MoE", num_experts=4)).routers
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).log()
    weights = first.weights(first.module, scores, torch.tensor([[0, 2]]))
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75]]))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_the_router_keeps_its_gradient(family):
    """Under a replayed choice the loss still depends on the router's weight, through the weights of the experts."""
    model = models.build(family)
    replay = running.install(model)
    chosen = running.targets(replay, running.random_ids(replay, 24))
    running.replayed(model, replay, models.tokens(), chosen).square().mean().backward()
    for router in replay.routers:
        gate = router.module if router.family.method is None else router.module.gate
        assert gate.weight.grad.abs().max() > 0, router.name


def test_a_router_with_other_arithmetic_is_refused():
    class Qwen3MoeTopKRouter(modeling_qwen3_moe.Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            logits, weights, ids = super().forward(hidden_states)
            return logits, weights * 1.001, ids

    model = models.build("Qwen3-MoE")
    module = Qwen3MoeTopKRouter(model.config)
    family = family_of(module)
    assert family is not None
    with pytest.raises(SisConfigError, match=r"other weights for its own choices.*transformers >=5\.5\.3,<5\.11"):
        choose_weights(family, class_of(family, module), model.config, torch.device("cpu"))


def test_transformers_5_5_returned_probabilities_under_the_name_of_logits():
    """A router as transformers 5.5 had it picks the second variant; the e2e tests run the release itself."""

    class Qwen3MoeTopKRouter(modeling_qwen3_moe.Qwen3MoeTopKRouter):
        def forward(self, hidden_states):
            probabilities = torch.softmax(torch.nn.functional.linear(hidden_states, self.weight).float(), -1)
            weights, ids = torch.topk(probabilities, self.top_k)
            if self.norm_topk_prob:
                weights /= weights.sum(-1, keepdim=True)
            return probabilities, weights, ids

    model = models.build("Qwen3-MoE")
    module = Qwen3MoeTopKRouter(model.config)
    family = family_of(module)
    assert family is not None
    assert choose_weights(family, class_of(family, module), model.config, torch.device("cpu")) is family.variants[1]


def test_every_family_of_the_installed_transformers_is_proven():
    assert proven_families() == [family.name for family in FAMILIES]


def test_every_family_has_a_tiny_model():
    assert {family.name for family in FAMILIES} <= set(models.FAMILIES)

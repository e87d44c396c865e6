"""SIS with the features of verl's FSDP engine that touch its path, in a real worker."""

import pytest
import torch

from tests.worker import harness

FEATURES = {
    "fixed micro-batches": {},
    "dynamic micro-batches": {"max_tokens": 64},
    "padded layout": {"model_overrides": {"use_remove_padding": False}},
    "gradient checkpointing": {"model_overrides": {"enable_gradient_checkpointing": True}},
    "lora": {"model_overrides": {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}},
    "envelope rule": {"sis": {"outside_top_k": "envelope"}},
    "expected estimator": {"sis": {"estimator": "expected"}},
    "exact envelope, K = V": {"sis": {"top_k": 102}},
    "K = 1": {"sis": {"top_k": 1}},
    "small chunks": {"sis": {"chunk_tokens": 3}},
    "temperature": {},
    "entropy in the update": {},
    "rollout-correction weights": {},
    "gspo": {"sis": {"base_loss": "gspo"}, "actor": {"loss_agg_mode": "seq-mean-token-mean"}},
    "cispo": {"sis": {"base_loss": "cispo"}},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_identities_hold(build, feature):
    worker = build(learning_rate=1e-3, micro_batch_size=8, **FEATURES[feature])
    rollout = harness.sampled_rollout(worker, 32, length=8)
    extra = {"temperature": 0.7} if feature == "temperature" else {}
    old = harness.response_log_probs(harness.old_pass(worker, rollout, **extra), rollout)
    if feature == "entropy in the update":
        extra["calculate_entropy"] = True
    columns = {"rollout_log_probs": old}
    if feature == "rollout-correction weights":
        columns["rollout_is_weights"] = harness.nested([torch.full((8,), 0.5) for _ in rollout.responses])
    metrics = harness.update(worker, rollout, old, mini_batch_size=8, columns=columns, **extra)

    assert metrics["sis/active"] == [1.0]
    assert metrics["sis/tokens"] == metrics["sis/residual_mass/tokens"] == [256.0]
    assert metrics["sis/non_finite"] == [0.0]
    assert metrics["mismatch/k3"] == [0.0]
    ages = [metrics[f"sis/accept_rate_by_age/{age}"][0] for age in range(4)]
    # Before the first update the two policies are one; in fp32 every token of V_K is then accepted.
    if feature == "envelope rule":
        assert ages[0] == 1.0
    elif feature != "temperature":
        assert ages[0] == metrics["sis/in_topk_rate_by_age/0"][0]
    assert ages[0] >= max(ages[1:])
    if feature not in ("temperature", "envelope rule"):
        # E[z] = (1 - xi) / M^ needs samples of the old policy that have not themselves moved the current one: true of
        # one epoch, where each mini-batch meets a policy moved by other samples.
        assert abs(metrics["sis/kappa"][0] - 1.0) <= 4 * metrics["sis/kappa_se"][0] + 1e-5
    if feature == "exact envelope, K = V":
        assert metrics["sis/in_topk_rate"] == [1.0]
        assert metrics["sis/residual_mass/max"][0] < 1e-6
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics["grad_norm"])


def test_the_reference_pass_under_lora_is_not_captured(build):
    worker = build(**FEATURES["lora"])
    rollout = harness.made_up_rollout([3, 4, 2, 5])
    harness.old_pass(worker, rollout)
    before = dict(worker._store._samples)
    harness.old_pass(worker, rollout, no_lora_adapter=True)
    assert worker._store._samples == before


def test_no_autograd_graph_is_kept(build):
    worker = build()
    rollout = harness.made_up_rollout([3, 4, 2, 5])
    old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
    looked = []
    look = worker._update_pass._look

    def recording_look(logits, data):
        assert logits.values.requires_grad, "the live logits of the update"
        looked.append(look(logits, data))
        return looked[-1]

    worker._update_pass._look = recording_look
    harness.update(worker, rollout, old)
    assert looked
    assert not any(value.requires_grad for outputs in looked for value in outputs.values())


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_bfloat16_uses_its_own_normaliser(build, share):
    # Without flash-attention verl's log-probs of bfloat16 logits are bfloat16: the residual mass needs better.
    worker = build(dtype="bf16", learning_rate=1e-3, micro_batch_size=8, sis={"normalizer_share": share})
    rollout = harness.sampled_rollout(worker, 32, length=8)
    metrics = harness.step(worker, rollout, mini_batch_size=8)
    assert abs(metrics["sis/kappa"][0] - 1.0) <= 4 * metrics["sis/kappa_se"][0] + 0.02
    assert 0.0 < metrics["sis/residual_mass/mean"][0] < 1.0
    assert metrics["sis/tokens"] == [256.0]
    # The number of chosen tokens is binomial.
    deviation = metrics["sis/residual_mass/tokens"][0] - share * 256
    assert abs(deviation) <= 4 * (256 * share * (1 - share)) ** 0.5


def test_the_share_of_normalised_tokens_touches_nothing_else(build):
    rollout = harness.made_up_rollout([5, 1, 4, 7])

    def metrics_with(share, micro_batch_size):
        worker = build(dtype="bf16", micro_batch_size=micro_batch_size, sis={"normalizer_share": share})
        return {name: value for name, value in harness.step(worker, rollout).items() if name.startswith("sis/")}

    quarter, all_tokens = metrics_with(0.25, 4), metrics_with(1.0, 4)
    of_some = {name for name in quarter if name.startswith(("sis/residual_mass/", "sis/envelope/"))}
    assert {name: quarter[name] for name in quarter.keys() - of_some} == {
        name: all_tokens[name] for name in all_tokens.keys() - of_some
    }
    assert 0 < quarter["sis/residual_mass/tokens"][0] < all_tokens["sis/residual_mass/tokens"][0] == 17
    assert quarter["sis/residual_mass/max"][0] <= all_tokens["sis/residual_mass/max"][0]
    # The same tokens, however the batch is cut.
    assert metrics_with(0.25, 1)["sis/residual_mass/tokens"] == quarter["sis/residual_mass/tokens"]


def test_masked_tokens_do_not_count(build):
    rollout = harness.made_up_rollout([6, 6, 6, 6])
    rollout.masks = [torch.tensor([1, 1, 0, 0, 1, 0])] * 3 + [torch.zeros(6, dtype=torch.int64)]
    metrics = harness.step(build(), rollout)
    assert metrics["sis/tokens"] == [9.0]
    one = sum(float(value) for name, (value, *_) in metrics.items() if name == "sis/D")
    assert one == pytest.approx(0.0, abs=1e-4), "the first update finds the old policy itself"

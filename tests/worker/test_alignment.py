"""Each token is tested against its own top-K, in a real verl worker, whatever the batching."""

import pytest
import torch

from tests.worker import harness
from verl_sis.core.envelope import TopK
from verl_sis.errors import SisStateError


def reference_top_k(worker, sequence, length, k):
    """Top-K log-probs of one response from a forward pass on that row alone, in float64."""
    with torch.no_grad():
        logits = worker.engine.module.eval()(input_ids=sequence[None], use_cache=False).logits[0]
    return torch.log_softmax(logits[-length - 1 : -1].double(), dim=-1).topk(k, dim=-1)


@pytest.mark.parametrize("remove_padding", [True, False])
def test_rows_of_unequal_length_keep_their_own_top_k(build, remove_padding):
    # Public fault 65: with dynamic batching the released code tested a row against another row's columns. The budget
    # holds one row at a time, and verl sorts micro-batches by cost, so their order differs from the batch's.
    worker = build(sis={"top_k": 7}, max_tokens=12, model_overrides={"use_remove_padding": remove_padding})
    rollout = harness.made_up_rollout([5, 1, 4])
    output = harness.old_pass(worker, rollout)
    old = harness.response_log_probs(output, rollout).unbind()
    stored = list(worker._store._samples.values())
    assert sorted(len(sample.ids) for sample in stored) == [1, 4, 5]
    for row, (sequence, response) in enumerate(zip(rollout.sequences(), rollout.responses, strict=True)):
        sample = next(sample for sample in stored if len(sample.ids) == len(response))
        expected = reference_top_k(worker, sequence, len(response), 7)
        assert torch.equal(sample.ids.long(), expected.indices)
        torch.testing.assert_close(sample.log_prob.double(), expected.values, atol=2e-5, rtol=0)
        contained = (expected.indices == response[:, None]).any(-1)
        assert torch.equal(sample.contains_sampled, contained)
        own = sample.log_prob[sample.ids == response[:, None]]
        assert torch.equal(own, sample.sampled_log_prob[contained]), "bit-equal to its top-K entry"
        assert torch.equal(sample.sampled_log_prob, old[row]), "and to what the trainer got"


def test_nothing_of_the_top_k_leaves_the_worker(build):
    rollout = harness.made_up_rollout([5, 3, 4, 2])
    plain = harness.old_pass(build(sis=None), rollout)
    under_sis = harness.old_pass(build(), rollout)
    assert set(under_sis.keys()) == set(plain.keys())
    assert torch.equal(under_sis["log_probs"].values(), plain["log_probs"].values())


def test_memory_is_freed_after_the_update_and_replaced_by_the_next_old_pass(build):
    worker = build(micro_batch_size=2)
    first, second = harness.made_up_rollout([5, 3, 4, 2]), harness.made_up_rollout([2, 2], seed=1)
    harness.old_pass(worker, first)
    assert len(worker._store) == 4
    harness.step(worker, second)
    assert len(worker._store) == 0


def test_a_sample_without_top_k_is_named(build):
    worker = build()
    rollout = harness.made_up_rollout([5, 3, 4, 2])
    old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
    rollout.responses[2] = rollout.responses[2] + 1
    with pytest.raises(SisStateError, match=r"no top-K .* 1 of 4 samples .* row 2, key .*4 response tokens"):
        harness.update(worker, rollout, old)


def shuffled(store, rollout, *, with_own_log_prob):
    """Exchange the top-K columns of neighbouring rows of equal length."""
    keys = list(store._samples)
    samples = dict(store._samples)
    for row, (a, b) in enumerate(zip(keys, keys[1:] + keys[:1], strict=True)):
        own, other = samples[a], samples[b]
        contained = (other.ids == rollout.responses[row][:, None]).any(-1)
        sampled = own.sampled_log_prob if with_own_log_prob else other.sampled_log_prob
        store._samples[a] = TopK(other.ids, other.log_prob, sampled, contained)


def test_kappa_catches_a_planted_row_shuffle(build):
    # Acceptance alone hides it: the released rule showed 0.94 shuffled where the aligned value was 0.95.
    def kappa(planted):
        worker = build(learning_rate=1e-4)
        rollout = harness.sampled_rollout(worker, 128, length=12)
        old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
        if planted:
            shuffled(worker._store, rollout, with_own_log_prob=True)
        metrics = harness.update(worker, rollout, old)
        return metrics["sis/kappa"][0], metrics["sis/kappa_se"][0]

    aligned, aligned_se = kappa(planted=False)
    assert abs(aligned - 1.0) < 4 * aligned_se + 1e-6
    planted, planted_se = kappa(planted=True)
    assert planted < 0.7
    assert 1.0 - planted > 4 * planted_se


def test_a_shuffle_of_whole_rows_stops_the_run(build):
    worker = build()
    rollout = harness.sampled_rollout(worker, 8, length=12)
    old = harness.response_log_probs(harness.old_pass(worker, rollout), rollout)
    shuffled(worker._store, rollout, with_own_log_prob=False)
    with pytest.raises(SisStateError, match="top-K columns belong to other tokens"):
        harness.update(worker, rollout, old)

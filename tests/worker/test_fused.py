"""Fused kernels in a real worker: the numbers of the unfused one, whatever the layout."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from pyarrow import parquet
from torch.distributed.tensor import DTensor

from tests.worker import dumps, fused, harness, recorder, routes
from verl_sis.core.linear_head import LinearHead, old_rows
from verl_sis.errors import SisConfigError, SisStateError

TEMPERATURE = 0.7
IN_THE_ROOT_UNIT = {"override_config": {"attn_implementation": "sdpa", "tie_word_embeddings": True}}
"""FSDP2 shards the head of a model with tied embeddings together with the rest. These weights stay their own."""

LAYOUTS = {
    "packed, with a dump": {},
    "padded, gradient checkpointing, head in the root unit": {
        "model_overrides": {
            "use_remove_padding": False,
            "enable_gradient_checkpointing": True,
            **IN_THE_ROOT_UNIT,
        }
    },
    "dynamic micro-batches": {"max_tokens": 40},
}


@dataclass
class Run:
    """What one worker made of a rollout: two mini-batches of four micro-batches each."""

    rollout: harness.Rollout
    old: torch.Tensor
    decisions: recorder.Decisions
    metrics: dict[str, Any]
    weights: dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _forward_of_the_class():
    with fused.forward_restored():
        yield


@pytest.fixture
def build_fused(build):
    """Builds a worker with fused kernels."""

    def build_worker(**changes):
        return build(**{**changes, "model_overrides": {**fused.FUSED, **changes.get("model_overrides", {})}})

    return build_worker


def run(worker, rollout=None):
    decisions = recorder.record(worker)
    rollout = rollout or harness.sampled_rollout(worker, 16, length=8)
    settings = {"temperature": TEMPERATURE}
    old = harness.response_log_probs(harness.old_pass(worker, rollout, **settings), rollout)
    columns = {"rollout_log_probs": old}
    metrics = harness.update(worker, rollout, old, mini_batch_size=8, columns=columns, **settings)
    weights = {name: value.full_tensor().clone() for name, value in worker.engine.module.named_parameters()}
    return Run(rollout, old, decisions, metrics, weights)


def dumped(folder):
    return {"dump": {"every": 1, "directory": str(folder)}}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return tmp_path_factory.mktemp("unfused")


@pytest.fixture(scope="module")
def unfused(model_folder, dump):
    torch.manual_seed(0)
    return run(harness.build_worker(harness.Settings(model=model_folder, micro_batch_size=2, sis=dumped(dump))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_decisions_metrics_and_weights_as_unfused(build_fused, unfused, dump, tmp_path, layout):
    sis = dumped(tmp_path) if "dump" in layout else {}
    got = run(build_fused(**{"micro_batch_size": 2, "sis": sis, **LAYOUTS[layout]}), unfused.rollout)
    torch.testing.assert_close(got.old.values(), unfused.old.values(), rtol=0, atol=1e-5)
    recorder.assert_same_decisions(got.decisions, unfused.decisions)
    assert got.metrics.keys() == unfused.metrics.keys()
    # verl averages its own metrics over micro-batches without weights.
    own = () if "dynamic" in layout else ("actor/",)
    for name in [name for name in got.metrics if name.startswith(("sis/", "mismatch/", "grad_norm", *own))]:
        # fp32 forward passes of other shapes; AdamW amplifies that in the second mini-batch.
        assert got.metrics[name] == pytest.approx(unfused.metrics[name], rel=2e-5, abs=1e-6), name
    assert got.weights.keys() == unfused.weights.keys()
    for name, weight in unfused.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=2e-5, msg=name)
    if sis:
        expected, found = (dumps.columns_of(parquet.read_table(folder / "tokens")) for folder in (dump, tmp_path))
        assert found.keys() == expected.keys()
        # A token is accepted by its probability, which is compared.
        for name in expected.keys() - {"accepted"}:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=2e-5, err_msg=name)


def test_identities_hold_under_lora(build_fused, unfused):
    # A fresh adapter changes nothing, so the rollout of the model without it is one of this policy.
    adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    worker = build_fused(micro_batch_size=8, model_overrides=adapters)
    metrics = harness.step(worker, unfused.rollout, mini_batch_size=8)
    assert metrics["sis/tokens"] == metrics["sis/residual_mass/tokens"] == [128.0]
    assert metrics["sis/accept_rate_by_age/0"] == metrics["sis/in_topk_rate_by_age/0"], "one policy before any update"
    assert metrics["sis/D"][0] > 0.0
    assert abs(metrics["sis/kappa"][0] - 1.0) <= 4 * metrics["sis/kappa_se"][0] + 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampled_log_prob_is_that_of_verls_function(dtype):
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    generator = torch.Generator().manual_seed(0)
    kernel = FusedLinearForPPO()
    hidden, weight = (torch.randn(rows, 24, generator=generator).to(dtype) for rows in (kernel.chunk_size + 40, 97))
    labels = torch.randint(97, (len(hidden),), generator=generator)
    head = LinearHead(hidden, weight, TEMPERATURE, kernel.chunk_size)
    got = old_rows(head, [(0, len(labels))], labels, 3, normalize=True, chunk_tokens=64)
    theirs, _ = kernel(hidden, weight, labels, TEMPERATURE)
    # The same logits: one unit in the last place of a bfloat16 logit of 4 would be 0.03.
    torch.testing.assert_close(got.sampled_logit - got.log_normalizer, theirs, rtol=0, atol=5e-6)


def test_bfloat16_logits_in_a_worker_are_those_of_the_kernel(build_fused, monkeypatch):
    from verl_sis.integration import passes

    gaps = []
    monkeypatch.setattr(passes, "_check_same_policy", lambda own, kernel: gaps.append((own - kernel).abs().max()))
    worker = build_fused(dtype="bf16", micro_batch_size=2)
    rollout = harness.made_up_rollout([5, 1, 4, 7])
    metrics = harness.step(worker, rollout, temperature=TEMPERATURE)
    assert len(gaps) == 1, "of the first of two micro-batches"
    assert gaps[0] < 5e-6
    assert metrics["sis/residual_mass/tokens"] == [17.0], "of every token, not of a share"


def test_another_policy_than_the_kernels_stops_the_run(build_fused, monkeypatch):
    worker = build_fused()
    block = LinearHead.block
    monkeypatch.setattr(LinearHead, "block", lambda head, start, stop: block(head, start, stop) * 1.1)
    with pytest.raises(SisStateError, match=r"log-probs differ .* nats a token.*Type .*impl_backend=torch"):
        harness.old_pass(worker, harness.made_up_rollout([5, 1, 4, 7]))


def test_routing_replay_under_fused_kernels(build, build_fused):
    """Both frame the engine's forward pass."""
    unfused = build(replay={}, micro_batch_size=4)
    rollout = routes.native_routes(unfused, harness.made_up_rollout([5, 1, 4, 7, 3, 6, 2, 8]))
    rollout = routes.flipped(rollout, 0.3, experts=4)
    expected = harness.step(unfused, rollout)
    got = harness.step(build_fused(replay={}, micro_batch_size=4), rollout)
    names = [name for name in expected if name.startswith(("sis/", "routing/"))]
    assert expected["routing/disagreement"][0] > 0.1
    for name in names:
        assert got[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6, nan_ok=True), name


def test_what_verls_fused_forward_leaves_out_is_refused(build_fused):
    adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head"]}
    with pytest.raises(SisConfigError, match=r"an adapter or a bias there .* Keep lm_head out of .*target_modules"):
        build_fused(model_overrides={**adapters, **IN_THE_ROOT_UNIT})


def test_a_model_whose_forward_verl_did_not_replace_is_refused(build):
    options = {"use_fused_kernels": True, "fused_kernel_options": {}}
    with pytest.raises(SisConfigError, match=r"no module of FSDPQwen3MoeForCausalLM has it.*use_fused_kernels=False"):
        build(model_overrides=options)


def test_verl_alone_cannot_multiply_with_a_head_that_is_a_shard(build_fused):
    """Why the look gathers the head: verl 0.9.1 does not. When this fails, ``_Look.gather_head`` can go."""
    rollout = harness.made_up_rollout([5, 1, 4, 7])
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        harness.old_pass(build_fused(sis=None), rollout)


def test_nothing_is_left_between_forward_passes(build_fused):
    worker = build_fused()
    rollout = harness.made_up_rollout([5, 1, 4, 7])
    look = worker.engine.forward_step.__self__
    for run_pass in (harness.old_pass, harness.step):
        run_pass(worker, rollout)
        assert (look._loss, look._data, look._hidden, look._results) == (None, None, None, {})
        assert isinstance(worker.engine.module.lm_head.weight, DTensor), "sharded again"

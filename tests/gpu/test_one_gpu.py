"""SIS on one GPU, on both engines: kappa, one answer on every micro-batch size, step time, peak memory."""

import pytest
import torch

from tests.worker import harness, recorder

pytestmark = pytest.mark.gpu

SIS = {"top_k": 20}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.gpu import workers

    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    workers.prepare()
    folder = tmp_path_factory.mktemp("model")
    # bfloat16 kernels want heads of 64.
    return harness.build_model_folder(folder, hidden_size=256, layers=4, heads=4, experts=8, expert_size=128)


@pytest.fixture(scope="module")
def rollout(model):
    from tests.gpu import workers

    return workers.sampled_rollout(model)


@pytest.fixture(params=["fsdp2", "megatron"])
def build(request, model):
    from tests.gpu import workers

    if request.param == "megatron":
        pytest.importorskip("megatron.bridge", reason="Type: pip install megatron-bridge transformer-engine[pytorch]")
    return lambda sis, **settings: workers.BUILD[request.param](model, sis, **settings)


def test_kappa_is_one(build, rollout):
    """Responses were sampled from the old policy, so the observed rate of acceptance is the expected one."""
    from tests.gpu import workers

    metrics = workers.step(build(SIS), rollout)
    print({name: value for name, value in sorted(metrics.items()) if name.startswith(("sis/", "mismatch/"))})
    assert metrics["sis/non_finite"][0] == 0
    assert metrics["sis/in_topk_rate"][0] > 0.8
    assert abs(metrics["sis/kappa"][0] - 1.0) < 5 * metrics["sis/kappa_se"][0] + 0.01


def test_one_answer_on_every_micro_batch_size(build, rollout):
    """bfloat16 rounds otherwise in other shapes, so acceptance may differ there; uniforms may not."""
    from tests.gpu import workers

    found = []
    for size in (8, 32):
        worker = build(SIS, micro_batch_size=size)
        found.append(recorder.record(worker))
        workers.step(worker, rollout)
    recorder.assert_same_decisions(*found, borderline=0.05)


def test_cost(build, rollout):
    """Step time and peak memory beside verl alone; printed, and bounded generously: the model is tiny."""
    from tests.gpu import workers

    seconds, peak = {}, {}
    for name, sis in (("verl", None), ("SIS", SIS)):
        worker = build(sis)
        torch.cuda.reset_peak_memory_stats()
        seconds[name] = workers.median_seconds(worker, rollout)
        peak[name] = torch.cuda.max_memory_allocated()
        del worker
        torch.cuda.empty_cache()
    print(f"step {seconds}, ratio {seconds['SIS'] / seconds['verl']:.3f}; peak bytes {peak}")
    assert seconds["SIS"] < 2 * seconds["verl"]
    assert peak["SIS"] < 1.2 * peak["verl"] + 2**28

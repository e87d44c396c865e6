"""The sizes that the arithmetic starts from are those of the code that moves them, and it adds up by hand."""

import asyncio
import importlib
import inspect
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scale():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
        yield importlib.import_module("scale_on_paper")


async def nothing(*args, **kwargs):
    """What verl's rewards and teachers add to a trajectory here."""


def put_by_verl(monkeypatch, prompt, response, routes):
    """Bytes by column that verl's own agent loop worker puts into TransferQueue for one response."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker
    from verl.trainer.ppo.v1 import agent_loop_tq

    put = {}

    async def kept(keys, fields, tags, partition_id):
        put.update({name: value for name, value in fields.items() if isinstance(value, torch.Tensor)})

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", kept)
    worker = SimpleNamespace(
        _compute_score=nothing,
        _compute_teacher_logprobs=nothing,
        _compute_multi_modal_inputs=lambda *_: {},
        processor=None,
    )
    worker._compute_position_ids = AgentLoopWorker._compute_position_ids.__get__(worker)
    output = AgentLoopOutput(
        prompt_ids=[1] * prompt,
        response_ids=[2] * response,
        response_mask=[1] * response,
        response_logprobs=[-1.0] * response,
        routed_experts=torch.zeros(prompt + response - 1, *routes, dtype=torch.uint8).numpy() if routes else None,
        reward_score=1.0,
        metrics=AgentLoopMetrics(),
    )
    process = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess
    asyncio.run(process(worker, output, False, uid="u", session_id=0, global_steps=1))
    return {
        name: (value.values() if value.is_nested else value).nbytes for name, value in put.items() if value.numel() > 1
    }


def test_a_rollout_writes_what_verl_puts(scale, monkeypatch):
    """The difference of two lengths is the size per token, whatever a trajectory has besides."""
    base, longer_prompt, longer_response = (
        put_by_verl(monkeypatch, *lengths, None) for lengths in ((4, 6), (5, 6), (4, 7))
    )
    per_prompt = {name: size - base[name] for name, size in longer_prompt.items() if size != base[name]}
    per_response = {name: size - base[name] for name, size in longer_response.items() if size != base[name]}
    assert per_prompt == scale.PROMPT_TOKEN
    assert per_response == scale.RESPONSE_TOKEN


def test_routes_are_what_verl_puts(scale, monkeypatch):
    moe = scale.MOE
    routes = put_by_verl(monkeypatch, 4, 6, (moe.layers, moe.chosen))["routed_experts"]
    assert routes == (4 + 6) * moe.route_bytes
    assert moe.route_bytes == 768


def test_statistics_do_not_depend_on_k_and_are_as_large_as_said(scale):
    from verl_sis.core.statistics import PooledStatistics

    assert 0.9 * scale.STATISTICS < len(pickle.dumps(PooledStatistics())) <= scale.STATISTICS


def test_a_kept_entry_is_an_id_and_a_log_prob(scale):
    from verl_sis.core.envelope import select_top_k

    top_k = select_top_k(torch.randn(3, 50), torch.tensor([1, 2, 3]), 10, chunk_tokens=2)
    assert (top_k.ids.nbytes + top_k.log_prob.nbytes) == 3 * 10 * scale.TOP_K_ENTRY


@pytest.mark.parametrize("which", ["DENSE", "MOE"])
def test_parameters_are_those_of_transformers(scale, which):
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    model = getattr(scale, which)
    sizes = {
        "hidden_size": model.hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "tie_word_embeddings": False,
    }
    if model.experts:
        config = Qwen3MoeConfig(
            **sizes,
            num_experts=model.experts,
            num_experts_per_tok=model.chosen,
            moe_intermediate_size=model.intermediate,
        )
    else:
        config = Qwen3Config(**sizes, intermediate_size=model.intermediate)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    two_layers = sum(parameter.numel() for parameter in built.parameters())
    assert type(model)(**{**vars(model), "layers": 2}).parameters == two_layers
    per_layer = sum(parameter.numel() for parameter in built.model.layers[0].parameters())
    assert model.parameters == two_layers + (model.layers - 2) * per_layer


def test_the_driver_asks_for_these_columns():
    """Where the numbers of ``passes`` come from."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    asked = {
        "_compute_old_log_prob": ["entropy", "log_probs", "response_mask", "responses", "rollout_log_probs"],
        "_compute_ref_log_prob": ["log_probs", "response_mask"],
        "_compute_advantage": ["response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob"],
        "_compute_metrics": ["prompts", "responses", "response_mask", "advantages", "returns", "rm_scores"],
    }
    for method, columns in asked.items():
        source = inspect.getsource(getattr(PPOTrainer, method))
        for column in columns:
            assert f'"{column}"' in source, (method, column)


def test_a_step_of_two_responses_by_hand(scale):
    step = scale.Step(prompts=1, responses=2, prompt=1, response=2, updates=1, micro_batch=6)
    dense = scale.Model("d", layers=1, hidden=1, heads=1, kv_heads=1, intermediate=1, vocab=1, head_dim=1)
    # Rollout: 2 sequences of 24 + 2 * 48 = 120. Passes per sequence: old reads 120, writes 24; stored then
    # 120 + 12 + 16 = 148. The reference pass reads 148, writes 12; stored then 156. Advantages add 16: the update
    # reads 172.
    assert scale.through_transfer_queue(step, dense, replay=False) == {
        "rollout": 2 * 120,
        "workers": 2 * (120 + 24 + 148 + 12 + 172),
        # Reads 24 + 40, 12 + 16, 48, 8 + 56; writes 16, 8, 32.
        "driver": 2 * (64 + 28 + 48 + 64 + 16 + 8 + 32),
    }
    # q, k, v, o and two norms of heads: 6; MLP 3; two norms 2; embeddings 2 and a norm.
    assert dense.parameters == 6 + 3 + 2 + 3
    assert step.micro_batches(1) == 1
    assert scale.through_nccl(step, dense, 2) == {"gather": 4 * 2 * 14 * 7 / 8, "reduce": 4 * 14 * 7 / 8, "replicas": 7}
    assert scale.sis(step, 1, 10) == {"per token": 0, "received": 70_000, "kept": 160, "release": 480}


def test_the_step_is_that_of_the_recipe(scale):
    recipe = yaml.safe_load((ROOT / "recipes" / "math_qwen3_8b" / "recipe.yaml").read_text())
    staleness = yaml.safe_load((ROOT / "recipes" / "math_qwen3_8b" / "staleness" / "n8.yaml").read_text())
    actor = recipe["actor_rollout_ref"]["actor"]
    assert scale.Step() == scale.Step(
        prompts=staleness["data"]["train_batch_size"],
        responses=recipe["actor_rollout_ref"]["rollout"]["n"],
        prompt=recipe["data"]["max_prompt_length"],
        response=recipe["data"]["max_response_length"],
        updates=staleness["data"]["train_batch_size"] // actor["ppo_mini_batch_size"],
    )


def test_the_document_has_what_the_script_prints(scale):
    printed = CliRunner().invoke(scale.app, [], catch_exceptions=False).output
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    document = (ROOT / "docs" / "scale.md").read_text()
    assert len(cells) == 11 + 13
    for row in cells:
        assert "| " + " | ".join(row) + " |" in document
    assert re.search(r"15\.1 GB", document) and scale.written(scale.sis(scale.Step(), 1, 25)["release"]) == "15.1 GB"

"""The trainer of a study, by a real verl worker, against plain transformers on the same tokens."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker import harness
from verl_sis.study.collect.rollouts import Response
from verl_sis.study.collect.settings import CollectSettings, ModelFacts
from verl_sis.study.collect.trainer import Rank, Trainer

TEMPERATURE = 0.7
TOP_K = 5
LENGTHS = (5, 1, 9, 4)


def responses_of(model, routes):
    """Made-up responses with made-up top-K ids, and the routes of transformers' own routers."""
    rollout = harness.made_up_rollout(list(LENGTHS))
    generator = torch.Generator().manual_seed(3)
    found = []
    for prompt, ids, chosen in zip(rollout.prompts, rollout.responses, routes, strict=True):
        top = torch.stack([torch.randperm(90, generator=generator)[:TOP_K] for _ in ids]).int().numpy()
        found.append(
            Response(
                prompt=len(found),
                sample=0,
                prompt_ids=prompt.int().numpy(),
                ids=ids.int().numpy(),
                log_prob=np.zeros(len(ids), np.float32),
                top_ids=top,
                top_log_prob=np.zeros(top.shape, np.float32),
                routes=chosen,
            )
        )
    return found


def plain_forward(folder):
    """Log-probs at the response tokens, and routes, of each made-up sequence, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    chosen = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _module, _args, output, name=name: chosen.update({name: output[2]}))
    log_probs, routes = [], []
    for sequence, length in zip(harness.made_up_rollout(list(LENGTHS)).sequences(), LENGTHS, strict=True):
        with torch.no_grad():
            logits = model(input_ids=sequence[None]).logits[0] / TEMPERATURE
        log_probs.append(torch.log_softmax(logits, dim=-1)[-length - 1 : -1].numpy())
        layers = [chosen[name] for name in sorted(chosen)]
        routes.append(torch.stack(layers, dim=1)[:-1].to(torch.int16).numpy())
    return log_probs, routes


@pytest.fixture(scope="module")
def scored(model_folder):
    harness.prepare_environment()
    log_probs, routes = plain_forward(model_folder)
    responses = responses_of(model_folder, routes)
    settings = CollectSettings(
        model=str(model_folder),
        dtype="float32",
        attention="sdpa",
        temperature=TEMPERATURE,
        top_k=TOP_K,
        max_tokens=10,
        max_prompt_tokens=6,
        micro_batch_tokens=20,
    )
    facts = ModelFacts(vocabulary=102, sparse=True, layers=2)
    trainer = Trainer(settings, facts, Rank(0, 1, "127.0.0.1", harness.free_port()))
    assert trainer.layers == (0, 1)
    assert trainer.experts_per_token == 2
    right = trainer.score(responses)
    wrong = [Response(**{**vars(r), "routes": (r.routes + 1) % 4}) for r in responses]
    return responses, log_probs, right, trainer.score(wrong)


def test_scores_are_those_of_transformers(scored):
    """In whatever micro-batch a response was scored: tokens, top-K, temperature and entropy belong to it."""
    responses, log_probs, right, _ = scored
    for response, expected, item in zip(responses, log_probs, right, strict=True):
        at = np.arange(len(response.ids))
        for scores in (item.native, item.again, item.replay, item.precise):
            np.testing.assert_allclose(scores.log_prob, expected[at, response.ids], atol=1e-5)
        np.testing.assert_allclose(item.native.verl_log_prob, expected[at, response.ids], atol=1e-5)
        np.testing.assert_allclose(item.native.entropy, -(np.exp(expected) * expected).sum(axis=1), rtol=1e-5)
        np.testing.assert_array_equal(item.native.top_ids, np.argsort(-expected, axis=1)[:, :TOP_K])
        np.testing.assert_allclose(item.native.top_log_prob, -np.sort(-expected, axis=1)[:, :TOP_K], atol=1e-5)
        for scores, ids in (
            (item.native, response.top_ids),
            (item.replay, response.top_ids),
            (item.precise, response.top_ids),
            (item.again, item.native.top_ids),
        ):
            np.testing.assert_allclose(scores.queried, np.take_along_axis(expected, ids, axis=1), atol=1e-5)


def test_the_own_routes_replayed_are_the_native_pass(scored):
    _, _, right, _ = scored
    for item in right:
        np.testing.assert_array_equal(item.replay.log_prob, item.native.log_prob)
        assert (item.layer_overlap == 2).all()


def test_other_routes_are_replayed_and_counted(scored):
    responses, _, right, wrong = scored
    for response, own, other in zip(responses, right, wrong, strict=True):
        np.testing.assert_array_equal(other.native.log_prob, own.native.log_prob)
        assert np.abs(other.replay.log_prob - own.replay.log_prob).max() > 1e-3
        rows = response.routes[len(response.prompt_ids) - 1 :]
        shifted = (rows + 1) % 4
        common = (rows[..., :, None] == shifted[..., None, :]).any(axis=-1).sum(axis=-1)
        np.testing.assert_array_equal(other.layer_overlap, common)

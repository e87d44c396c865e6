"""The way through verl from engine to worker keeps each route at its token: truncation, turns, interruptions.

Only the engine's answers are made up (``Answers``): real engines cannot be told where to stop. Each row of routes names
its own position, and the version of the weights that computed it.
"""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput
from verl.workers.utils.padding import left_right_2_no_padding

from verl_sis.routing_replay.targets import checked_presence, routes_of

LAYERS = 2
EXPERTS = 2**14


def rows_of(count, version=0):
    """uint16 ``[count, LAYERS, 2]``: position, above a byte from row 12 on, and version."""
    position = np.arange(count)[:, None] * np.ones(LAYERS, dtype=int)
    return np.stack([20 * position + 16, 10_000 + version + 0 * position], axis=-1).astype(np.uint16)


def output(prompt, response, routes, mask=None):
    return AgentLoopOutput(
        prompt_ids=list(range(prompt)),
        response_ids=list(range(response)),
        response_mask=[1] * response if mask is None else mask,
        routed_experts=routes,
        metrics=AgentLoopMetrics(),
    ).as_dict()


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def presence(rows):
    """What the worker makes of the routes of several samples with these prompts and responses."""
    data = TensorDict(
        {
            "input_ids": nested([torch.cat([row["prompts"], row["responses"]]) for row in rows]),
            "responses": nested([row["responses"] for row in rows]),
            "response_mask": nested([row["response_mask"] for row in rows]),
            "routed_experts": nested([row["routed_experts"] for row in rows]),
        },
        batch_size=len(rows),
    )
    routes = routes_of(data, LAYERS, 2)
    columns = {layer: layer for layer in range(LAYERS)}
    return routes, checked_presence(routes, columns, EXPERTS, data)


def test_ids_above_a_byte_and_the_missing_last_row():
    row = output(5, 10, rows_of(14))
    assert row["routed_experts"].dtype == torch.int16
    routes, present = presence([row, output(3, 2, rows_of(4))])
    assert routes[13].tolist() == [[276, 10_000]] * LAYERS
    assert present.tolist() == [True] * 14 + [False] + [True] * 4 + [False]


def test_truncated_responses_lose_their_last_routes_only():
    """The agent loop cuts tokens to the response length, and routes to prompt + response length: one row more."""
    row = output(5, 4, rows_of(20)[: 5 + 4])
    routes, present = presence([row])
    assert routes[:, 0, 0].tolist() == [20 * position + 16 for position in range(9)]
    assert present.all()


def test_tool_text_after_the_last_turn_has_no_routes_and_bears_no_loss():
    row = output(5, 8, rows_of(5 + 6 - 1), mask=[1] * 6 + [0] * 2)
    _, present = presence([row])
    assert present.tolist() == [True] * 10 + [False] * 3


def test_a_row_between_turns_belongs_to_the_token_that_opens_the_next():
    """Turn 1 ends with its last token unfed; the engine's second answer holds that row, and those of the tool."""
    first, tool, second = 4, 3, 5
    whole = rows_of(5 + first + tool + second - 1)
    row = output(5, first + tool + second, whole, mask=[1] * first + [0] * tool + [1] * second)
    routes, present = presence([row])
    assert routes[5 + first - 1, 0, 0] == 20 * (5 + first - 1) + 16
    assert present[:-1].all()


class Answers:
    """Stands in for the engine: interrupted after given numbers of tokens, with newer weights at each resumption."""

    def __init__(self, *counts):
        self.counts = list(counts)
        self.version = 0

    async def generate(self, _client, request_id, *, prompt_ids, sampling_params, **_kwargs):
        count = self.counts.pop(0)
        # vLLM's abort without an output reports no routes at all.
        routes = rows_of(len(prompt_ids) + count - 1, self.version) if count else None
        answer = TokenOutput(
            token_ids=[100 + self.version] * count,
            log_probs=[-1.0] * count,
            routed_experts=routes,
            stop_reason="aborted" if self.counts else "completed",
            extra_fields={"global_steps": self.version},
        )
        self.version += 1
        return answer


@pytest.mark.parametrize(
    "counts", [(6,), (0, 6), (1, 5), (3, 3), (5, 1), (2, 0, 4), (0, 0, 6), (1, 1, 4)], ids=lambda counts: str(counts)
)
def test_interrupted_and_resumed(monkeypatch, counts):
    """Each token keeps the route of the weights that sampled it."""
    answers, prompt = Answers(*counts), 5

    async def no_time(_seconds):
        return None

    async def generate(client, request_id, **arguments):
        return await answers.generate(client, request_id, **arguments)

    monkeypatch.setattr(llm_server.LLMServerClient, "generate", generate)
    monkeypatch.setattr(llm_server.asyncio, "sleep", no_time)
    client = llm_server.FullyAsyncLLMServerClient(SimpleNamespace())
    result = asyncio.run(client.generate("id", prompt_ids=list(range(prompt)), sampling_params={}))
    total = sum(counts)
    assert result.routed_experts.shape == (prompt + total - 1, LAYERS, 2)
    routes, present = presence([output(prompt, total, result.routed_experts)])
    assert routes[:-1, 0, 0].tolist() == [20 * position + 16 for position in range(prompt + total - 1)]
    sampled_by = [version for version, count in enumerate(counts) for _ in range(count)]
    assert (routes[prompt - 1 : -1, 0, 1] - 10_000).tolist() == sampled_by
    assert present[:-1].all()


def test_the_legacy_trainers_padding_keeps_rows_at_their_tokens():
    """Prompts padded on the left, responses on the right; verl packs tokens and routes by the same indices."""
    prompts, responses, width = (3, 5), (6, 4), (6, 7)
    columns = {name: torch.zeros(2, sum(width), dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    routed = torch.zeros(2, sum(width), LAYERS, 2, dtype=torch.int16)
    for sample, (p, r) in enumerate(zip(prompts, responses, strict=True)):
        start, end = width[0] - p, width[0] + r
        columns["attention_mask"][sample, start:end] = 1
        columns["input_ids"][sample, start:end] = torch.arange(p + r) + 50 * sample
        routed[sample, start : end - 1] = torch.from_numpy(rows_of(p + r - 1, sample).astype(np.int16))
    mask = columns["attention_mask"][:, width[0] :].clone()
    data = TensorDict(
        {
            **columns,
            "position_ids": (columns["attention_mask"].cumsum(-1) - 1).clamp(min=0),
            "prompts": columns["input_ids"][:, : width[0]].clone(),
            "responses": columns["input_ids"][:, width[0] :].clone(),
            "response_mask": mask,
            "routed_experts": routed,
        },
        batch_size=2,
    )
    data = left_right_2_no_padding(data)
    routes = routes_of(data, LAYERS, 2)
    tokens = data["input_ids"].values().tolist()
    for token, row in zip(tokens, routes[:, 0].tolist(), strict=True):
        sample, position = divmod(token, 50)
        last = position == prompts[sample] + responses[sample] - 1
        assert row == ([0, 0] if last else [20 * position + 16, 10_000 + sample])
    present = checked_presence(routes, {0: 0, 1: 1}, EXPERTS, data)
    assert present.sum() == len(tokens) - 2

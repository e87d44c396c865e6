"""Client and tool against servers that fail: time is bounded, failures are seen and counted, nothing is made up."""

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, Response

from tests.search.serving import free_port, serving
from verl_sis.errors import RetrievalError, SisConfigError
from verl_sis.rewards.search import INVALID_CALLS, RETRIEVAL_FAILED
from verl_sis.search.client import ClientSettings, RetrievalClient, documents_of
from verl_sis.search.observation import observation
from verl_sis.search.tool import CALLS, FAILURES, REFUSALS, SCHEMA, SearchTool, split_settings

DOCUMENT = {"document": {"title": "T", "text": "t"}, "score": 0.5}


@pytest.fixture(scope="module")
def script():
    """What the server does with the next requests, and how many it has had."""
    return SimpleNamespace(answers=[], requests=0)


@pytest.fixture(scope="module")
def url(script):
    app = FastAPI()

    @app.post("/retrieve")
    async def retrieve():
        script.requests += 1
        status, body, seconds = script.answers.pop(0) if script.answers else (200, '{"result": []}', 0)
        await asyncio.sleep(seconds)
        return Response(body, status_code=status)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    with serving(app) as address:
        yield address


GOOD = (200, '{"result": [[{"document": {"title": "T", "text": "t"}, "score": 0.5}]]}', 0)
BROKEN = (500, "broken", 0)


def ask(url, script, answers, **settings):
    """The documents, and how many requests they took."""
    script.answers, script.requests = list(answers), 0
    client = RetrievalClient(ClientSettings(url, **{"backoff_seconds": 0.01, "attempts": 3, **settings}))
    return asyncio.run(client.retrieve("q", 3))


def test_a_server_that_recovers_is_asked_again(url, script):
    assert ask(url, script, [BROKEN, (200, "no json", 0), GOOD]) == [{"title": "T", "text": "t"}]
    assert script.requests == 3


@pytest.mark.parametrize(
    ("answers", "requests", "message"),
    [
        ([BROKEN] * 4, 3, "HTTPStatusError: Server error '500"),
        ([(422, "refused", 0)] * 2, 1, "HTTPStatusError: Client error '422"),
        ([(200, "no json", 0)] * 3, 3, "JSONDecodeError"),
        ([(200, "[]", 0)] * 3, 3, "expected .*document.*, found"),
    ],
)
def test_attempts_are_limited(url, script, answers, requests, message):
    with pytest.raises(RetrievalError, match=message):
        ask(url, script, answers)
    assert script.requests == requests


def test_a_slow_server_is_given_up(url, script):
    started = time.monotonic()
    with pytest.raises(RetrievalError, match="TimeoutError"):
        ask(url, script, [(*GOOD[:2], 5)] * 2, timeout_seconds=0.1, attempts=2)
    assert 0.2 <= time.monotonic() - started < 2


def test_waiting_for_a_turn_is_no_failure(url, script):
    """Four requests of 0.1 s, one at a time, within a limit of 0.25 s each."""
    script.answers, script.requests = [(*GOOD[:2], 0.1)] * 4, 0
    client = RetrievalClient(ClientSettings(url, timeout_seconds=0.25, attempts=1, concurrency=1))

    async def all_at_once():
        return await asyncio.gather(*(client.retrieve("q", 3) for _ in range(4)))

    assert asyncio.run(all_at_once()) == [[{"title": "T", "text": "t"}]] * 4
    assert script.requests == 4


@pytest.mark.parametrize("backoff", [{1: 0.5, 2: 1.0, 3: 2.0, 6: 16.0, 7: 30.0, 12: 30.0}])
def test_pauses_double_up_to_a_limit(backoff):
    client = RetrievalClient(ClientSettings("http://h:1"))
    assert {attempt: client._pause(attempt) for attempt in backoff} == backoff


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"result": []},
        {"result": [[DOCUMENT], [DOCUMENT]]},
        {"result": [[]]},
        {"result": [[DOCUMENT] * 4]},
        {"result": [["text"]]},
        {"result": [[{"document": None}]]},
        {"result": [[{"document": {"title": "T"}}]]},
        {"result": {"document": 1}},
    ],
)
def test_answers_of_another_shape_are_refused(answer):
    with pytest.raises(RetrievalError, match="expected"):
        documents_of(answer, 3)


def test_documents_with_contents_only():
    answer = {"result": [[{"document": {"id": 1, "contents": '"Some title"\nSome\ntext'}, "score": 1}]]}
    assert documents_of(answer, 1) == [{"title": "Some title", "text": "Some\ntext"}]


def test_the_tool_is_not_built_without_a_server():
    port, started = free_port(), time.monotonic()
    with pytest.raises(RetrievalError, match=f"http://127.0.0.1:{port}, but after 2 attempts: ConnectError") as error:
        SearchTool({"url": f"http://127.0.0.1:{port}", "attempts": 2, "backoff_seconds": 0.05}, None)
    assert "python -m verl_sis.search.server" in str(error.value)
    assert time.monotonic() - started < 3


def test_a_failure_is_an_observation_a_count_and_an_error_in_the_log(url, script, caplog):
    tool = SearchTool({"url": url, "attempts": 1, "max_calls": 9}, None)
    state = SimpleNamespace(extra_fields={"kept": 1})
    script.answers = [BROKEN, GOOD, BROKEN, BROKEN, BROKEN]
    with caplog.at_level(logging.ERROR, logger="verl_sis"):
        texts = [asyncio.run(tool.execute("id", {"query": "q"}, agent_data=state))[0].text for _ in range(5)]
    assert [text.startswith(RETRIEVAL_FAILED) for text in texts] == [True, False, True, True, True]
    assert texts[1] == "Doc 1 (Title: T) t"
    assert "500" in texts[0]
    assert (state.extra_fields[CALLS], state.extra_fields[FAILURES], state.extra_fields["kept"]) == (5, 4, 1)
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.args[:2] for record in errors] == [(1, 1), (2, 3), (4, 5)]


def test_more_searches_than_allowed_are_refused_without_asking(url, script):
    tool = SearchTool({"url": url, "attempts": 1, "max_calls": 2}, None)
    state = SimpleNamespace(extra_fields={})
    script.answers, script.requests = [GOOD] * 4, 0

    async def at_once():
        return await asyncio.gather(*(tool.execute("id", {"query": "q"}, agent_data=state) for _ in range(4)))

    texts = [response.text for response, _, _ in asyncio.run(at_once())]
    assert script.requests == 2
    assert texts[:2] == ["Doc 1 (Title: T) t"] * 2
    assert all(text.startswith("Search refused: at most 2") for text in texts[2:])
    assert (state.extra_fields[CALLS], state.extra_fields[REFUSALS]) == (2, 2)
    other = SimpleNamespace(extra_fields={})
    assert asyncio.run(tool.execute("id", {"query": "q"}, agent_data=other))[0].text == texts[0]


@pytest.mark.parametrize("parameters", [{}, {"query": 3}, {"query": " "}, "text", None])
def test_a_call_that_is_none_asks_nothing(url, script, parameters):
    tool, state = SearchTool({"url": url}, None), SimpleNamespace(extra_fields={})
    script.requests = 0
    response, _, metrics = asyncio.run(tool.execute("id", parameters, agent_data=state))
    assert response.text.startswith(INVALID_CALLS)
    assert script.requests == 0
    assert metrics == {REFUSALS: 1}
    assert (state.extra_fields[CALLS], state.extra_fields[REFUSALS]) == (0, 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "expected url"),
        ({"url": "http://h:1", "topk": 3}, r"\['topk'\] are unknown"),
        ({"url": "h:1"}, "http://HOST:PORT"),
        ({"url": "http://h:1", "attempts": 0}, "attempts to be at least 1, found 0"),
        ({"url": "http://h:1", "timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"url": "http://h:1", "max_calls": 0}, "max_calls of the search tool to be at least 1"),
        ({"url": "http://h:1", "max_tokens": 9}, "max_tokens and tokenizer together"),
        ({"url": "http://h:1", "passage_format": "{score}"}, "passage_format with {rank}"),
    ],
)
def test_wrong_settings_are_refused(config, message):
    with pytest.raises(SisConfigError, match=message):
        split_settings({"type": "native", **config})


def test_the_schema_is_what_verl_reads(url):
    tool = SearchTool({"url": url}, None)
    assert tool.name == "search"
    assert tool.tool_schema.model_dump(exclude_unset=True) == SCHEMA


def test_passages_are_numbered_from_one():
    documents = [{"title": "A {b}", "text": "x"}, {"title": "", "text": "{rank}"}]
    assert observation(documents) == "Doc 1 (Title: A {b}) x\nDoc 2 (Title: ) {rank}"

"""Encoder, index, server and tool with a real sentence encoder, which is loaded once."""

import asyncio
import copy
import json
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall
from verl.tools.tool_registry import initialize_tools_from_config

from tests.search.serving import free_port, serving
from verl_sis.cpu.facts import draw
from verl_sis.cpu.search_world import encoder_directory
from verl_sis.errors import RetrievalError, SisConfigError
from verl_sis.search import index as indexing
from verl_sis.search.commands import app
from verl_sis.search.encoder import PRESETS, Encoder, EncoderSettings
from verl_sis.search.index import PassageIndex
from verl_sis.search.manifest import MANIFEST, PASSAGES, VECTORS
from verl_sis.search.server import create_app
from verl_sis.search.tool import CALLS, CUTS, FAILURES, REFUSALS, SearchTool

TOOL_FILE = Path(__file__).parents[2] / "recipes" / "search_qwen3" / "tool" / "search.yaml"
FACTS = draw(67, random.Random(1))[:200]
TEXTS = [
    "A short one.",
    "Longer, of two clauses, and of " + "many words " * 40 + ".",
    "Medium length, no more.",
]


@pytest.fixture(scope="module")
def encoder():
    return Encoder(str(encoder_directory()), PRESETS["minilm"])


def other(encoder, **changes):
    """The same weights, used in another way."""
    found = copy.copy(encoder)
    found.settings = replace(encoder.settings, **changes)
    return found


@pytest.fixture(scope="module")
def directory(encoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    corpus = folder / "corpus.jsonl"
    rows = [{"id": f"f{row}", "title": fact.person, "text": fact.sentence} for row, fact in enumerate(FACTS)]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    indexing.build(corpus, folder / "index", encoder)
    return folder / "index"


@pytest.fixture(scope="module")
def index(directory, encoder):
    return PassageIndex(directory, encoder, checksums=True)


@pytest.fixture(scope="module")
def url(index):
    with serving(create_app(index)) as address:
        yield address


def alone(texts, pool):
    """One text at a time, unpadded, straight from transformers."""
    tokenizer = AutoTokenizer.from_pretrained(encoder_directory())
    model = AutoModel.from_pretrained(encoder_directory())
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        pooled = pool(hidden)
        rows.append(pooled / pooled.norm())
    return torch.stack(rows).numpy()


def test_embeddings_are_those_of_transformers(encoder):
    in_twos = copy.copy(encoder)
    in_twos.batch_size = 2
    expected = alone(TEXTS, lambda hidden: hidden.mean(0))
    np.testing.assert_allclose(in_twos.passages(TEXTS), expected, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    first = alone(TEXTS, lambda hidden: hidden[0])
    np.testing.assert_allclose(other(encoder, pooling="cls").queries(TEXTS), first, atol=2e-6)
    assert np.abs(first - expected).max() > 0.01


def test_prefixes_and_the_longest_text(encoder):
    prefixed = other(encoder, query_prefix="query: ", passage_prefix="passage: ")
    np.testing.assert_allclose(prefixed.queries(["a b"]), encoder.queries(["query: a b"]), atol=1e-6)
    np.testing.assert_allclose(prefixed.passages(["a b"]), encoder.passages(["passage: a b"]), atol=1e-6)
    # Three words between the two special tokens.
    np.testing.assert_allclose(
        other(encoder, max_tokens=5).queries(["one two three four five"]), encoder.queries(["one two three"]), atol=1e-6
    )


def test_an_embedding_that_is_not_finite_is_refused(encoder):
    faulty = copy.copy(encoder)
    faulty._forward = lambda texts: np.full((len(texts), encoder.dimension), np.nan, dtype=np.float32)
    with pytest.raises(RetrievalError, match="found 2 of 2 that are not"):
        faulty.queries(["a", "b"])


@pytest.fixture(scope="module")
def embedded(encoder):
    """Embeddings of all facts, as wiki-18 writes passages."""
    return encoder.passages([f'"{fact.person}"\n{fact.sentence}' for fact in FACTS])


def test_the_index_finds_what_brute_force_finds(index, encoder, embedded):
    questions = [fact.question for fact in FACTS[::20]]
    scores = encoder.queries(questions) @ embedded.T
    best = np.argsort(-scores, axis=1)[:, :5]
    found = index.search(questions, 5)
    assert [[hit.passage.id for hit in hits] for hits in found] == [[f"f{row}" for row in rows] for rows in best]
    found_scores = [[hit.score for hit in hits] for hits in found]
    np.testing.assert_allclose(found_scores, np.take_along_axis(scores, best, 1), atol=1e-5)


def test_questions_find_their_facts(index):
    """A random encoder would find 3 of 200: recall@3 of 0.015."""
    found = index.search([fact.question for fact in FACTS], 3)
    right = [fact.sentence in [hit.passage.text for hit in hits] for fact, hits in zip(FACTS, found, strict=True)]
    first = [fact.sentence == hits[0].passage.text for fact, hits in zip(FACTS, found, strict=True)]
    print(f"recall@3 {np.mean(right):.3f}, recall@1 {np.mean(first):.3f}")
    assert np.mean(right) >= 0.97
    assert np.mean(first) >= 0.90


def test_more_passages_than_there_are(index):
    (hits,) = index.search(["Who plays?"], 1000)
    assert len(hits) == len({hit.passage.id for hit in hits}) == len(FACTS)
    assert index.search([], 3) == []


def test_inverted_lists(directory, encoder, embedded, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join((directory.parent / "corpus.jsonl").read_text().splitlines(keepends=True)[:40]))
    indexing.build(corpus, tmp_path / "ivf", encoder, "IVF2,Flat")
    questions = [fact.question for fact in FACTS[:4]]
    best = np.argsort(-(encoder.queries(questions) @ embedded[:40].T), axis=1)[:, :3]
    everywhere = PassageIndex(tmp_path / "ivf", encoder, probes=2).search(questions, 3)
    assert [[hit.passage.id for hit in hits] for hits in everywhere] == [[f"f{row}" for row in rows] for rows in best]
    # One list of two holds fewer than all passages: FAISS's filling must not show.
    (few,) = PassageIndex(tmp_path / "ivf", encoder, probes=1).search(questions[:1], 40)
    assert 0 < len(few) < 40
    with pytest.raises(SisConfigError, match="probes=4, found Flat"):
        PassageIndex(directory, encoder, probes=4)


def test_what_cannot_be_built_is_refused_and_leaves_nothing(directory, encoder, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"id": 1, "text": "one"}\n{"id": 2}\n')
    with pytest.raises(RetrievalError, match=r"corpus.jsonl:2: expected an object"):
        indexing.build(corpus, tmp_path / "index", encoder)
    with pytest.raises(SisConfigError, match="found 'Flatt'"):
        indexing.build(corpus, tmp_path / "index", encoder, "Flatt")
    corpus.write_text('{"id": 1, "text": "one"}\n')
    with pytest.raises(SisConfigError, match="FAISS cannot train"):
        indexing.build(corpus, tmp_path / "index", encoder, "IVF4,Flat")
    corpus.write_text("\n")
    with pytest.raises(RetrievalError, match="expected passages, found none"):
        indexing.build(corpus, tmp_path / "index", encoder)
    with pytest.raises(SisConfigError, match="expected a new directory"):
        indexing.build(corpus, directory, encoder)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def cut_off(folder):
    with (folder / PASSAGES).open("r+b") as stream:
        stream.truncate(1000)


def change_a_byte(folder):
    with (folder / VECTORS).open("r+b") as stream:
        stream.seek(5000)
        stream.write(bytes([stream.read(1)[0] ^ 1]))


def change_format(folder):
    row = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**row, "format": 99}))


def change_count(folder):
    row = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**row, "passages": 199}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"passages.arrow: expected \d+ bytes, found 1000 bytes"),
        (lambda folder: (folder / VECTORS).unlink(), r"vectors.faiss: expected \d+ bytes, found none"),
        (change_a_byte, "checksum is not the manifest's"),
        (change_format, "expected format 1, found 99"),
        (change_count, "expected 199 passages and as many vectors, found 200 and 200"),
        (lambda folder: (folder / MANIFEST).unlink(), "verl-sis search index CORPUS"),
    ],
)
def test_a_damaged_index_is_refused(directory, encoder, tmp_path, damage, message):
    copied = shutil.copytree(directory, tmp_path / "index")
    PassageIndex(copied, encoder, checksums=True)
    damage(copied)
    with pytest.raises(RetrievalError, match=message):
        PassageIndex(copied, encoder, checksums=True)


def test_an_index_of_another_encoder_is_refused(directory, encoder):
    for changes in ({"query_prefix": "query: "}, {"pooling": "cls"}, {"max_tokens": 128}):
        with pytest.raises(RetrievalError, match="was built by another encoder: expected EncoderSettings"):
            PassageIndex(directory, other(encoder, **changes))
    weights = copy.copy(encoder)
    weights._network = copy.deepcopy(encoder._network)
    with torch.no_grad():
        for parameter in weights._network.encoder.layer[-1].parameters():
            parameter.mul_(1.3)
    with pytest.raises(RetrievalError, match="built by other weights"):
        PassageIndex(directory, weights)
    half = copy.copy(encoder)
    half._network = copy.deepcopy(encoder._network).bfloat16()
    PassageIndex(directory, half)


def test_settings_of_an_encoder():
    with pytest.raises(SisConfigError, match="found 'int8'"):
        Encoder("anything", PRESETS["e5"], dtype="int8")
    with pytest.raises(SisConfigError, match="found 'max'"):
        EncoderSettings(pooling="max")
    with pytest.raises(SisConfigError, match="at least 3"):
        EncoderSettings(max_tokens=2)
    with pytest.raises(RetrievalError, match="--encoder DIR"):
        Encoder("/no/such/encoder", PRESETS["e5"])


def test_the_server_answers_like_the_index(url, index):
    questions = [fact.question for fact in FACTS[:4]]
    answer = httpx.post(f"{url}/retrieve", json={"queries": questions, "top_k": 2}).raise_for_status().json()
    for hits, found in zip(index.search(questions, 2), answer["result"], strict=True):
        assert len(found) == 2
        for hit, row in zip(hits, found, strict=True):
            assert row["score"] == pytest.approx(hit.score, abs=1e-5)
            passage = hit.passage
            assert row["document"] == {
                "id": passage.id,
                "title": passage.title,
                "text": passage.text,
                "contents": f'"{passage.title}"\n{passage.text}',
            }
    bare = httpx.post(f"{url}/retrieve", json={"queries": questions, "topk": 1, "return_scores": False}).json()
    assert bare["result"] == [[found[0]["document"]] for found in answer["result"]]
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["passages"], health["dimension"]) == ("ok", 200, 384)


def test_requests_at_once_are_answered_like_one_by_one(url, index):
    """They share batches of the encoder, whatever their top_k."""
    with httpx.Client() as client, ThreadPoolExecutor(16) as pool:

        def ask(number):
            body = {"queries": [FACTS[number].question], "top_k": 1 + number % 3}
            return client.post(f"{url}/retrieve", json=body).json()["result"][0]

        answers = list(pool.map(ask, range(24)))
    alone = index.search([FACTS[number].question for number in range(24)], 3)
    for number, (answer, hits) in enumerate(zip(answers, alone, strict=True)):
        assert [row["document"]["id"] for row in answer] == [hit.passage.id for hit in hits[: 1 + number % 3]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"queries": []}, "at least 1 item"),
        ({"queries": ["  "]}, "at least 1 character"),
        ({"queries": "text"}, "valid list"),
        ({"queries": ["a"], "top_k": 0}, "greater than or equal to 1"),
        ({"queries": ["a"], "top_k": 101}, "less than or equal to 100"),
        ({"queries": ["a"], "top_n": 1}, "Extra inputs"),
        ({}, "Field required"),
    ],
)
def test_the_server_says_what_is_wrong_with_a_request(url, body, said):
    response = httpx.post(f"{url}/retrieve", json=body)
    assert response.status_code == 422
    assert said in response.text


def test_from_a_corpus_to_an_answer_on_the_command_line(url, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("verl_sis.search.encoder.Encoder", lambda *_: encoder)
    (tmp_path / "corpus.jsonl").write_text('{"id": 1, "text": "one"}\n{"id": 2, "text": "two"}\n')
    arguments = ["index", tmp_path / "corpus.jsonl", "--encoder", "shared", "--out", tmp_path / "index"]
    result = CliRunner().invoke(app, [*map(str, arguments), "--preset", "minilm"])
    assert result.exit_code == 0, result.output
    assert "2 passages, dimension 384, Flat" in result.output
    assert len(PassageIndex(tmp_path / "index", encoder)) == 2
    again = CliRunner().invoke(app, [*map(str, arguments), "--preset", "minilm"])
    assert again.exit_code == 1
    assert "Error: expected a new directory" in again.output
    answer = CliRunner().invoke(app, ["query", FACTS[0].question, "--url", url, "--top-k", "1"])
    assert answer.output == f"1. {FACTS[0].person}: {FACTS[0].sentence}\n"
    dead = CliRunner().invoke(app, ["query", "q", "--url", f"http://127.0.0.1:{free_port()}"])
    assert dead.exit_code == 1
    assert "ConnectError" in dead.output


def test_verl_builds_and_calls_the_recipes_tool(url, index, monkeypatch):
    """Through verl's registry and its agent loop's dispatch, from the recipe's own file."""
    monkeypatch.setenv("SEARCH_SERVER", url)
    monkeypatch.setenv("SEARCH_TOKENIZER", str(encoder_directory()))
    (tool,) = initialize_tools_from_config(str(TOOL_FILE))
    assert (tool.settings.top_k, tool.settings.max_calls, tool.settings.max_tokens) == (3, 2, 1024)
    loop = SimpleNamespace(tools={"search": tool}, max_tool_response_length=65536, tool_response_truncate_side="right")
    state = trajectory()
    call = FunctionCall(name="search", arguments=json.dumps({"query": FACTS[0].question}))
    calls = [asyncio.run(ToolAgentLoop._call_tool(loop, call, {}, state))[0].text for _ in range(3)]
    (hits,) = index.search([FACTS[0].question], 3)
    assert calls[0] == calls[1]
    assert [hit.passage.text in calls[0] for hit in hits] == [True] * 3
    assert calls[2].startswith("Search refused: at most 2")
    assert state.extra_fields == {CALLS: 2, FAILURES: 0, REFUSALS: 1, CUTS: 0}


def trajectory():
    return SimpleNamespace(extra_fields={})


def search(tool, query, agent_data):
    response, reward, metrics = asyncio.run(tool.execute("id", {"query": query}, agent_data=agent_data))
    assert reward == 0.0
    return response.text, metrics


def test_the_tool_writes_the_passages(url, index):
    tool, state = SearchTool({"type": "native", "url": url, "attempts": 1}, None), trajectory()
    text, metrics = search(tool, FACTS[0].question, state)
    hits = index.search([FACTS[0].question], 3)[0]
    assert text == "\n".join(
        f"Doc {rank} (Title: {hit.passage.title}) {hit.passage.text}" for rank, hit in enumerate(hits, start=1)
    )
    assert metrics == {CUTS: 0}
    assert state.extra_fields == {CALLS: 1, FAILURES: 0, REFUSALS: 0, CUTS: 0}


def test_the_tool_keeps_to_the_limit_of_tokens(url):
    config = {"url": url, "max_tokens": 20, "tokenizer": str(encoder_directory())}
    whole, _ = search(SearchTool({"url": url}, None), FACTS[0].question, trajectory())
    state = trajectory()
    text, _ = search(SearchTool(config, None), FACTS[0].question, state)
    tokens = AutoTokenizer.from_pretrained(encoder_directory())(text, add_special_tokens=False)["input_ids"]
    assert whole.startswith(text)
    assert len(tokens) == 20
    assert state.extra_fields[CUTS] == 1

"""Before any engine starts: prompts, settings, resuming, files of rollouts, and the rows that scores become."""

import json
import math

import numpy as np
import pandas
import pytest

from verl_sis.cpu.tiny_model import build_tokenizer
from verl_sis.errors import SisConfigError, StudyFileError
from verl_sis.study.collect.prompts import read_prompts
from verl_sis.study.collect.rollouts import Response, read_responses, write_responses
from verl_sis.study.collect.rows import context_columns, token_columns
from verl_sis.study.collect.run import Collection, collect
from verl_sis.study.collect.scoring import Scores
from verl_sis.study.collect.settings import CollectSettings, ModelFacts
from verl_sis.study.collect.trainer import ScoredResponse


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path, tokenizer, limit=None, max_tokens=100):
    return read_prompts(path, tokenizer, limit=limit, max_tokens=max_tokens)


def test_the_three_kinds_of_prompts(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "1+2"}]
    path = jsonl(tmp_path / "p.jsonl", {"prompt": "ab"}, {"messages": chat}, {"prompt_token_ids": [7, 8, 9]}, "cd")
    text, conversation, ids, bare = read(path, tokenizer)
    assert text == tokenizer.encode("ab")
    assert tokenizer.decode(conversation) == "<|user|>1+2<|assistant|>"
    assert ids == [7, 8, 9]
    assert bare == tokenizer.encode("cd")


def test_parquet_is_read_like_jsonl(tmp_path, tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}+1"}], "reward_model": {"ground_truth": "x"}} for n in range(5)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "p.parquet")
    assert read(tmp_path / "p.parquet", tokenizer) == read(jsonl(tmp_path / "p.jsonl", *rows), tokenizer)
    assert len(read(tmp_path / "p.parquet", tokenizer, limit=2)) == 2


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        ({"prompt": "a", "temperature": 0.7}, SisConfigError, "row 1 asks for a sampling of its own \\(temperature\\)"),
        ({"prompt": "a", "top_p": 0.9, "top_k": 5}, SisConfigError, "\\(top_k, top_p\\)"),
        ({"question": "a"}, StudyFileError, "none of the columns prompt, messages, text, prompt_token_ids"),
        ({"prompt": ""}, StudyFileError, "expected a text, a list of messages"),
        ({"prompt": [{"role": "user"}]}, StudyFileError, "expected a text, a list of messages"),
        ({"prompt": [1, "a"]}, StudyFileError, "expected a text, a list of messages"),
        ({"prompt": "a" * 101}, SisConfigError, "has 101 tokens, more than --max-prompt-tokens 100"),
    ],
)
def test_rows_that_are_refused(tmp_path, tokenizer, row, error, message):
    with pytest.raises(error, match=message):
        read(jsonl(tmp_path / "p.jsonl", row), tokenizer)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"pro', "line 2 is not JSON"),
        ("p.jsonl", "", "holds no prompts"),
        ("p.txt", "a", r"\.jsonl or \.parquet"),
        ("p.parquet", "half", "not a complete parquet file"),
    ],
)
def test_files_that_are_refused(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(StudyFileError, match=message):
        read(tmp_path / name, tokenizer)
    with pytest.raises(StudyFileError, match="found none"):
        read(tmp_path / "missing.jsonl", tokenizer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "--temperature must be above 0"),
        ({"temperature": math.nan}, "--temperature must be above 0"),
        ({"samples": 0}, "--samples must be at least 1"),
        ({"dtype": "int8"}, "--dtype must be one of bfloat16"),
        ({"engine": {"override_generation_config": {"top_p": 0.9}}}, "sampling filters of its own"),
        ({"engine": {"speculative_config": {}}}, "drafted tokens"),
        ({"engine": {"logits_processors": []}}, "change the distribution"),
        ({"engine": {"logprobs_mode": "raw_logprobs"}}, "processed_logprobs"),
    ],
)
def test_settings_that_would_bias_a_study(change, message):
    with pytest.raises(SisConfigError, match=message):
        CollectSettings(**{"model": "m", **change})


def test_the_grid_of_k():
    assert CollectSettings("m", top_k=50).ks == (1, 2, 5, 10, 20, 50)
    assert CollectSettings("m", top_k=7).ks == (1, 2, 5, 7)
    assert CollectSettings("m", top_k=1).ks == (1,)


def test_a_study_goes_on_only_as_it_began(tmp_path):
    settings, prompts = CollectSettings("m", shard_prompts=2), [[1], [2], [3]]
    assert [len(shard) for shard in Collection(settings, prompts, tmp_path / "s").shards] == [2, 1]
    Collection(settings, prompts, tmp_path / "s")
    with pytest.raises(SisConfigError, match=r"temperature: 1\.0 there, 0\.9 now"):
        Collection(CollectSettings("m", shard_prompts=2, temperature=0.9), prompts, tmp_path / "s")
    with pytest.raises(SisConfigError, match="other prompts"):
        Collection(settings, [[1], [2]], tmp_path / "s")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(SisConfigError, match="not empty and holds no study"):
        Collection(settings, prompts, tmp_path / "other")


@pytest.mark.parametrize(
    ("workers", "tensor_parallel", "message"),
    [
        (3, 2, "multiple of --tensor-parallel"),
        (0, 1, "multiple"),
        (1, 1, "--top-k 50 is larger than the vocabulary of 40"),
    ],
)
def test_what_cannot_be_collected(tmp_path, workers, tensor_parallel, message):
    collection = Collection(CollectSettings("m"), [[1]], tmp_path / "s")
    facts = ModelFacts(vocabulary=40, sparse=False, layers=1)
    with pytest.raises(SisConfigError, match=message):
        collect(collection, facts, workers=workers, tensor_parallel=tensor_parallel, progress=lambda *_: None)


def test_a_complete_study_starts_no_engine(tmp_path):
    collection = Collection(CollectSettings("m"), [[1]], tmp_path / "s")
    collection.token_file(0).parent.mkdir()
    collection.token_file(0).touch()
    told = []
    facts = ModelFacts(vocabulary=100, sparse=False, layers=1)
    collect(collection, facts, workers=1, tensor_parallel=1, progress=lambda *state: told.append(state))
    assert told == [("rollouts", 1, 1), ("scores", 1, 1)]


def response(routes=True, prompt=3, sample=1):
    """Two tokens; the engine's top-3 of a vocabulary of 10, the second token outside of them."""
    return Response(
        prompt=prompt,
        sample=sample,
        prompt_ids=np.array([4, 5], np.int32),
        ids=np.array([7, 9], np.int32),
        log_prob=np.log(np.array([0.2, 0.01], np.float32)),
        top_ids=np.array([[6, 7, 8], [1, 2, 3]], np.int32),
        top_log_prob=np.log(np.array([[0.5, 0.2, 0.1], [0.6, 0.2, 0.0]], np.float32)),
        routes=np.arange(3 * 2 * 2, dtype=np.int16).reshape(3, 2, 2) if routes else None,
    )


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("routes", [True, False])
def test_responses_come_back_from_their_file(tmp_path, routes):
    written = [response(routes), response(routes, prompt=4)]
    write_responses(tmp_path / "r.parquet", written)
    for before, after in zip(written, read_responses(tmp_path / "r.parquet"), strict=True):
        assert (after.prompt, after.sample) == (before.prompt, before.sample)
        for name in ("prompt_ids", "ids", "log_prob", "top_ids", "top_log_prob"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name), err_msg=name)
        assert (after.routes is None) == (not routes)
        if routes:
            np.testing.assert_array_equal(after.routes, before.routes)
    (tmp_path / "r.parquet").write_bytes((tmp_path / "r.parquet").read_bytes()[:-9])
    with pytest.raises(StudyFileError, match="Delete it and resume"):
        read_responses(tmp_path / "r.parquet")


def scores(log_prob, queried, top=None):
    own = (None, None) if top is None else (np.array(top[0], np.int32), np.log(np.array(top[1], np.float32)))
    values = np.log(np.array(log_prob, np.float32))
    return Scores(values, values, np.array([1.0, 2.0], np.float32), np.log(np.array(queried, np.float32)), *own)


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_rows_by_hand():
    settings = CollectSettings("m", samples=2, top_k=3, contexts=1)
    native = scores(
        [0.3, 0.02],
        [[0.4, 0.3, 0.1], [0.6, 0.1, 0.1]],
        top=([[6, 7, 8], [1, 9, 2]], [[0.4, 0.3, 0.1], [0.6, 0.02, 0.01]]),
    )
    again = scores([0.3, 0.02], [[0.4, 0.3, 0.1], [0.6, 0.02, 0.01]])
    item = ScoredResponse(response(), native, again, None, None, np.array([[2, 1], [2, 2]], np.uint8))
    columns = token_columns([item], settings)
    assert columns["sequence"].tolist() == [7, 7]
    assert columns["position"].tolist() == [0, 1]
    assert columns["rollout_rank"].tolist() == [1, -1]
    assert columns["native_rank"].tolist() == [1, 1]
    # Token 7 of [6, 7, 8]: w = 0.4/0.5, 0.3/0.2, 0.1/0.1; M^ = 0.8, 1.5, 1.5 at K = 1, 2, 3; a = 0, 1, 1.
    np.testing.assert_allclose(columns["engine_log_envelope"][0], np.log([0.8, 1.5, 1.5]), rtol=1e-5)
    np.testing.assert_allclose(columns["engine_acceptance"][0], [0.0, 1.0, 1.0], rtol=1e-5)
    np.testing.assert_allclose(columns["engine_residual_mass"][0], [0.6, 0.3, 0.2], rtol=1e-5)
    # Token 9 is outside; the engine had filtered its third entry, which is in no V_K.
    assert columns["engine_acceptance"][1].tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(columns["engine_residual_mass"][1], [0.4, 0.3, 0.3], rtol=1e-5)
    assert columns["rollout_filtered"].tolist() == [0, 1]
    np.testing.assert_allclose(columns["rollout_mass"], [[0.5, 0.7, 0.8], [0.6, 0.8, 0.8]], rtol=1e-6)
    np.testing.assert_allclose(columns["rollout_mass_before"], [0.5, 0.8], rtol=1e-6)
    x, y = np.log([0.6, 0.1]), np.log([0.6, 0.2])
    dx, dy = x - x.mean(), y - y.mean()
    np.testing.assert_allclose(columns["engine_moments"][1], [dx @ dx, dx @ dy, dy @ dy], rtol=1e-5)
    # Two passes of the trainer that agree accept whatever is in the top-K.
    np.testing.assert_allclose(columns["floor_acceptance"], [[0, 1, 1], [0, 1, 1]], atol=1e-6)
    assert columns["layer_overlap"].tolist() == [[2, 1], [2, 2]]
    assert not {"replay_log_prob", "precise_log_prob"} & set(columns)
    contexts = context_columns([item], settings, seed=0)
    assert set(contexts) == {"engine", "floor"}
    assert len(contexts["engine"]["ids"]) == 1

"""``verl-sis data search``: what is written from small files of the public schema, and what is refused."""

import json

import pytest

from tests.data import public_files as public
from verl_sis.data.search import SYSTEM_PROMPT, TEST_QUESTIONS, TRAIN_QUESTIONS, write_search
from verl_sis.errors import DataSetError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("search")
    write_search(root / "data", source=public.search_files(root / "public"), allow_count=True)
    return root / "data"


def test_training_rows(written):
    rows = public.read(written / "train.parquet")
    assert rows[0] == {
        "data_source": "nq",
        "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "who sang help?"}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["The Beatles", "Beatles"]}},
        "extra_info": {"split": "train", "index": 0, "id": "train_0"},
        "agent_name": "tool_agent",
    }
    assert [row["data_source"] for row in rows] == ["nq", "nq", "hotpotqa"]
    assert rows[1]["prompt"][1]["content"] == "Where is Łódź?"


def test_a_file_for_each_test_set(written):
    files = {path.stem for path in written.glob("*.parquet")}
    assert files == {"train", "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"}
    rows = public.read(written / "musique.parquet")
    assert [row["prompt"][1]["content"] for row in rows] == ["question 0 of musique?", "question 1 of musique?"]
    assert [row["extra_info"] for row in rows] == [
        {"split": "test", "index": 0, "id": "test_0"},
        {"split": "test", "index": 1, "id": "test_1"},
    ]
    assert {row["data_source"] for row in rows} == {"musique"}


def test_manifest(written):
    manifest = json.loads((written / "manifest.json").read_text())
    assert manifest["counts"]["train"] == {
        "nq": {"expected": 79168, "found": 2},
        "hotpotqa": {"expected": 90447, "found": 1},
    }
    assert manifest["counts"]["test"]["nq"] == {"expected": 3610, "found": 3}
    assert manifest["train_and_test_share"] == {
        **{name: [] for name in TEST_QUESTIONS},
        "nq": [["nq/train_0", "nq/test_2"]],
    }
    assert [each["rows"] for each in manifest["outputs"]] == [3, 3, 2, 2, 2, 2, 2, 2]


def test_shared_questions_can_be_left_out(tmp_path):
    files = public.search_files(tmp_path / "files")
    write_search(tmp_path / "out", source=files, allow_count=True, drop_overlap=True)
    # The question of HotpotQA has the same id as the one that is left out.
    ids = [(row["data_source"], row["extra_info"]["id"]) for row in public.read(tmp_path / "out" / "train.parquet")]
    assert ids == [("nq", "train_1"), ("hotpotqa", "train_0")]


def test_numbers_of_the_public_files():
    assert sum(TRAIN_QUESTIONS.values()) == 169_615
    assert sum(TEST_QUESTIONS.values()) == 51_713


@pytest.mark.parametrize(
    ("changed", "allow", "message"),
    [
        ({}, False, "training questions of nq: expected 79,168, found 2"),
        ({"train": [public.question("train_0", "Who?", [], "nq")]}, True, "row 1 .train_0.: expected a list of golden"),
        ({"train": [public.question("train_0", "Who?", ["", " "], "nq")]}, True, "expected a list of golden answers"),
        ({"train": [public.question("train_0", " ", ["x"], "nq")]}, True, "row 1 .train_0.: no question"),
        ({"train": public.SEARCH_TRAIN[:2]}, True, "hotpotqa: expected 90,447, found 0"),
        ({"test": [public.question("test_0", "Who?", ["x"], "triviaqua")]}, True, "found also triviaqua"),
        ({"test": [{"question": "Who?"}]}, True, "expected the columns id, question, golden_answers, data_source"),
    ],
)
def test_refusals(tmp_path, changed, allow, message):
    files = public.search_files(tmp_path / "files", **changed)
    with pytest.raises(DataSetError, match=message):
        write_search(tmp_path / "out", source=files, allow_count=allow)
    assert list(tmp_path.iterdir()) == [files]

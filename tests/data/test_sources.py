"""Files of the hub and local files: found, named, checked; and what to type where that fails."""

import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.data import public_files as public
from verl_sis.data.problems import DAPO, EVALUATIONS
from verl_sis.data.sources import Input, Source, at_revisions, locate, read_rows
from verl_sis.errors import DataSetError

AIME25 = EVALUATIONS[3].source
OTHER = "0" * 40


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty cache of the hub's client, which has no network here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub_cache: Path, source: Source) -> Path:
    """Where the hub's client keeps a file."""
    path = hub_cache / f"datasets--{source.hub_id.replace('/', '--')}" / "snapshots" / source.revision / source.file
    path.parent.mkdir(parents=True)
    return path


def test_offline_the_error_says_what_to_type(hub_cache):
    with pytest.raises(DataSetError) as raised:
        locate(DAPO, None)
    assert (
        "hf download BytedTsinghua-SIA/DAPO-Math-17k data/dapo-math-17k.parquet --repo-type dataset --revision "
        "65877096c24ffa7abc4e4fa5edb95cf3413a5674 --local-dir 'DIR' && "
        "mv 'DIR/data/dapo-math-17k.parquet' 'DIR/dapo_math_17k.parquet'"
    ) in str(raised.value)


def test_a_file_of_the_hub(hub_cache):
    """Through the hub's client and its cache."""
    (source,) = at_revisions((AIME25,), [f"aime25={OTHER}"])
    path = cached(hub_cache, source)
    path.write_text("x")
    found = locate(source, None)
    assert found.path == path
    assert found.facts() == {
        "name": "aime25",
        "hub_id": "math-ai/aime25",
        "revision": OTHER,
        "file": "test.jsonl",
        "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
        "sha256_as_published": None,
    }


def test_a_file_of_the_hub_that_is_not_the_published_one(hub_cache):
    cached(hub_cache, AIME25).write_text("x")
    with pytest.raises(DataSetError, match=r"expected the SHA-256 b4e273.*, found 2d7116.*--source DIR"):
        locate(AIME25, None)


def test_local_files_are_compared_with_the_published_one(tmp_path):
    (tmp_path / "aime25.jsonl").write_text("x")
    found = locate(AIME25, tmp_path)
    assert (found.from_hub, found.facts()["revision"], found.facts()["sha256_as_published"]) == (False, None, False)


@pytest.mark.parametrize("present", [[], ["aime25.jsonl", "aime25.parquet"]])
def test_one_local_file(tmp_path, present):
    for name in present:
        (tmp_path / name).touch()
    expected = f"aime25.parquet, aime25.jsonl, aime25.json, found {', '.join(reversed(present)) or 'none'}. It is test"
    with pytest.raises(DataSetError, match=re.escape(expected)):
        locate(AIME25, tmp_path)


@pytest.mark.parametrize("text", ["aime25", "aime25=", "aime26=abc", "=abc"])
def test_revisions_name_a_data_set(text):
    with pytest.raises(DataSetError, match="expected --revision NAME=REVISION with NAME one of aime25; found"):
        at_revisions((AIME25,), [text])


def rows_of(path):
    return list(read_rows(Input(AIME25, path, "", from_hub=False), ("problem",)))


def test_rows_of_all_formats(tmp_path):
    (tmp_path / "a.json").write_text('[{"problem": "é", "x": 1}]')
    (tmp_path / "a.jsonl").write_text('{"problem": "é", "x": 1}\n\n')
    public.write_parquet(tmp_path / "a.parquet", [{"problem": "é", "x": 1}])
    for path in tmp_path.iterdir():
        assert rows_of(path) == [{"problem": "é", "x": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1", "not a .parquet file after row 0"),
        ("a.jsonl", b'{"problem": "x"}\n{"problem"', "not a .jsonl file after row 1"),
        ("a.jsonl", b'{"problem": "\xff"}\n', "not a .jsonl file after row 0"),
        ("a.json", b"[", "not a .json file after row 0"),
        ("a.json", b'{"problem": "x"}', "expected a JSON list of rows, found dict"),
        ("a.json", b"[1]", "expected the columns problem of math-ai/aime25, found none in row 1"),
        ("a.jsonl", b'{"question": "x"}', "expected the columns problem of math-ai/aime25, found question in row 1"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataSetError, match=message):
        rows_of(tmp_path / name)


def test_a_parquet_file_cut_off(tmp_path):
    public.write_parquet(tmp_path / "whole.parquet", [{"problem": "x" * n} for n in range(1000)])
    content = (tmp_path / "whole.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataSetError, match=r"not a \.parquet file"):
        rows_of(tmp_path / "cut.parquet")

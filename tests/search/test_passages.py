"""Corpora and the store of passages."""

import json

import pytest

from verl_sis.errors import RetrievalError
from verl_sis.search.passages import ROWS_PER_BATCH, Passage, PassageStore, parse, read_corpus, write_passages


@pytest.mark.parametrize(
    ("row", "passage"),
    [
        # wiki-18 as Search-R1 publishes it.
        (
            {"id": "0", "contents": '"Aaron"\nAaron is a prophet.\nMore.'},
            Passage("0", "Aaron", "Aaron is a prophet.\nMore."),
        ),
        ({"id": 7, "title": "T", "text": "words"}, Passage("7", "T", "words")),
        ({"id": "a", "text": "words"}, Passage("a", "", "words")),
        ({"id": "a", "title": None, "text": "words", "more": 1}, Passage("a", "", "words")),
        ({"id": "a", "contents": "one line"}, Passage("a", "", "one line")),
    ],
)
def test_schemas_of_corpora(row, passage):
    assert parse(json.dumps(row), "here") == passage


def test_contents_are_those_of_the_corpus():
    row = {"id": "0", "contents": '"Aaron"\nAaron is a prophet.'}
    assert parse(json.dumps(row), "here").contents == row["contents"]
    assert Passage("a", "", "words").contents == "words"


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "3", '{"id": 1}', '{"text": "a"}', '{"id": 1, "text": " "}', '{"id": 1, "contents": "\\"T\\"\\n "}'],
)
def test_other_lines_are_refused(line):
    with pytest.raises(RetrievalError, match="corpus:3: expected"):
        parse(line, "corpus:3")


def test_a_corpus_that_is_missing_or_no_text(tmp_path):
    with pytest.raises(RetrievalError, match="cannot be read"):
        next(read_corpus(tmp_path / "none.jsonl"))
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(RetrievalError, match="cannot be read"):
        next(read_corpus(tmp_path / "binary.jsonl"))


@pytest.mark.parametrize("count", [0, 1, ROWS_PER_BATCH, ROWS_PER_BATCH + 1])
def test_each_row_is_found_again(tmp_path, count):
    rows = [Passage(str(number), f"t{number}", f"text {number} \u00e9") for number in range(count)]
    written = [len(batch) for batch in write_passages(tmp_path / "p.arrow", iter(rows))]
    assert sum(written) == count
    store = PassageStore(tmp_path / "p.arrow")
    assert len(store) == count
    for number in {0, 1, count // 2, ROWS_PER_BATCH - 1, count - 1} & set(range(count)):
        assert store[number] == rows[number]
    for outside in (-1, count):
        with pytest.raises(IndexError, match=f"found {outside}"):
            store[outside]


def test_a_store_that_is_none(tmp_path):
    (tmp_path / "p.arrow").write_bytes(b"something")
    for path in (tmp_path / "p.arrow", tmp_path / "none"):
        with pytest.raises(RetrievalError, match="expected the passages of an index"):
            PassageStore(path)

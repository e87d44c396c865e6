"""Contexts on disk: the files of a study add up, and whatever is not whole or not of the study is refused by name."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from verl_sis.errors import SisShapeError, StudyFileError
from verl_sis.records.contexts import CONTEXTS_FORMAT, CONTEXTS_VERSION, read_contexts, write_contexts
from verl_sis.records.schema import FOOTER_KEY

TYPES = {
    "sequence": np.int64,
    "position": np.int32,
    "token": np.int32,
    "age": np.int16,
    "ids": np.int32,
    "old_log_prob": np.float32,
    "current_log_prob": np.float32,
}
BY_ENTRY = ("ids", "old_log_prob", "current_log_prob")


def made_up(rows, k=3, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.integers(0, 100, (rows, k) if name in BY_ENTRY else rows).astype(kind) for name, kind in TYPES.items()
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "contexts" / "a-engine.parquet"
    write_contexts(path, "engine", made_up(4))
    return path


def test_files_of_a_pair_add_up_in_the_order_of_their_names(tmp_path, file):
    write_contexts(file.with_name("b-engine.parquet"), "engine", made_up(2, seed=1))
    found = read_contexts(tmp_path)["engine"]
    first, second = made_up(4), made_up(2, seed=1)
    for name, kind in TYPES.items():
        values = getattr(found, name)
        assert values.dtype == kind
        np.testing.assert_array_equal(values, np.concatenate([first[name], second[name]]), err_msg=name)


def test_pairs_stay_apart_and_may_differ_in_k(tmp_path, file):
    write_contexts(file.with_name("a-update.parquet"), "update", made_up(2, k=5))
    write_contexts(file.with_name("z-replay.parquet"), "replay", made_up(1))
    found = read_contexts(tmp_path)
    assert list(found) == ["engine", "replay", "update"]
    assert [contexts.ids.shape for contexts in found.values()] == [(4, 3), (1, 3), (2, 5)]


def test_a_file_without_rows_adds_none(tmp_path, file):
    write_contexts(file.with_name("0-engine.parquet"), "engine", made_up(0))
    assert read_contexts(tmp_path)["engine"].old_log_prob.shape == (4, 3)
    file.unlink()
    assert read_contexts(tmp_path)["engine"].old_log_prob.shape == (0, 3)


def test_unfinished_files_are_not_seen(tmp_path, file):
    file.with_name(".b-engine.parquet").write_bytes(b"half")
    assert len(read_contexts(tmp_path)["engine"].token) == 4


def test_a_study_without_contexts_has_none(tmp_path):
    assert read_contexts(tmp_path) == {} == read_contexts(tmp_path / "missing")


@pytest.mark.parametrize(
    ("pair", "change"), [("other", {}), ("engine", {"token": np.zeros(3)}), ("engine", {"extra": np.zeros(4)})]
)
def test_other_columns_are_not_written(tmp_path, pair, change):
    with pytest.raises(SisShapeError):
        write_contexts(tmp_path / "contexts" / "a.parquet", pair, {**made_up(4), **change})
    assert read_contexts(tmp_path) == {}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused_by_name(tmp_path, file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(StudyFileError, match=r"a-engine\.parquet is truncated, damaged or not parquet"):
        read_contexts(tmp_path)


def test_damage_in_the_data_is_noticed(tmp_path, file):
    whole = bytearray(file.read_bytes())
    start = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset
    whole[start : start + 30] = bytes(30)
    file.write_bytes(whole)
    with pytest.raises(StudyFileError, match=r"a-engine\.parquet is truncated, damaged"):
        read_contexts(tmp_path)


def rewritten(path, header=None, **columns):
    """The file with another header, and other or (None) fewer columns."""
    table = pyarrow.parquet.read_table(path)
    metadata = table.schema.metadata
    for name, values in columns.items():
        table = table.drop_columns([name]) if name in table.column_names else table
        table = table if values is None else table.append_column(name, values)
    metadata = metadata if header is None else {FOOTER_KEY: header}
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def as_header(**changes):
    header = {"format": CONTEXTS_FORMAT, "version": CONTEXTS_VERSION, "pair": "engine", **changes}
    return json.dumps(header).encode()


@pytest.mark.parametrize("header", [b"", b"[]", b"{}", as_header(format="verl_sis.tokens")])
def test_a_foreign_file_is_refused(tmp_path, file, header):
    rewritten(file, header)
    with pytest.raises(StudyFileError, match=r"a-engine\.parquet holds no contexts of verl_sis"):
        read_contexts(tmp_path)


@pytest.mark.parametrize("version", [CONTEXTS_VERSION + 1, 0, None])
def test_another_version_is_refused(tmp_path, file, version):
    rewritten(file, as_header(version=version))
    with pytest.raises(StudyFileError, match=rf"version {version} of contexts, .* reads 1 to {CONTEXTS_VERSION}"):
        read_contexts(tmp_path)


def test_an_unknown_pair_is_refused(tmp_path, file):
    rewritten(file, as_header(pair="before"))
    with pytest.raises(StudyFileError, match=r"a-engine\.parquet has contexts of the pair 'before', expected one of"):
        read_contexts(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"token": None}, "has the columns .* expected"),
        ({"extra": pyarrow.array([0] * 4)}, "has the columns .* expected"),
        ({"token": pyarrow.array([0.0] * 4)}, "column 'token' is double, expected int32"),
        ({"ids": pyarrow.array([0] * 4)}, "column 'ids' is int64, expected fixed_size_list"),
        (
            {"old_log_prob": pyarrow.array([[0.0, 1.0]] * 4, pyarrow.list_(pyarrow.float32(), 2))},
            r"column 'old_log_prob' is fixed_size_list.*\[2\], expected fixed_size_list.*\[3\]",
        ),
    ],
)
def test_other_columns_are_refused(tmp_path, file, columns, message):
    rewritten(file, **columns)
    with pytest.raises(StudyFileError, match=rf"a-engine\.parquet.*{message}"):
        read_contexts(tmp_path)


def test_files_of_two_studies_do_not_mix(tmp_path, file):
    write_contexts(file.with_name("b-engine.parquet"), "engine", made_up(2, k=5))
    with pytest.raises(StudyFileError, match=r"b-engine\.parquet has K = 5, but .*a-engine\.parquet has K = 3"):
        read_contexts(tmp_path)

"""Token tables on disk: what is written comes back, and whatever is not whole or not ours is refused by name."""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from verl_sis.errors import SisShapeError, StudyFileError
from verl_sis.records.read import TokenFile, open_study
from verl_sis.records.schema import COLUMNS, FOOTER_KEY, PAIRS, VERSION, Header, width_of
from verl_sis.records.write import ROWS_PER_GROUP, tokens_table, write_tokens

HEADER = Header(kind="collect", ks=(1, 5), layers=(0, 2, 3), experts_per_token=2, source={"model": "m"})
LENGTHS = (3, 1, 4)


def made_up_columns(header=HEADER, lengths=LENGTHS, seed=0):
    """Every column of the schema, random, with the given responses."""
    rng = np.random.default_rng(seed)
    rows = sum(lengths)
    columns = {}
    for column in COLUMNS:
        if column.since > header.version:
            continue
        width = width_of(column, header)
        shape = (rows,) if width is None else (rows, width)
        if pyarrow.types.is_floating(column.type):
            columns[column.name] = rng.random(shape, dtype=np.float32)
        else:
            columns[column.name] = rng.integers(0, 2, shape).astype(column.type.to_pandas_dtype())
    columns["sequence"] = np.repeat(np.arange(len(lengths)), lengths)
    columns["position"] = np.concatenate([np.arange(n) for n in lengths])
    return columns


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tokens" / "a.parquet"
    write_tokens(path, made_up_columns(), HEADER)
    return path


def test_every_column_comes_back(file):
    columns = made_up_columns()
    opened = TokenFile.open(file)
    assert opened.header == HEADER
    assert opened.rows == sum(LENGTHS)
    assert set(opened.columns) == set(columns)
    (batch,) = opened.batches(opened.columns)
    for name, values in columns.items():
        np.testing.assert_array_equal(batch[name], values, err_msg=name)


def test_columns_that_were_not_measured_are_absent(tmp_path):
    few = {name: made_up_columns()[name] for name in ("sequence", "position", "turn", "token", "old_log_prob")}
    path = tmp_path / "few.parquet"
    write_tokens(path, few, HEADER)
    opened = TokenFile.open(path)
    assert set(opened.columns) == set(few)
    (batch,) = opened.batches(["old_log_prob", "rollout_log_prob"])
    assert set(batch) == {"old_log_prob"}


def test_large_tables_come_in_bounded_batches(tmp_path):
    rows = ROWS_PER_GROUP + 5
    path = tmp_path / "large.parquet"
    columns = {"sequence": np.zeros(rows), "position": np.arange(rows), "turn": np.zeros(rows), "token": np.ones(rows)}
    write_tokens(path, columns, HEADER)
    sizes = [len(batch["position"]) for batch in TokenFile.open(path).batches(["position"])]
    assert sizes == [ROWS_PER_GROUP, 5]


def test_the_footer_names_pairs_that_have_their_columns():
    names = {column.name for column in COLUMNS}
    for pair in PAIRS:
        assert {f"{pair}_{what}" for what in ("log_envelope", "residual_mass", "acceptance")} <= names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nonsense": np.zeros(8)}, "unknown \\['nonsense'\\]"),
        ({"token": None}, "missing \\['token'\\]"),
        ({"position": np.zeros(7)}, "position must be \\(8,\\), got \\(7,\\)"),
        ({"engine_acceptance": np.zeros((8, 3))}, "engine_acceptance must be \\(8, 2\\), got \\(8, 3\\)"),
        ({"sequence": np.array([0, 0, 1, 0, 2, 2, 2, 2])}, "stand together"),
        ({"position": np.zeros(8)}, "positions must increase"),
    ],
)
def test_a_wrong_table_is_refused_and_nothing_is_written(tmp_path, change, message):
    columns = {name: values for name, values in {**made_up_columns(), **change}.items() if values is not None}
    with pytest.raises(SisShapeError, match=message):
        write_tokens(tmp_path / "x.parquet", columns, HEADER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_file_is_refused_by_name(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(StudyFileError, match=r"a\.parquet is truncated or not parquet"):
        open_study(file.parent.parent)


def test_damage_in_the_data_is_noticed(file):
    whole = bytearray(file.read_bytes())
    start = pyarrow.parquet.ParquetFile(file).metadata.row_group(0).column(0).data_page_offset
    whole[start : start + 30] = bytes(30)
    file.write_bytes(whole)
    with pytest.raises(StudyFileError, match=r"a\.parquet is damaged"):
        list(TokenFile.open(file).batches(["sequence"]))


def rewritten(path, metadata=None, **columns):
    table = pyarrow.parquet.read_table(path)
    for name, values in columns.items():
        table = table.append_column(name, pyarrow.array(values))
    metadata = table.schema.metadata if metadata is None else metadata
    pyarrow.parquet.write_table(table.replace_schema_metadata(metadata), path)


def test_a_foreign_parquet_file_is_refused(file):
    rewritten(file, metadata={})
    with pytest.raises(StudyFileError, match="no token table of verl_sis"):
        TokenFile.open(file)


def test_a_newer_version_is_refused(file):
    header = TokenFile.open(file).header
    rewritten(file, metadata={FOOTER_KEY: header.to_bytes().replace(b'"version": %d' % VERSION, b'"version": 99')})
    with pytest.raises(StudyFileError, match=rf"version 99 of the schema, and this verl_sis reads 1 to {VERSION}"):
        TokenFile.open(file)


def test_version_1_is_read_and_has_none_of_the_later_columns(tmp_path):
    old = Header(kind="dump", ks=(1, 5), layers=(0, 2, 3), experts_per_token=2, version=1)
    columns = made_up_columns(old)
    path = tmp_path / "old.parquet"
    write_tokens(path, columns, old)
    opened = TokenFile.open(path)
    assert opened.header.version == 1
    assert not {"rollout_mass", "rollout_mass_before", "rollout_filtered", "engine_moments"} & set(opened.columns)
    (batch,) = opened.batches(["engine_acceptance", "rollout_mass"])
    np.testing.assert_array_equal(batch["engine_acceptance"], columns["engine_acceptance"])
    assert "rollout_mass" not in batch


def test_version_1_with_a_column_of_version_2_is_refused(file):
    header = TokenFile.open(file).header
    rewritten(file, metadata={FOOTER_KEY: header.to_bytes().replace(b'"version": %d' % VERSION, b'"version": 1')})
    with pytest.raises(StudyFileError, match="which version 1 of the schema lacks"):
        TokenFile.open(file)


def test_a_column_that_the_schema_lacks_is_refused(file):
    rewritten(file, extra=np.zeros(8))
    with pytest.raises(StudyFileError, match="'extra', which version"):
        TokenFile.open(file)


def test_a_column_of_another_type_is_refused(file):
    table = tokens_table(made_up_columns(), HEADER)
    index = table.schema.get_field_index("entropy")
    pyarrow.parquet.write_table(table.set_column(index, "entropy", pyarrow.array(np.zeros(8))), file)
    with pytest.raises(StudyFileError, match="'entropy' is double, expected float"):
        TokenFile.open(file)


def test_files_of_two_studies_do_not_mix(file):
    other = Header(kind="collect", ks=(1, 2), layers=(0, 2, 3), experts_per_token=2)
    write_tokens(file.with_name("b.parquet"), made_up_columns(other), other)
    with pytest.raises(StudyFileError, match=r"b\.parquet has ks \(1, 2\), but .*a\.parquet has \(1, 5\)"):
        open_study(file.parent)


def test_unfinished_files_are_not_seen(file):
    file.with_name(".b.parquet.123").write_bytes(b"half")
    file.with_name(".c.parquet").write_bytes(b"half")
    assert [opened.path.name for opened in open_study(file.parent)] == ["a.parquet"]


def test_an_empty_directory_says_how_to_fill_it(tmp_path):
    with pytest.raises(StudyFileError, match=r"sis\.dump\.every=N"):
        open_study(tmp_path)

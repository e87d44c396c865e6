"""All files or none, and a manifest that notices every change."""

import json
import shutil

import pyarrow
import pytest
from pyarrow import parquet

from tests.data import public_files as public
from verl_sis.data.files import new_directory, verify
from verl_sis.data.math import write_math
from verl_sis.data.texts import overlap
from verl_sis.errors import DataSetError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    root = tmp_path_factory.mktemp("files")
    write_math(root / "data", source=public.math_files(root / "public"), allow_count=True)
    return root / "data"


@pytest.fixture
def data(original, tmp_path):
    return shutil.copytree(original, tmp_path / "data")


def test_what_was_written_is_verified(data):
    assert [output["rows"] for output in verify(data)] == [6, 2, 64, 32, 32]


def changed_byte(data):
    content = bytearray((data / "amc23.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (data / "amc23.parquet").write_bytes(content)


def row_less(data):
    table = parquet.read_table(data / "amc23.parquet")
    parquet.write_table(table.slice(1), data / "amc23.parquet")


def wrong_samples(data):
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["outputs"][2]["samples_per_problem"] = 16
    (data / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed_byte, "amc23.parquet has the SHA-256 .*, expected"),
        (row_less, "amc23.parquet has the SHA-256 .*, expected"),
        (wrong_samples, "amc23.parquet has 64 rows, expected 2 x 16"),
        (lambda data: (data / "aime24.parquet").unlink(), "aime24.parquet is missing"),
        (lambda data: shutil.copy(data / "amc23.parquet", data / "b.parquet"), "b.parquet: the manifest does not name"),
        (lambda data: (data / "manifest.json").unlink(), "expected the manifest of verl-sis data"),
        (lambda data: (data / "manifest.json").write_text("{"), "expected the manifest of verl-sis data"),
        (lambda data: (data / "manifest.json").write_text('{"format": 2}'), "expected a manifest of format 1"),
    ],
)
def test_every_change_is_noticed(data, change, message):
    change(data)
    with pytest.raises(DataSetError, match=message):
        verify(data)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, pyarrow.ArrowException])
def test_an_interrupted_call_leaves_nothing(tmp_path, monkeypatch, error):
    files = public.math_files(tmp_path / "files")
    write, written = parquet.write_table, []

    def interrupted(table, path, **settings):
        write(table, path, **settings)
        written.append(path)
        if len(written) == 3:
            raise error

    monkeypatch.setattr(parquet, "write_table", interrupted)
    with pytest.raises(error):
        write_math(tmp_path / "out", source=files, allow_count=True)
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == [files]


def test_what_is_there_is_not_replaced(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "file").touch()
    for name, found in (("full", "files"), ("file", "a file")):
        with (
            pytest.raises(DataSetError, match=f"expected nothing there, found {found}"),
            new_directory(tmp_path / name),
        ):
            raise AssertionError
    (tmp_path / "empty").mkdir()
    with new_directory(tmp_path / "empty") as scratch:
        (scratch / "new").touch()
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["new"]


def test_overlap_by_hand():
    train = [
        ("a", "Find $x^{2}$!"),
        ("b", "find  X^2"),
        ("c", "Find $y^2$."),
        ("d", "$+$"),
        ("e", "find \uff38\uff12, z"),
    ]
    test = [("1", "\\text{find} x2"), ("2", "FIND x²"), ("3", "?"), ("4", "Find x2z")]
    # The skeleton of the first test question is "textfindx2". Full-width and superscript characters are plain ones.
    assert overlap(train, test) == [("a", "2"), ("b", "2"), ("e", "4")]

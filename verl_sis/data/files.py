"""What ``verl-sis data`` writes: parquet files in verl's format and a manifest, all of them or none."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verl_sis
from verl_sis.data.sources import Input, Row, sha256_of
from verl_sis.errors import DataSetError

if TYPE_CHECKING:
    import pyarrow

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest."""


def chat_row(*, data_source: str, system: str, user: str, ability: str, ground_truth: Any, extra_info: Row) -> Row:
    """A row as verl's ``RLHFDataset`` reads it.

    Args:
        data_source: verl reports validation metrics by this name.
        system: Content of the system message.
        user: Content of the user's message.
        ability: Kind of task.
        ground_truth: What the reward function gets.
        extra_info: What else it gets; ``index`` numbers the rows.
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "system", "content": system}, {"role": "user", "content": user}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra_info,
    }


class Writer:
    """Writes parquet files into one directory and remembers what the manifest has to say of them."""

    def __init__(self, directory: Path, schema: "pyarrow.Schema"):
        """Write into an existing directory.

        Args:
            directory: For the files.
            schema: Of every file.
        """
        self._directory = directory
        self._schema = schema
        self.outputs: list[dict[str, Any]] = []

    def write(self, name: str, data_sources: list[str], rows: list[Row], samples: int) -> None:
        """Write one file.

        Args:
            name: Stem of the file.
            data_sources: Values of the column, for the manifest.
            rows: Its rows.
            samples: Rows that each problem has.
        """
        import pyarrow
        from pyarrow import parquet

        path = self._directory / f"{name}.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema=self._schema), path, compression="zstd")
        self.outputs.append(
            {
                "file": path.name,
                "data_sources": data_sources,
                "sha256": sha256_of(path),
                "rows": len(rows),
                "problems": len(rows) // samples,
                "samples_per_problem": samples,
            }
        )

    def write_manifest(self, kind: str, inputs: list[Input], findings: dict[str, Any]) -> None:
        """Write what was read, written and found; nothing of when and where, so that equal inputs give equal bytes.

        Args:
            kind: Command that wrote the data.
            inputs: Files that were read.
            findings: Further keys.
        """
        manifest = {
            "format": FORMAT,
            "data": kind,
            "verl_sis": verl_sis.__version__,
            "inputs": [found.facts() for found in inputs],
            "outputs": self.outputs,
            **findings,
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        (self._directory / MANIFEST).write_text(text, encoding="utf-8")


@contextmanager
def new_directory(out: Path) -> Iterator[Path]:
    """A directory to fill, which takes its name when it is full; nothing is left of it after an error.

    Args:
        out: Its name; must not exist, or be an empty directory.

    Yields:
        Where to write.

    Raises:
        DataSetError: There is something at ``out``.
    """
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        found = "files" if out.is_dir() else "a file"
        raise DataSetError(
            f"{out}: expected nothing there, found {found}. Choose another --out, or type: rm -r '{out}'"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        yield scratch
        # An empty directory at the target is replaced.
        os.replace(scratch, out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def checked_count(what: str, found: int, expected: int, *, allow: bool) -> dict[str, int]:
    """Compare a number of rows with the one that is known.

    Args:
        what: Is counted.
        found: Its number here.
        expected: Its number in the public data set.
        allow: Take any number but none.

    Returns:
        Both numbers, for the manifest.

    Raises:
        DataSetError: The numbers differ and that is not allowed, or there is nothing.
    """
    if found == 0 or (found != expected and not allow):
        raise DataSetError(
            f"{what}: expected {expected:,}, found {found:,}. This is other data than the recipes are for. "
            + ("To use it nevertheless, add --allow-count" if found else "Use another file")
        )
    return {"expected": expected, "found": found}


def verify(directory: Path) -> list[dict[str, Any]]:
    """Check files against the manifest beside them: checksums, rows, rows per problem.

    Args:
        directory: What ``verl-sis data math`` or ``verl-sis data search`` wrote.

    Returns:
        What the manifest says of each file.

    Raises:
        DataSetError: There is no manifest that can be read, a file is missing or differs, or there are others.
    """
    manifest = _manifest(directory)
    faults = [fault for output in manifest["outputs"] for fault in _faults(directory, output)]
    named = {output["file"] for output in manifest["outputs"]}
    faults += [
        f"{path.name}: the manifest does not name it" for path in directory.glob("*.parquet") if path.name not in named
    ]
    if faults:
        raise DataSetError(
            f"{directory}: not as written: {'; '.join(faults)}. "
            f"Write it anew: verl-sis data {manifest['data']} --out DIR"
        )
    return manifest["outputs"]


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataSetError(f"{path}: expected the manifest of verl-sis data, cannot read it ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataSetError(f"{path}: expected a manifest of format {FORMAT}; type: pip install --upgrade verl-sis")
    return manifest


def _faults(directory: Path, output: dict[str, Any]) -> Iterator[str]:
    from pyarrow import parquet

    path = directory / output["file"]
    if not path.is_file():
        yield f"{path.name} is missing"
        return
    digest = sha256_of(path)
    if digest != output["sha256"]:
        yield f"{path.name} has the SHA-256 {digest}, expected {output['sha256']}"
        return
    rows = parquet.ParquetFile(path).metadata.num_rows
    if rows != output["rows"] or rows != output["problems"] * output["samples_per_problem"]:
        yield f"{path.name} has {rows} rows, expected {output['problems']} x {output['samples_per_problem']}"

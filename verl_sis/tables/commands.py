"""What the command ``verl-sis tables`` does."""

from collections.abc import Sequence
from pathlib import Path

import typer

from verl_sis.console import fail
from verl_sis.errors import SisConfigError, SisError


def write(paths: Sequence[Path], out: Path, at: str, allow_mixed: Sequence[str], allow_unfinished: bool) -> None:
    """Write tables and figures, and print what was found and what is missing.

    Args:
        paths: Run directories, or directories with runs below them.
        out: Directory for the files.
        at: "last", "best", or an optimizer step.
        allow_mixed: Keys of the protocol that may differ.
        allow_unfinished: Whether runs may have ended early.
    """
    try:
        try:
            from verl_sis.tables.cells import make_matrix
            from verl_sis.tables.runs import find_runs
            from verl_sis.tables.write import write_tables

            matrix = make_matrix(find_runs(paths), at, allow_mixed, allow_unfinished)
            tables = write_tables(matrix, out)
        except ImportError as error:
            raise SisConfigError(f"tables need more packages ({error}). Type: pip install 'verl-sis[study]'") from error
        for cell in matrix.cells:
            mean = f"{cell.average.mean:.2f}" + (f" ± {cell.average.se:.2f}" if cell.average.se is not None else "")
            typer.echo(f"{cell.group}: {cell.label}: {mean} (n = {len(cell.runs)})")
        for table in tables:
            typer.echo(f"{table.name}: {len(table.rows)} rows, {len(table.missing)} notes on what is missing")
        typer.echo(f"{out / 'tables.md'}")
    except SisError as error:
        raise fail(error) from error

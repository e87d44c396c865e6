"""Command line ``verl-sis data ...``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_sis.console import fail
from verl_sis.errors import SisError

app = typer.Typer(help="Training and evaluation data in verl's format.", no_args_is_help=True, rich_markup_mode=None)

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write; must not exist.")]
SourceDirectory = Annotated[
    Path | None, typer.Option("--source", help="Directory of local files instead of the hub; see docs/data.md.")
]
Revisions = Annotated[list[str] | None, typer.Option("--revision", help="NAME=REVISION of a hub repository.")]
AllowCount = Annotated[bool, typer.Option("--allow-count", help="Take other numbers of rows than the known ones.")]
DropOverlap = Annotated[
    bool, typer.Option("--drop-overlap", help="Leave out of training what is also in an evaluation set.")
]


@app.command("math")
def math_command(
    out: Out,
    source: SourceDirectory = None,
    revision: Revisions = None,
    allow_count: AllowCount = False,
    drop_overlap: DropOverlap = False,
) -> None:
    """DAPO-Math-17k, each problem once; MATH-500 once, AMC 2023, AIME 2024 and 2025 32 times a problem."""
    from verl_sis.data.math import write_math

    _write(write_math, out, source, revision, allow_count, drop_overlap)


@app.command("search")
def search_command(
    out: Out,
    source: SourceDirectory = None,
    revision: Revisions = None,
    allow_count: AllowCount = False,
    drop_overlap: DropOverlap = False,
) -> None:
    """Natural Questions and HotpotQA for verl's tool agent, and the seven test sets of Search-R1."""
    from verl_sis.data.search import write_search

    _write(write_search, out, source, revision, allow_count, drop_overlap)


@app.command("verify")
def verify_command(directory: Annotated[Path, typer.Argument(help="What one of the other commands wrote.")]) -> None:
    """Compare checksums and numbers of rows with the manifest; exit code 1 if anything differs."""
    from verl_sis.data.files import verify

    try:
        _show(verify(directory))
    except SisError as error:
        raise fail(error) from error


def _write(
    write: Callable[..., dict[str, Any]],
    out: Path,
    source: Path | None,
    revisions: list[str] | None,
    allow_count: bool,
    drop_overlap: bool,
) -> None:
    from verl_sis.data.files import verify

    try:
        findings = write(
            out, source=source, revisions=tuple(revisions or ()), allow_count=allow_count, drop_overlap=drop_overlap
        )
        _show(verify(out))
    except SisError as error:
        raise fail(error) from error
    shared = {id for pairs in findings["train_and_test_share"].values() for id, _ in pairs}
    dropped = len(findings["dropped_from_train"])
    typer.echo(f"{len(shared)} training questions are also in an evaluation set; {dropped} left out")
    if several := findings.get("texts_with_several_answers"):
        typer.echo(f"{len(several)} texts have several ids with different answers; manifest.json lists them")
    typer.echo(f"wrote and verified {out}")


def _show(outputs: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("file", "problems", "rows each", "rows", "SHA-256")
    for output in outputs:
        numbers = (output["problems"], output["samples_per_problem"], output["rows"])
        table.add_row(output["file"], *(f"{number:,}" for number in numbers), output["sha256"][:12])
    Console().print(table)

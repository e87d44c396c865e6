"""Command line of verl_sis: ``verl-sis`` or ``python -m verl_sis``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_sis.data.commands import app as data
from verl_sis.search.commands import app as search
from verl_sis.study.commands import app as study

app = typer.Typer(
    help="Selective Importance Sampling for verl.", no_args_is_help=True, add_completion=False, rich_markup_mode=None
)


@app.callback()
def main() -> None:
    """Selective Importance Sampling for verl."""


@app.command()
def doctor() -> None:
    """Check that SIS can work in this environment; exit code 1, with the remedy, if not."""
    # torch and verl take seconds to import; `--help` must not.
    from verl_sis.doctor import examine

    findings = examine()
    table = Table("check", "", "found", title="verl-sis doctor", show_lines=True)
    for finding in findings:
        table.add_row(finding.check, "ok" if finding.ok else "FAULT", escape(finding.detail))
    Console().print(table)
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)
    typer.echo("ready: add +sis@_global_=grpo to a run of python -m verl.trainer.main_ppo")


app.add_typer(study, name="study")
app.add_typer(data, name="data")
app.add_typer(search, name="search")


@app.command()
def report(
    paths: Annotated[list[Path], typer.Argument(help="Studies, training runs, or their logs.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory; by default report/ in the study.")] = None,
) -> None:
    """One page on studies and training runs: verdict, figures, tables; no network needed to read it."""
    from verl_sis.study.commands import write

    write(paths, out)


@app.command()
def tables(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or directories with runs below them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for Markdown, CSV, LaTeX, PNG and JSON.")],
    at: Annotated[str, typer.Option(help="Reported validation: last, best, or an optimizer step.")] = "last",
    allow_mixed: Annotated[
        list[str] | None, typer.Option(help="Key of the protocol that may differ; every caption then says so.")
    ] = None,
    allow_unfinished: Annotated[bool, typer.Option(help="Take runs that ended early; they are marked.")] = False,
) -> None:
    """The paper's tables and figures from runs: means and errors over seeds, paired tests, the paper's numbers."""
    from verl_sis.tables.commands import write

    write(runs, out, at, allow_mixed or (), allow_unfinished)


if __name__ == "__main__":
    app()

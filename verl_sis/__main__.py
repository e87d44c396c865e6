"""Command line of verl_sis: ``verl-sis`` or ``python -m verl_sis``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

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


study = typer.Typer(help="Studies away from training.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(study, name="study")


@study.command()
def estimator(
    out: Annotated[Path, typer.Option(help="Directory for tables (CSV) and figures (PNG).")],
    contexts: Annotated[int, typer.Option(min=2, help="Contexts per seed.")] = 128,
    vocabulary: Annotated[int, typer.Option(min=20, help="Vocabulary size V.")] = 2048,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds.")] = 3,
) -> None:
    """Bias, variance and error of IS, clipped IS, TIS, CISPO, IcePop and SIS on synthetic policies, exactly."""
    try:
        from verl_sis.study.laboratory import Settings
        from verl_sis.study.laboratory_run import run
    except ImportError as error:
        typer.echo(f"studies need pandas and matplotlib ({error}). Type: pip install 'verl-sis[study]'", err=True)
        raise typer.Exit(1) from error

    for line in run(Settings(contexts=contexts, vocabulary=vocabulary, seeds=seeds), out):
        typer.echo(line)


if __name__ == "__main__":
    app()

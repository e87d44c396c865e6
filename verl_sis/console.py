"""What all commands of ``verl-sis`` do alike."""

import typer

from verl_sis.errors import SisError


def fail(error: SisError) -> typer.Exit:
    """Print an error as one message, and return what to raise.

    Args:
        error: What stopped the command.
    """
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(1)

"""Command line ``verl-sis search ...``."""

from pathlib import Path
from typing import Annotated

import typer

from verl_sis.console import fail
from verl_sis.errors import SisError

app = typer.Typer(help="Build, serve and try an index of passages.", no_args_is_help=True, rich_markup_mode=None)

Model = Annotated[str | None, typer.Option("--encoder", help="Directory or hub name; by default the one in the index.")]
Device = Annotated[str, typer.Option(help="Of the encoder, for torch.")]
Dtype = Annotated[str, typer.Option(help="Of the encoder's weights.")]
Probes = Annotated[int | None, typer.Option(help="Inverted lists that a query visits, for an index that has them.")]
Checksums = Annotated[bool, typer.Option(help="Read every byte of the index first, and compare with its manifest.")]


@app.command()
def index(
    corpus: Annotated[Path, typer.Argument(help="JSONL: id and contents, or id, title and text.")],
    encoder: Annotated[str, typer.Option(help="Directory or hub name of the encoder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to make.")],
    preset: Annotated[str, typer.Option(help="Prefixes, pooling and longest text: e5 or minilm.")] = "e5",
    factory: Annotated[str, typer.Option(help="FAISS's description: Flat (exact), IVF16384,SQ8, ...")] = "Flat",
    device: Device = "cpu",
    dtype: Dtype = "float32",
    batch_size: Annotated[int, typer.Option(help="Passages in one forward pass.")] = 64,
) -> None:
    """Embed a corpus and build its index."""
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from verl_sis.search.encoder import PRESETS, Encoder
    from verl_sis.search.index import build

    if preset not in PRESETS:
        raise typer.BadParameter(f"expected one of {sorted(PRESETS)}, found {preset}", param_hint="--preset")
    try:
        with Progress(TextColumn("{task.completed} passages"), TimeElapsedColumn()) as progress:
            task = progress.add_task("", total=None)
            manifest = build(
                corpus,
                out.resolve(),
                Encoder(encoder, PRESETS[preset], device, dtype, batch_size),
                factory,
                report=lambda passages: progress.update(task, completed=passages),
            )
    except SisError as error:
        raise fail(error) from error
    typer.echo(f"{out}: {manifest.passages} passages, dimension {manifest.dimension}, {manifest.factory}")


def serve_index(
    index: Annotated[Path, typer.Option(help="Directory of the index.")],
    encoder: Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for workers on other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.")] = 8000,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    probes: Probes = None,
    checksums: Checksums = False,
) -> None:
    """Serve an index over HTTP; prints its address once it takes requests."""
    from verl_sis.search.server import serve

    try:
        serve(index, encoder, host, port, device, dtype, probes, checksums)
    except SisError as error:
        raise fail(error) from error


app.command("serve")(serve_index)


@app.command()
def query(
    text: Annotated[str, typer.Argument(help="A question.")],
    url: Annotated[str, typer.Option(help="Of the server.")] = "http://127.0.0.1:8000",
    top_k: Annotated[int, typer.Option(help="Passages.")] = 3,
) -> None:
    """Ask a running server."""
    import asyncio

    from verl_sis.search.client import ClientSettings, RetrievalClient

    try:
        documents = asyncio.run(RetrievalClient(ClientSettings(url, attempts=1)).retrieve(text, top_k))
    except SisError as error:
        raise fail(error) from error
    for rank, document in enumerate(documents, start=1):
        typer.echo(f"{rank}. {document['title']}: {document['text']}")

"""A retrieval server over HTTP, with the request and answer of Search-R1's.

    python -m verl_sis.search.server --index DIR [--encoder DIR] [--port 8000]

``POST /retrieve`` takes ``{"queries": [...], "top_k": 3, "return_scores": true}`` and answers
``{"result": [[{"document": {"id", "title", "text", "contents"}, "score"}, ...], ...]}``: a list for
each query, best first; without scores the documents stand alone. ``topk`` is understood too. ``GET /health`` says what
is served.
"""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StringConstraints

from verl_sis.errors import RetrievalError
from verl_sis.search.batching import Batcher
from verl_sis.search.encoder import Encoder
from verl_sis.search.index import Hit, PassageIndex
from verl_sis.search.manifest import read_manifest

MAX_QUERIES = 1024
"""Most queries in a request."""

MAX_TOP_K = 100
"""Most passages for a query."""

MAX_QUERY_CHARACTERS = 8192
"""Longest query; the encoder cuts far earlier."""

_BATCH_QUERIES = 256

Query = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_QUERY_CHARACTERS)]


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``; anything else in it is refused."""

    model_config = ConfigDict(extra="forbid")

    queries: list[Query] = Field(min_length=1, max_length=MAX_QUERIES)
    top_k: int = Field(3, ge=1, le=MAX_TOP_K, validation_alias=AliasChoices("top_k", "topk"))
    return_scores: bool = True


def create_app(index: PassageIndex) -> Any:
    """Build the application.

    Args:
        index: What it serves.

    Returns:
        A ``fastapi.FastAPI``.
    """
    from fastapi import FastAPI

    def search(queries: Sequence[tuple[str, int]]) -> list[list[Hit]]:
        found = index.search([query for query, _ in queries], max(top_k for _, top_k in queries))
        return [hits[:top_k] for hits, (_, top_k) in zip(found, queries, strict=True)]

    app = FastAPI(title="verl_sis retrieval", docs_url=None, redoc_url=None)
    batcher: Batcher[tuple[str, int], list[Hit]] = Batcher(search, _BATCH_QUERIES)

    @app.post("/retrieve")
    async def retrieve(request: RetrieveRequest) -> dict[str, Any]:
        found = await batcher.submit([(query, request.top_k) for query in request.queries])
        return {"result": [[_as_json(hit, request.return_scores) for hit in hits] for hits in found]}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        manifest = index.manifest
        return {
            "status": "ok",
            "encoder": manifest.model,
            "passages": manifest.passages,
            "dimension": manifest.dimension,
            "corpus": manifest.corpus,
            "index": manifest.factory,
        }

    return app


def _as_json(hit: Hit, score: bool) -> dict[str, Any]:
    passage = hit.passage
    document = {"id": passage.id, "title": passage.title, "text": passage.text, "contents": passage.contents}
    return {"document": document, "score": hit.score} if score else document


def serve(
    directory: Path,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cpu",
    dtype: str = "float32",
    probes: int | None = None,
    checksums: bool = False,
) -> None:
    """Serve an index until interrupted; prints ``listening on http://HOST:PORT`` once requests are taken.

    Args:
        directory: Of the index.
        model: Directory or hub name of the encoder; the one that the manifest names if None.
        host: Address to listen on; 0.0.0.0 for other machines' workers.
        port: 0 for any free one.
        device: Of the encoder.
        dtype: Of the encoder.
        probes: See `PassageIndex`.
        checksums: See `PassageIndex`.

    Raises:
        RetrievalError: If the index cannot be served by this encoder, or the address is taken.
    """
    import uvicorn

    manifest = read_manifest(directory)
    encoder = Encoder(model or manifest.model, manifest.encoder, device, dtype)
    app = create_app(PassageIndex(directory, encoder, probes, checksums))
    with _listen(host, port) as listener:
        print(f"listening on http://{host}:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; a client may connect from here on, and is answered once the server runs."""
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise RetrievalError(f"expected to listen on {host}:{port}, but: {error}. Choose another --port.") from error


def main() -> None:
    """Command line; the same as ``verl-sis search serve``."""
    import typer

    from verl_sis.search.commands import serve_index

    typer.run(serve_index)


if __name__ == "__main__":
    main()

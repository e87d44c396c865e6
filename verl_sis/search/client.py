"""Client of the retrieval server: bounded time, retries with back-off, answers checked before they are used."""

import asyncio
import time
import weakref
from dataclasses import dataclass
from typing import Any

from verl_sis.errors import RetrievalError, SisConfigError

MAX_BACKOFF_SECONDS = 30.0
"""Longest pause between two attempts."""


@dataclass(frozen=True)
class ClientSettings:
    """How the server is asked."""

    url: str
    """``http://HOST:PORT``."""

    timeout_seconds: float = 30.0
    """Of one attempt, from the connection to the last byte."""

    attempts: int = 5
    """How often a request is tried before it counts as failed."""

    backoff_seconds: float = 0.5
    """Pause after the first failed attempt; doubled after each, up to `MAX_BACKOFF_SECONDS`."""

    concurrency: int = 64
    """Most connections of one process at a time; further requests wait."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not str(self.url).startswith(("http://", "https://")):
            raise SisConfigError(f"expected url to be http://HOST:PORT, found {self.url!r}.")
        for name, least in (("attempts", 1), ("concurrency", 1), ("timeout_seconds", 1e-3), ("backoff_seconds", 0)):
            if not getattr(self, name) >= least:
                raise SisConfigError(f"expected {name} to be at least {least}, found {getattr(self, name)}.")


class RetrievalClient:
    """Asks one server; may be used in any event loop."""

    def __init__(self, settings: ClientSettings) -> None:
        """Prepare; nothing is sent."""
        self.settings = settings
        self._connections: weakref.WeakKeyDictionary[Any, tuple[Any, asyncio.Semaphore]] = weakref.WeakKeyDictionary()

    def check_health(self) -> dict[str, Any]:
        """Ask what the server serves; blocking.

        Returns:
            Its answer.

        Raises:
            RetrievalError: If no attempt finds a healthy server.
        """
        import httpx

        error: Exception | None = None
        for attempt in range(self.settings.attempts):
            if attempt:
                time.sleep(self._pause(attempt))
            try:
                # No proxy: the server is this cluster's own.
                response = httpx.get(
                    f"{self.settings.url}/health", timeout=self.settings.timeout_seconds, trust_env=False
                )
                found = response.raise_for_status().json()
                if not isinstance(found, dict) or found.get("status") != "ok":
                    raise RetrievalError(f"it answers {response.text[:200]!r}")
                return found
            except (httpx.HTTPError, ValueError, RetrievalError) as failure:
                error = failure
        raise RetrievalError(
            f"expected a retrieval server at {self.settings.url}, but after {self.settings.attempts} attempts: "
            f"{_name(error)}. Start it: python -m verl_sis.search.server --index DIR, and give its address as url "
            "in the tool's configuration."
        )

    async def retrieve(self, query: str, top_k: int) -> list[dict[str, Any]]:
        """Find passages of one query.

        Args:
            query: Text.
            top_k: Most passages.

        Returns:
            Documents with ``title`` and ``text``, best first.

        Raises:
            RetrievalError: If all attempts failed, or the server refused the request.
        """
        import httpx

        client, slots = self._of_this_loop()
        error: Exception | None = None
        for attempt in range(self.settings.attempts):
            if attempt:
                await asyncio.sleep(self._pause(attempt))
            try:
                # The time of an attempt starts when it is its turn.
                async with slots:
                    return await asyncio.wait_for(self._ask(client, query, top_k), self.settings.timeout_seconds)
            except httpx.HTTPStatusError as failure:
                error = failure
                if failure.response.is_client_error:
                    break  # it would refuse the same request again
            except (httpx.HTTPError, TimeoutError, asyncio.TimeoutError, ValueError, RetrievalError) as failure:
                error = failure
        raise RetrievalError(f"{self.settings.url}: {_name(error)}") from error

    async def _ask(self, client: Any, query: str, top_k: int) -> list[dict[str, Any]]:
        body = {"queries": [query], "top_k": top_k, "return_scores": True}
        response = await client.post(f"{self.settings.url}/retrieve", json=body)
        return documents_of(response.raise_for_status().json(), top_k)

    def _of_this_loop(self) -> tuple[Any, asyncio.Semaphore]:
        """Connections and free slots of the running event loop: they belong to the loop they were opened in."""
        import httpx

        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            # httpx limits each read; the limit on a whole attempt is set where it is made.
            limits = httpx.Limits(max_connections=self.settings.concurrency)
            client = httpx.AsyncClient(limits=limits, timeout=None, trust_env=False)
            self._connections[loop] = client, asyncio.Semaphore(self.settings.concurrency)
        return self._connections[loop]

    def _pause(self, attempt: int) -> float:
        return min(MAX_BACKOFF_SECONDS, self.settings.backoff_seconds * 2 ** (attempt - 1))


def documents_of(answer: Any, top_k: int) -> list[dict[str, Any]]:
    """Check an answer to one query, and take its documents.

    Args:
        answer: Parsed JSON of ``POST /retrieve`` with scores.
        top_k: How many passages were asked for.

    Returns:
        Documents with ``title`` and ``text``, best first.

    Raises:
        RetrievalError: If it has another shape. A server of Search-R1, whose documents have ``contents``, will do.
    """
    try:
        (hits,) = answer["result"]
        documents = [hit["document"] for hit in hits]
        found = [_with_text(document) for document in documents]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RetrievalError(
            'expected {"result": [[{"document": {...}, "score": ...}, ...]]}, found ' + repr(answer)[:200]
        ) from error
    if not 0 < len(found) <= top_k:
        raise RetrievalError(f"expected 1 to {top_k} passages, found {len(found)}")
    return found


def _with_text(document: dict[str, Any]) -> dict[str, Any]:
    if "text" in document:
        return {"title": str(document.get("title") or ""), "text": str(document["text"])}
    title, _, text = document["contents"].partition("\n")
    return {"title": title.strip().strip('"'), "text": text}


def _name(error: Exception | None) -> str:
    """Kind and message; the message of a timeout is empty."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")

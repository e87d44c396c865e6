"""Requests that arrive while the encoder works are encoded together, in the next batch."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """One batch at a time through one function; nothing waits longer than for the batches before it."""

    def __init__(self, function: Callable[[Sequence[Item]], Sequence[Answer]], limit: int) -> None:
        """Prepare.

        Args:
            function: Blocking; one answer for each item, in order. Runs in a thread, never twice at once.
            limit: Most items in a call of the function.
        """
        self._function, self._limit = function, limit
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, items: Sequence[Item]) -> list[Answer]:
        """Answers for all items, in order.

        Raises:
            Exception: What the function raised for the batch of any of the items.
        """
        loop = asyncio.get_running_loop()
        futures: list[Awaitable[Answer]] = []
        for item in items:
            future: asyncio.Future[Answer] = loop.create_future()
            self._waiting.append((item, future))
            futures.append(future)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return list(await asyncio.gather(*futures))

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._limit], self._waiting[self._limit :]
            try:
                answers = await asyncio.to_thread(self._function, [item for item, _ in batch])
                answered = list(zip(batch, answers, strict=True))
            except Exception as error:  # noqa: BLE001  (handed to those who wait for it)
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), answer in answered:
                # A client that went away has cancelled its own.
                if not future.done():
                    future.set_result(answer)

"""What waits is answered together, in order, and faults reach those who asked."""

import asyncio
import threading

import pytest

from verl_sis.search.batching import Batcher


def test_one_batch_at_a_time_and_all_that_wait_in_the_next():
    batches, first_runs, go_on = [], threading.Event(), threading.Event()

    def double(items):
        batches.append(list(items))
        first_runs.set()
        go_on.wait(5)
        return [2 * item for item in items]

    async def run():
        batcher = Batcher(double, limit=4)
        first = asyncio.create_task(batcher.submit([1]))
        await asyncio.to_thread(first_runs.wait, 5)
        later = [asyncio.create_task(batcher.submit(items)) for items in ([2, 3], [4], [5, 6])]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(first, *later)

    assert asyncio.run(run()) == [[2], [4, 6], [8], [10, 12]]
    assert batches == [[1], [2, 3, 4, 5], [6]]


def test_a_fault_reaches_its_batch_and_no_other():
    def strict(items):
        if 0 in items:
            raise ValueError("zero")
        return items

    async def run():
        batcher = Batcher(strict, limit=2)
        return await asyncio.gather(*(batcher.submit([item]) for item in (1, 0, 2)), return_exceptions=True)

    found = asyncio.run(run())
    assert [type(each) for each in found] == [ValueError, ValueError, list]
    with pytest.raises(ValueError, match="zero"):
        raise found[1]


def test_a_missing_answer_is_a_fault_and_nobody_waits_for_ever():
    async def run():
        batcher = Batcher(lambda items: items[:-1], limit=8)
        await asyncio.wait_for(batcher.submit([1, 2]), 5)

    with pytest.raises(ValueError, match="zip"):
        asyncio.run(run())


def test_an_asker_who_leaves_disturbs_nobody():
    started, go_on = threading.Event(), threading.Event()

    def slow(items):
        started.set()
        go_on.wait(5)
        return items

    async def run():
        batcher = Batcher(slow, limit=8)
        leaving = asyncio.create_task(batcher.submit([1]))
        await asyncio.to_thread(started.wait, 5)
        staying = asyncio.create_task(batcher.submit([2]))
        await asyncio.sleep(0)
        leaving.cancel()
        go_on.set()
        return await staying

    assert asyncio.run(run()) == [2]

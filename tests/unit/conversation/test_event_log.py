"""The log of a conversation's events against a list of all of them."""

import asyncio
import random

import pytest

from hermes_pool import EventsMissed
from hermes_pool.conversation import event_log
from hermes_pool.conversation.event_log import EventLog
from hermes_pool_worker import wire

PIECE, KEPT = 40, 40


def piece(number: int) -> wire.TextDelta:
    return wire.TextDelta("t", 1, f"{number}")


@pytest.mark.parametrize("limit", [("EVENTS_KEPT", KEPT), ("EVENT_BYTES_KEPT", KEPT * PIECE)])
async def test_watchers_of_all_paces_see_every_event_or_are_told_what_they_missed(
    monkeypatch: pytest.MonkeyPatch, limit: tuple[str, int]
) -> None:
    monkeypatch.setattr(event_log, *limit)
    chance = random.Random(9)
    log = EventLog(lambda: None)
    origin = log.last_seq
    watchers = [log.watch() for _ in range(3)]
    pending = {watcher: asyncio.ensure_future(anext(watcher)) for watcher in watchers}
    await asyncio.sleep(0)
    seen = dict.fromkeys(watchers, origin)
    missed = 0

    async def look(watcher: event_log.Watcher) -> None:
        nonlocal missed
        await asyncio.sleep(0)
        while pending[watcher].done():
            seq, event = pending[watcher].result()
            if isinstance(event, EventsMissed):
                assert event.count == seq - seen[watcher] > KEPT // 2
                missed += 1
            else:
                assert (seq, event) == (seen[watcher] + 1, piece(seq))
            seen[watcher] = seq
            pending[watcher] = asyncio.ensure_future(anext(watcher))
            await asyncio.sleep(0)

    for _ in range(3000):
        log.append(piece(log.last_seq + 1), PIECE)
        assert len(log._events) <= KEPT
        for pace, watcher in zip((1, 10, 60), watchers, strict=True):
            if chance.randrange(pace) == 0:
                await look(watcher)
    for watcher in watchers:
        await look(watcher)
    assert set(seen.values()) == {log.last_seq} == {origin + 3000}
    assert missed > 5
    assert log.watchers == 3
    log.close()
    for watcher in watchers:
        with pytest.raises(StopAsyncIteration):
            await pending[watcher]
        with pytest.raises(StopAsyncIteration):
            await anext(watcher)
    assert log.watchers == 0


async def test_what_is_larger_than_the_log_is_seen_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_log, "EVENT_BYTES_KEPT", 1000)
    log = EventLog(lambda: None)
    for number in range(5):
        before = log.last_seq
        log.append(piece(number), 5000)
        async for seq, event in log.watch(before):
            assert (seq, event) == (before + 1, piece(number))
            break
        assert len(log._events) == 1


async def test_who_watches_is_counted_while_they_watch() -> None:
    log = EventLog(lambda: None)
    told: list[int] = []
    log.watched = lambda: told.append(log.watchers)
    first, second = log.watch(), log.watch()
    assert log.watchers == 0
    tasks = [asyncio.ensure_future(anext(each)) for each in (first, second)]
    await asyncio.sleep(0)
    assert (log.watchers, told) == (2, [1])
    log.append(piece(1), 1)
    await asyncio.gather(*tasks)
    await first.aclose()
    await first.aclose()
    assert (log.watchers, told) == (1, [1])
    del second, tasks
    assert (log.watchers, told) == (0, [1, 0])

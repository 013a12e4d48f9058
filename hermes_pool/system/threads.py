"""Runs what blocks in a thread of its own."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

KEPT_S = 1.0
"""How long a thread waits for further work before it ends: to start one takes 0.1 ms, and much more in a busy process,
since whoever starts it waits for the interpreter's lock until it runs."""


class NoThreadError(OSError):
    """The system has no thread left to give."""


async def in_thread(work: Callable[[], T], done: Callable[[], None] = lambda: None) -> T:
    """Return what ``work`` returns, and call ``done`` on the loop when it has really ended.

    Daemon threads, and none of an executor: the interpreter waits for those at its end, for ever if a database hangs,
    and the host's own work cannot keep ours waiting. ``NoThreadError``, an ``OSError``, where none can be started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(outcome: Callable[[], None]) -> None:
        done()
        if not future.done():  # the caller may have given up
            outcome()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
            caught = error
            outcome = lambda: future.set_exception(caught)  # noqa: E731
        else:
            outcome = lambda: future.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(finish, outcome)

    try:
        _hand_over(run)
    except RuntimeError as error:
        done()
        raise NoThreadError("no thread could be started") from error
    return await future


async def in_thread_or_here(work: Callable[[], T]) -> T:
    """Return what ``work`` returns, also where no thread can be started: then it blocks the event loop for as long.

    For what takes milliseconds and must be done all the same: to end processes where there are too many of them.
    """
    try:
        return await in_thread(work)
    except NoThreadError:
        return work()


_Inbox = queue.SimpleQueue[Callable[[], None]]
_resting: list[_Inbox] = []
"""The inboxes of the threads that wait for work, the latest last. Each is in here once, and taken out by one side."""


def _hand_over(run: Callable[[], None]) -> None:
    try:
        _resting.pop().put(run)
    except IndexError:
        threading.Thread(target=_work, args=(run, queue.SimpleQueue()), name="hermes-pool", daemon=True).start()


def _work(run: Callable[[], None], inbox: _Inbox) -> None:
    while True:
        run()
        del run  # it may hold much
        _resting.append(inbox)
        try:
            run = inbox.get(timeout=KEPT_S)
        except queue.Empty:
            try:
                _resting.remove(inbox)
            except ValueError:  # somebody has taken it at this moment, and is about to put work in
                run = inbox.get()
            else:
                return

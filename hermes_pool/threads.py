"""Runs what blocks in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], done: Callable[[], None] = lambda: None) -> T:
    """Return what ``work`` returns, and call ``done`` on the loop when it has really ended.

    A daemon thread, and none of an executor: the interpreter waits for those at its end, for ever if a database hangs,
    and the host's own work cannot keep ours waiting. One for each call costs some 0.1 ms, and none is left over.
    ``OSError`` where no thread can be started.
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
        threading.Thread(target=run, name="hermes-pool", daemon=True).start()
    except RuntimeError as error:
        done()
        raise OSError("no thread could be started") from error
    return await future

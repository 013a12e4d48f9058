"""Runs blocking functions in daemon threads."""

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

KEPT_S = 1.0
"""How long a thread waits for more work before it ends. Starting a thread takes 0.1 ms, and much longer in a busy
process, since the caller waits until the new thread has got the GIL."""


class NoThreadError(OSError):
    """The system cannot start another thread."""


async def in_thread(work: Callable[[], T], done: Callable[[], None] = lambda: None) -> T:
    """Run ``work`` in a thread and return what it returns.

    ``done`` is called on the event loop when ``work`` has really ended, even if the caller was cancelled before. Raises
    what ``work`` raises, and ``NoThreadError`` if no thread can be started.

    An executor is no good here: the interpreter waits for its threads at exit, for ever if a database hangs, and the
    host's own tasks could delay ours.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(outcome: Callable[[], None]) -> None:
        done()
        if not future.done():  # the caller may have been cancelled
            outcome()

    def run() -> None:
        outcome: Callable[[], None]
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            caught = error
            outcome = lambda: future.set_exception(caught)  # noqa: E731
        else:
            outcome = lambda: future.set_result(result)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing awaits the result
            loop.call_soon_threadsafe(finish, outcome)

    try:
        _hand_over(run)
    except RuntimeError as error:
        done()
        raise NoThreadError("no thread could be started") from error
    return await future


async def in_thread_or_here(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread, or on the event loop if no thread can be started; return what it returns.

    For work that takes milliseconds and must be done in any case, such as ending processes when there are too many.
    """
    try:
        return await in_thread(work)
    except NoThreadError:
        return work()


_Inbox = queue.SimpleQueue[Callable[[], None]]
_idle_threads: list[_Inbox] = []
"""The inboxes of threads that wait for work, the latest last. The side that removes an inbox owns it: a caller puts
work in, and the thread itself ends."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle_threads.clear)  # a forked process has the list, and none of the threads


def _hand_over(run: Callable[[], None]) -> None:
    try:
        _idle_threads.pop().put(run)
    except IndexError:
        threading.Thread(target=_work, args=(run, queue.SimpleQueue()), name="hermes-pool", daemon=True).start()


def _work(run: Callable[[], None], inbox: _Inbox) -> None:
    while True:
        run()
        del run  # it may hold large objects
        _idle_threads.append(inbox)
        try:
            run = inbox.get(timeout=KEPT_S)
        except queue.Empty:
            try:
                _idle_threads.remove(inbox)
            except ValueError:  # a caller has just removed it, and is about to put work in
                run = inbox.get()
            else:
                return

"""The guardian of a pool: a small process that outlives the supervisor for a moment and cleans up after it. Linux only.

Its standard input is a pipe that ends when the supervisor does, however that happens. Like the supervisor it holds the
workers' lifeline. So when the supervisor dies, the workers are still alive, and the guardian can find everything below
them, even processes that have cleared their environment and left their session. It ends all of it, then itself. If that
takes too long, it lets go of the lifeline, and the kernel kills the workers.
"""

import contextlib
import os
import signal

from hermes_pool_worker import lifeline, process_tree

HOLDS_UP_S = 0.5
"""How long the guardian keeps the workers alive after the end of the supervisor, at most, in seconds."""
GIVES_UP_S = 10
"""How long it goes on after that to end processes that keep forking, in seconds."""


def run(pool: str) -> None:
    """Wait for the end of the supervisor, then end every process of the pool."""
    held = lifeline.inherited()
    # A service manager signals all processes of a service at once. The guardian must outlive the others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass

    def let_go(*_: object) -> None:
        nonlocal held
        if held is not None:
            os.close(held)
            held = None
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GIVES_UP_S)

    signal.signal(signal.SIGALRM, let_go)
    signal.setitimer(signal.ITIMER_REAL, HOLDS_UP_S)
    process_tree.end_pool(pool)

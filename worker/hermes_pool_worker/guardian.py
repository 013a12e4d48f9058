"""The guardian of a pool: a small process that outlives the supervisor by a moment, and ends what it leaves (Linux).

Its standard input is a pipe that ends when the supervisor does, in whatever way. It also holds the workers' lifeline,
together with the supervisor: so when that dies the workers still live, and what is below them can be found, also what
has cleared its environment and left its session. Then the guardian ends all of it and leaves; should it be held up, it
lets go of the lifeline, and the kernel kills the workers.
"""

import contextlib
import os
import signal

from hermes_pool_worker import lifeline, process_tree

HOLDS_UP_S = 0.5
"""How long after the end of the supervisor it may keep the workers alive to look at what is below them."""
GIVES_UP_S = 10
"""How long it goes on ending what keeps forking."""


def run(pool: str) -> None:
    """Wait for the end of the supervisor, then end every process of the pool."""
    held = lifeline.inherited()
    # Who ends a service signals all its processes at once; this one's time comes when the others are gone.
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

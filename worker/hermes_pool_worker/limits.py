"""What each worker sets up for itself before it serves: resource limits, and a signal that shows where it hangs.

A worker sets its own limits, and never the zygote, because a lowered limit could not be raised again in a fork. They
arrive in the environment, which reaches spawned and forked workers alike, and are taken out of it, so that the agent's
tools do not see them. The tools do inherit the limits themselves, each process on its own.
"""

import faulthandler
import os
import sys
from collections.abc import Mapping

from hermes_pool_worker import stdio
from hermes_pool_worker.contract import EXIT_UNUSABLE, RLIMITS_VARIABLE, STACKS_SIGNAL, rlimits_from

_STDERR = 2


def set_rlimits() -> None:
    """Set the limits that the environment asks for, if any.

    If that is impossible, end the process with status 78 and the reason.
    """
    wanted = os.environ.pop(RLIMITS_VARIABLE, "")
    if not wanted:
        return
    try:
        apply_rlimits(rlimits_from(wanted))
    except (ValueError, OSError, ImportError) as error:
        stdio.leave(EXIT_UNUSABLE, f"hermes-pool worker: worker_rlimits cannot be set ({wanted}): {error}")


def apply_rlimits(limits: Mapping[str, int]) -> None:
    """Set each limit, soft and hard, for this process and all that it starts. -1 means "no limit".

    A value above the current hard limit becomes the hard limit. Raise ``ValueError`` for a name that this platform does
    not have, and whatever ``resource.setrlimit`` raises.
    """
    import resource  # noqa: PLC0415 - takes longer to import than all the rest, and most workers have no limits

    for name, value in limits.items():
        number = getattr(resource, name, None) if name.startswith("RLIMIT_") else None
        if number is None:
            raise ValueError(f"this platform has no limit {name!r}")
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard  # noqa: PLW2901 - as the docstring says
        resource.setrlimit(number, (value, value))


def arm_stacks() -> None:
    """Make ``STACKS_SIGNAL`` write the Python stacks of all threads to stderr.

    The handler is written in C and runs at once, whichever thread holds the interpreter's lock. It writes to descriptor
    2, whatever ``sys.stderr`` is by then. A forked process inherits it, so the zygote arms it once for all its workers
    (in each fork it would cost 0.1 ms, mostly for memory pages that are then no longer shared). An executed program
    does not.
    """
    if STACKS_SIGNAL is None or sys.platform == "win32":
        return
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True, chain=False)

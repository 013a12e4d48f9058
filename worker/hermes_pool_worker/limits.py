"""What each worker sets for itself before it begins: the limits of its resources, and a way to ask where it hangs.

Limits are set in a worker and never in a zygote, where nobody could raise them again. What is asked for comes in the
environment, the one thing that reaches spawned and forked workers in the same way, and is taken out of it, so that the
agent's tools do not see it. They inherit the limits themselves, each of them its own.
"""

import faulthandler
import os
import sys
from collections.abc import Mapping

from hermes_pool_worker import stdio
from hermes_pool_worker.contract import EXIT_UNUSABLE, RLIMITS_VARIABLE, STACKS_SIGNAL, rlimits_from

_STDERR = 2


def keep_rlimits() -> None:
    """Set the limits that are asked for, if any; end with status 78 and the reason where that is impossible."""
    wanted = os.environ.pop(RLIMITS_VARIABLE, "")
    if not wanted:
        return
    try:
        apply_rlimits(rlimits_from(wanted))
    except (ValueError, OSError, ImportError) as error:
        stdio.leave(EXIT_UNUSABLE, f"hermes-pool worker: worker_rlimits cannot be set ({wanted}): {error}")


def apply_rlimits(limits: Mapping[str, int]) -> None:
    """Set each limit, the soft and the hard one, for this process and all it starts. -1 is "no limit".

    Never above the hard limit that there is: what is asked for beyond it is what there is. ``ValueError`` for a name
    that this platform does not have, and what ``resource.setrlimit`` raises.
    """
    import resource  # noqa: PLC0415 - takes longer to import than all the rest, and most workers have no limits

    for name, value in limits.items():
        number = getattr(resource, name, None) if name.startswith("RLIMIT_") else None
        if number is None:
            raise ValueError(f"this platform has no limit {name!r}")
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY and (value == resource.RLIM_INFINITY or value > hard):
            value = hard  # noqa: PLW2901 - as it is said above
        resource.setrlimit(number, (value, value))


def arm_stacks() -> None:
    """Have the Python stacks of all threads written to stderr at ``STACKS_SIGNAL``.

    In C and at once, whoever holds the interpreter's lock. It writes to the standard error of the process, whatever
    ``sys.stderr`` is by now. What is forked inherits it, so a zygote does it once for all its workers (in a fork it
    would cost 0.1 ms, mostly for pages of memory that are not shared any more then); what is executed does not.
    """
    if STACKS_SIGNAL is None or sys.platform == "win32":
        return
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True, chain=False)

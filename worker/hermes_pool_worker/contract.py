"""What a supervisor and its workers agree on besides the wire: names, exit codes and conventions.

Both sides import this one file, as they do ``wire``. It needs the standard library only, and little of that: the
guardian keeps in memory what it imports for as long as its pool lives (``typing`` alone would be a fifth of it).
"""

import signal
from collections.abc import Mapping

# --- the worker program's arguments -----------------------------------------------------------------------------------

ZYGOTE_OPTION = "--zygote"
"""First argument of a worker program that forks workers and is none itself."""
GUARDIAN_OPTION = "--guardian"
"""First argument of a worker program that cleans up after its supervisor; the pool's name follows."""

# --- environment variables --------------------------------------------------------------------------------------------

MARKER_VARIABLE = "HERMES_POOL_WORKER"
"""Holds the marker of a process. Every process of a pool has one, and its children inherit it: so a stray process shows
which pool and which worker it belongs to."""
LIFELINE_VARIABLE = "HERMES_POOL_LIFELINE"
"""Holds the number of the inherited descriptor that is the lifeline. The process takes it out of its environment."""
RLIMITS_VARIABLE = "HERMES_POOL_RLIMITS"
"""Holds the resource limits that a worker sets for itself, as ``rlimits_text`` writes them. The worker takes it out of
its environment."""

# --- markers ----------------------------------------------------------------------------------------------------------

ZYGOTE = "zygote"
GUARDIAN = "guardian"


def marker(pool: str, member: object) -> str:
    """Return the marker of one process: ``POOL-NUMBER`` for a worker, ``POOL-zygote``, ``POOL-guardian``."""
    return f"{pool}-{member}"


def marker_start(pool: str) -> str:
    """Return what every marker of a pool starts with, and no marker of another pool does."""
    return f"{pool}-"


# --- exit codes, those of sysexits.h ----------------------------------------------------------------------------------

EXIT_OK = 0
EXIT_USAGE = 64
"""``EX_USAGE``: a person started the program by hand."""
EXIT_SOFTWARE = 70
"""``EX_SOFTWARE``: the agent raised an exception while it started; the traceback is on stderr."""
EXIT_UNUSABLE = 78
"""``EX_CONFIG``: no worker can start with this configuration. The last line on stderr is the remedy, and the supervisor
does not try again."""

# --- stacks -----------------------------------------------------------------------------------------------------------

STACKS_SIGNAL: signal.Signals | None = getattr(signal, "SIGUSR2", None)
"""Makes a worker write the Python stacks of all its threads to stderr; ``None`` on platforms without this signal.
(Hermes uses SIGUSR1 in its gateway and SIGUSR2 nowhere.)"""

# --- the zygote's socket ----------------------------------------------------------------------------------------------

DATAGRAM_BYTES_MAX = 1024 * 1024
"""Largest message between a supervisor and a zygote. Each message is one datagram."""

# --- resource limits --------------------------------------------------------------------------------------------------


def rlimits_text(limits: Mapping[str, int]) -> str:
    """Return resource limits as text: ``RLIMIT_NOFILE=1024 RLIMIT_CORE=0``."""
    return " ".join(f"{name}={value}" for name, value in limits.items())


def rlimits_from(text: str) -> dict[str, int]:
    """Return the limits that ``rlimits_text`` wrote; raise ``ValueError`` for any other text."""
    return {name: int(value) for name, value in (pair.split("=", 1) for pair in text.split())}

"""The control socket: how another process of the same user sees and steers a running supervisor.

It speaks the frames of the wire: one request, one response, and the connection is over. To add a request, define its
struct here, name it in ``Request`` (and its answer in ``Response``), and answer it in the supervisor's handler.

How both sides meet: each supervisor keeps one file ``<state_dir>/control/<pid>-<token>.lock``, which names the host and
the socket's path, and on which it holds a lock for as long as it lives. So the place of the socket depends on no
variable that one terminal has and another one has not, a deep ``state_dir`` is no obstacle (the socket then lies in a
short folder of the system's), any number of supervisors can share a ``state_dir``, and whether one is dead is told by
the kernel, which drops the lock with the process, and not guessed from a pid that may be another's by now.
"""

import socket
import struct
import sys
from typing import Final, TypeAlias

import msgspec

from hermes_pool.crash_report import DeathReport
from hermes_pool.errors import HermesPoolError
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot

REQUEST_BYTES_MAX: Final = 64 * 1024
"""Largest request that a supervisor reads."""

FOLDER: Final = "control"


class ControlError(HermesPoolError):
    """The control socket cannot be made, or may not be used; the text says which folder, and what to do."""

    code = "control_failed"


class _Request(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests: a map tagged with the type's name, so that fields may be added anywhere."""


class _Response(msgspec.Struct, frozen=True, tag=True):
    """Base of all responses."""


class Ps(_Request, frozen=True):
    """Show all sessions; answered with ``PsReply``."""


class Stop(_Request, frozen=True):
    """Stop one session's worker; answered with ``Done`` or ``Failed``."""

    conversation_id: str
    user_id: str | None = None


class Pause(_Request, frozen=True):
    """Begin no more turns, and wait up to ``deadline_s`` for those that run; answered with ``Done`` or ``Failed``."""

    deadline_s: float = 0.0


class Resume(_Request, frozen=True):
    """Begin turns again; answered with ``Done`` or ``Failed``."""


class Drain(_Request, frozen=True):
    """Finish what has come in within ``deadline_s``, and refuse what is new; answered with ``Done`` or ``Failed``."""

    deadline_s: float


class Resize(_Request, frozen=True):
    """Change the limit of workers; answered with ``Done`` or ``Failed``."""

    workers_max: int


class Deaths(_Request, frozen=True):
    """Show the latest deaths; answered with ``DeathsReply``."""


class Reset(_Request, frozen=True):
    """Let starts in again, or all that a conversation is refused; answered with ``Done`` or ``Failed``."""

    conversation_id: str | None = None
    """``None``: the starts of the pool."""
    user_id: str | None = None


class Release(_Request, frozen=True):
    """Let a quarantined message in again; answered with ``Done``, or ``Failed`` where it is not known."""

    conversation_id: str
    fingerprint: str
    user_id: str | None = None


class PsReply(_Response, frozen=True):
    """One supervisor and its sessions. ``started_at`` is ISO 8601 in UTC, ``version`` that of hermes-pool."""

    sessions: list[SessionSnapshot]
    supervisor_pid: int
    version: str
    started_at: str
    pool: PoolSnapshot | None = None
    """``None`` from a supervisor that is older than this field."""


class DeathsReply(_Response, frozen=True):
    """The deaths that a supervisor remembers, the latest first."""

    reports: list[DeathReport]


class Done(_Response, frozen=True):
    """What was asked for has been done. ``text`` says more, where there is more to say."""

    text: str = ""


class Failed(_Response, frozen=True):
    """What was asked for could not be done, and why."""

    text: str


Request: TypeAlias = Ps | Stop | Pause | Resume | Drain | Resize | Deaths | Reset | Release
Response: TypeAlias = PsReply | DeathsReply | Done | Failed


def available() -> bool:
    """Say whether this platform has Unix sockets; without them there is nothing to start and nobody to ask."""
    return sys.platform != "win32" and hasattr(socket, "AF_UNIX")


def peer_may(connection: socket.socket, allowed: set[int]) -> bool:
    """Say whether the process at the other end belongs to one of the allowed users, where the system tells."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    _pid, uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    return uid in allowed

"""The messages of the control protocol, by which another process of the same user sees and controls a supervisor.

They travel as frames of the wire: the client sends one request, the supervisor answers with one response, and the
connection ends. ``socket_folder`` describes how the two find each other.

To add a request, define its struct here, add it to ``Request`` (and a new response to ``Response``), and handle it in
the supervisor.
"""

from typing import Final, TypeAlias

import msgspec

from hermes_pool.crash_report import DeathReport
from hermes_pool.snapshot import PoolSnapshot, SessionSnapshot

REQUEST_BYTES_MAX: Final = 64 * 1024
"""Largest request that a supervisor reads."""


class _Request(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests. A message is a map that is tagged with the type's name, so fields can be added anywhere."""


class _Response(msgspec.Struct, frozen=True, tag=True):
    """Base of all responses."""


class Ps(_Request, frozen=True):
    """List all sessions. Answered with ``PsReply``."""


class Stop(_Request, frozen=True):
    """Stop one session's worker. Answered with ``Done`` or ``Failed``."""

    conversation_id: str
    user_id: str | None = None


class Pause(_Request, frozen=True):
    """Begin no turns, and wait up to ``deadline_s`` seconds for running ones. Answered with ``Done`` or ``Failed``."""

    deadline_s: float = 0.0


class Resume(_Request, frozen=True):
    """Begin turns again after ``Pause`` or ``Drain``. Answered with ``Done`` or ``Failed``."""


class Drain(_Request, frozen=True):
    """Refuse new messages, and finish accepted ones within ``deadline_s`` seconds.

    Answered with ``Done`` or ``Failed``.
    """

    deadline_s: float


class Resize(_Request, frozen=True):
    """Change the limit of workers. Answered with ``Done`` or ``Failed``."""

    workers_max: int


class Deaths(_Request, frozen=True):
    """List the latest deaths of workers. Answered with ``DeathsReply``."""


class Reset(_Request, frozen=True):
    """Close a breaker: the pool's, or one conversation's (which also releases its messages).

    Answered with ``Done`` or ``Failed``.
    """

    conversation_id: str | None = None
    """``None``: the pool's breaker, which refuses to start workers."""
    user_id: str | None = None


class Release(_Request, frozen=True):
    """Release a quarantined message. Answered with ``Done``, or ``Failed`` if the supervisor does not know it."""

    conversation_id: str
    fingerprint: str
    user_id: str | None = None


class PsReply(_Response, frozen=True):
    """One supervisor and its sessions. ``started_at`` is ISO 8601 in UTC, ``version`` the version of hermes-pool."""

    sessions: list[SessionSnapshot]
    supervisor_pid: int
    version: str
    started_at: str
    pool: PoolSnapshot | None = None
    """``None`` from a supervisor that is older than this field."""


class DeathsReply(_Response, frozen=True):
    """The deaths that a supervisor remembers, latest first."""

    reports: list[DeathReport]


class Done(_Response, frozen=True):
    """The request was carried out. ``text`` describes the result, and may be empty."""

    text: str = ""


class Failed(_Response, frozen=True):
    """The request was not carried out. ``text`` says why."""

    text: str


Request: TypeAlias = Ps | Stop | Pause | Resume | Drain | Resize | Deaths | Reset | Release
Response: TypeAlias = PsReply | DeathsReply | Done | Failed

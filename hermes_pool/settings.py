"""The settings of a pool, and the key of a session: plain frozen values, checked when they are made."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hermes_pool.errors import InvalidKeyError, SettingsError

if sys.platform == "win32":
    resource = None
else:
    import resource

ID_CHARS_MAX = 512
"""Longest conversation or user id. Ids are names (a UUID has 36); a megabyte of one is a mistake somewhere."""


@dataclass(frozen=True, slots=True)
class SessionKey:
    """What a session is bound to: a conversation, or one user's part of it.

    ``InvalidKeyError`` for an id that is empty, over 512 characters, or holds what a database cannot store (NUL, half
    a surrogate pair). Anything else is a fine id: no id is ever used as a path, an argument or a variable.
    """

    conversation_id: str
    user_id: str | None = None

    def __post_init__(self) -> None:
        """Check both ids."""
        _check_id("conversation id", self.conversation_id)
        if self.user_id is not None:
            _check_id("user id", self.user_id)


def _check_id(what: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidKeyError(f"a {what} is text, not {type(value).__name__}: convert it first")
    if not value:
        raise InvalidKeyError(f"a {what} cannot be empty")
    if len(value) > ID_CHARS_MAX:
        raise InvalidKeyError(f"a {what} of {len(value):,} characters is too long; at most {ID_CHARS_MAX} are allowed")
    try:
        value.encode()  # fails for half a surrogate pair
    except UnicodeEncodeError:
        storable = False
    else:
        storable = "\0" not in value
    if not storable:
        raise InvalidKeyError(f"the {what} {value[:80]!r} holds NUL or half a surrogate pair; no database can store it")


def _default_state_dir() -> Path:
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise SettingsError("there is no home folder for the pool's files: set HOME, or state_dir") from None
    return Path(base) / "hermes-pool"


def _absolute(name: str, path: Path | str) -> Path:
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise SettingsError(f"{name}={str(path)!r}: there is no such home folder; write the path out") from None
    except FileNotFoundError:
        raise SettingsError(f"{name}={str(path)!r}: the current folder is gone; write the whole path") from None


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """How a pool runs. Every field has a default; the unit is the last word of its name (``_s`` is seconds).

    ``SettingsError`` for a value, or a pair of values, that makes no sense.
    """

    agent: str = "hermes"
    """Who answers: ``hermes``, ``echo`` (no model, no Hermes; for tests and a first try) or ``package.module:factory``
    (see ``hermes_pool_worker.agent``)."""
    agent_paths: tuple[str, ...] = ()
    """Folders added to the worker's import path, for an agent of your own."""
    agent_options: Mapping[str, Any] = field(default_factory=dict)
    """Passed to the agent when it opens: built-in types only. Those of ``hermes`` are listed in the README."""
    worker_python: str = sys.executable
    """Interpreter that the workers run in; another virtual environment's, when Hermes' pins and yours exclude each
    other. It needs ``msgspec`` and, for ``agent="hermes"``, ``hermes-agent``."""
    worker_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables added to the worker's environment, which otherwise is a short allow-list of the host's (``PATH``,
    ``HOME``, the locale, proxies and certificates). An API key goes here, or into Hermes' own ``.env``."""
    worker_cwd: Path | None = None
    """Folder in which workers start, and so the agent's tools; default: ``workspace`` in ``state_dir``."""
    hermes_home: Path | None = None
    """``HERMES_HOME`` of the workers; default: the host's variable of that name, else Hermes' own default."""

    state_dir: Path = field(default_factory=_default_state_dir)
    """Folder of the pool's own files. Supervisors that share it are shown together by ``hermes-pool ps``."""
    database_url: str | None = None
    """SQLAlchemy URL of the pool's own store; default: an SQLite file in ``state_dir``. Not used when the manager is
    given a ``ConversationStore`` over a table of yours."""
    database_timeout_s: float = 10.0
    """How long one read or write of the store may take before it counts as failed."""

    launcher: Literal["auto", "zygote", "spawn", "portable"] = "auto"
    """How workers are started: ``zygote`` (Linux: forked from a process that has imported everything), ``spawn``
    (Linux: own pipes and pidfd), ``portable`` (asyncio's subprocesses), or ``auto`` (the best of the platform)."""
    spares: int = 0
    """Workers kept ready for conversations to come: started, prepared, bound to none, and used once. They do not count
    against ``workers_max``."""
    workers_max: int = 64
    """Most workers at once. At the limit the idle session that is worth least (``admission.Idle``) goes dormant to make
    room. The limit of a running pool is changed by ``HermesSessionManager.resize``."""
    admissions_waiting_max: int = 256
    """Most messages in line for a worker when the limit is reached; a further one is refused. It bounds those that a
    paused pool holds, too."""

    idle_timeout_s: float = 900.0
    """A worker without a turn for this long is stopped, after its metadata has been saved."""
    background_timeout_s: float = 3600.0
    """For how long after its last turn work in the background (a job that the agent has told of, a process that a tool
    left running) keeps a worker from being idle, also where room is needed. Then that work is abandoned, and
    ``last_error`` says so. 0: it never keeps a worker."""
    idle_sweep_s: float = 10.0
    """How often idle workers are looked for, and what could not be saved is tried again."""

    start_timeout_s: float = 60.0
    """Limit of a start, from launch to ready."""
    turn_timeout_s: float = 1800.0
    """Limit of a turn, from its hand-over to a worker to its end, restarts included."""
    progress_timeout_s: float = 600.0
    """Limit of silence in a turn. Its clock stands still while a tool runs or a question waits for its answer."""
    question_timeout_s: float | None = None
    """Longest wait for the answer to a question (an approval, say), after which it counts as denied; ``None``: as long
    as the agent allows, which with Hermes is ``approvals.timeout`` of its configuration."""
    close_grace_s: float = 5.0
    """How long a worker may take to end by itself, after a cancel or a request to close, before it is signalled."""
    term_grace_s: float = 2.0
    """How long a worker may take to end after SIGTERM, before SIGKILL."""

    busy: Literal["wait", "reject"] = "wait"
    """What a message does that meets a running turn: wait in line, first come first served, or be refused at once."""
    turns_waiting_max: int = 64
    """Most callers in line for one conversation; a further one is refused."""
    wait_timeout_s: float = 600.0
    """Longest wait in line for a conversation, or for room in the pool."""

    restarts_max: int = 1
    """How many dead workers one turn may have replaced before it ends with an error."""
    replay: Literal["until_tool", "always", "never"] = "until_tool"
    """Whether a turn whose worker died is run again: only while no tool has started, always, or never."""
    restarts_in_window_max: int = 5
    """Most deaths of one conversation's workers within ``restarts_window_s`` without a completed turn in between; one
    more, and none is started for a while."""
    restarts_window_s: float = 300.0
    """How long a death counts in ``restarts_in_window_max``."""
    restart_backoff_s: float = 0.5
    """The first such while; each further one is twice as long, until a turn is completed. Jitter shortens it by up to
    half."""
    restart_backoff_max_s: float = 60.0
    """The longest such while."""
    quarantine_after: int = 2
    """A message that has ended this many workers is sent no more; 0: never."""
    start_failures_max: int = 3
    """After this many failed starts in a row, of whatever conversations, starts are refused at once; after one that
    shows that none can succeed, immediately."""
    start_probe_s: float = 10.0
    """After how long one start is tried then; twice as long after each that fails. Jitter shortens it by up to half."""
    start_probe_max_s: float = 120.0
    """The longest time until the next such start."""

    sample_s: float = 20.0
    """How often all workers are looked at: memory, CPU time, what they have started. One in a turn whose state is in
    doubt is looked at more often."""
    wedged_after_s: float = 60.0
    """A worker in a turn that for this long has answered nothing, sent nothing and, as far as the system can tell, done
    nothing, is replaced. One that works, however silent and deaf, is left alone."""
    memory_warn_bytes: int | None = None
    """Above this much memory of a worker and all that it has started, there is a warning in the log. Memory that is
    shared with other processes counts by its share, where the system tells that."""
    memory_recycle_bytes: int | None = None
    """Above this much, a worker is let go when its turn has ended; its next message gets a new one, in context."""
    memory_kill_bytes: int | None = None
    """Above this much, a worker is killed at once, and its turn ends as at any other death."""
    memory_total_bytes: int | None = None
    """When all workers together are above this, idle ones go dormant, those worth least first."""
    memory_total_low: float = 0.9
    """Down to this share of ``memory_total_bytes``."""
    worker_age_max_s: float | None = None
    """A worker older than this, give or take a tenth, is let go when it has no turn. Not needed for Hermes as far as
    was measured: what it does not give back is seen in its memory."""
    worker_rlimits: Mapping[str, int] = field(default_factory=dict)
    """Limits of the operating system for each worker and, each for itself, the processes that it starts:
    ``{"RLIMIT_NOFILE": 1024}``. Names of Python's ``resource`` module; -1 is "no limit"."""

    frame_bytes_max: int = 64 * 1024 * 1024
    """Largest frame on the wire in either direction, and so about the longest message or reply."""
    events_waiting_max: int = 1024
    """Events of a turn that may wait for a slow consumer; beyond, the worker is no longer read and so slowed down."""
    stderr_lines_max: int = 50
    """Last lines of a worker's stderr that are kept for error reports."""

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the store: ``database_url``, or the SQLite file in ``state_dir``."""
        return self.database_url or f"sqlite:///{self.state_dir / 'hermes-pool.db'}"

    def __post_init__(self) -> None:
        """Bring paths into one form and check every value."""
        object.__setattr__(self, "state_dir", _absolute("state_dir", self.state_dir))
        for name in ("worker_cwd", "hermes_home"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _absolute(name, value))
        if isinstance(self.agent_paths, str):
            raise SettingsError("agent_paths is a tuple of folders, not one text: write (folder,)")
        object.__setattr__(self, "agent_paths", tuple(str(_absolute("agent_paths", path)) for path in self.agent_paths))
        if self.database_url is None and "?" in str(self.state_dir):
            raise SettingsError(f"state_dir={str(self.state_dir)!r}: a '?' cannot stand in the path of an SQLite file")
        self._check_words()
        self._check_numbers()

    def _check_words(self) -> None:
        if self.agent not in ("hermes", "echo") and not all(self.agent.partition(":")):
            raise SettingsError(f'agent={self.agent!r} is neither "hermes" nor "echo" nor "package.module:factory"')
        for name, allowed in (
            ("busy", ("wait", "reject")),
            ("replay", ("until_tool", "always", "never")),
            ("launcher", ("auto", "zygote", "spawn", "portable")),
        ):
            if getattr(self, name) not in allowed:
                raise SettingsError(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}")
        if not self.worker_python:
            raise SettingsError("worker_python is empty: name an interpreter, or leave the default")
        for name, value in self.worker_env.items():
            if not name or "=" in name or "\0" in name + value:
                raise SettingsError(f"worker_env: {name!r} cannot be an environment variable")
        self._check_rlimits()

    def _check_rlimits(self) -> None:
        for name, value in self.worker_rlimits.items():
            if name not in _RLIMITS:
                raise SettingsError(f"worker_rlimits: {name!r} is none of {', '.join(_RLIMITS) or 'this platform'}")
            if type(value) is not int or not _RLIMIT_NONE <= value < 2**63:
                raise SettingsError(f"worker_rlimits: {name}={value!r} is no whole number from {_RLIMIT_NONE} on")

    def _check_numbers(self) -> None:
        for name in (
            "database_timeout_s", "idle_timeout_s", "idle_sweep_s", "start_timeout_s", "turn_timeout_s",
            "progress_timeout_s", "wait_timeout_s", "workers_max", "frame_bytes_max", "events_waiting_max",
            "admissions_waiting_max",
            "sample_s", "wedged_after_s",
            "restarts_in_window_max", "restarts_window_s", "restart_backoff_s", "restart_backoff_max_s",
            "start_failures_max", "start_probe_s", "start_probe_max_s",
        ):  # fmt: skip
            if not getattr(self, name) > 0:
                raise SettingsError(f"{name} must be over 0, not {getattr(self, name)!r}")
        for name in (
            "background_timeout_s",
            "close_grace_s",
            "term_grace_s",
            "spares",
            "turns_waiting_max",
            "restarts_max",
            "quarantine_after",
            "stderr_lines_max",
        ):
            if not getattr(self, name) >= 0:
                raise SettingsError(f"{name} cannot be negative, and is {getattr(self, name)!r}")
        for first, most in (("restart_backoff_s", "restart_backoff_max_s"), ("start_probe_s", "start_probe_max_s")):
            if getattr(self, first) > getattr(self, most):
                raise SettingsError(f"{first}={getattr(self, first)!r} is over {most}={getattr(self, most)!r}")
        self._check_memory()
        if self.frame_bytes_max < _FRAME_BYTES_LEAST or self.frame_bytes_max > _FRAME_BYTES_MOST:
            raise SettingsError(
                f"frame_bytes_max is {self.frame_bytes_max:,}; it must be between {_FRAME_BYTES_LEAST:,} (an error "
                f"report has to fit) and {_FRAME_BYTES_MOST:,} (the length word has 32 bits)"
            )

    def _check_memory(self) -> None:
        for name in (*_MEMORY_MARKS, "memory_total_bytes", "worker_age_max_s", "question_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SettingsError(f"{name} must be over 0, or None for no limit, not {value!r}")
        if not 0 < self.memory_total_low <= 1:
            raise SettingsError(f"memory_total_low must be over 0 and at most 1, not {self.memory_total_low!r}")
        marks = [(name, value) for name in _MEMORY_MARKS if (value := getattr(self, name)) is not None]
        for (lower, less), (higher, more) in pairwise(marks):
            if less > more:
                raise SettingsError(f"{lower}={less:,} is over {higher}={more:,}")


_MEMORY_MARKS = ("memory_warn_bytes", "memory_recycle_bytes", "memory_kill_bytes")
_RLIMITS = () if resource is None else tuple(sorted(name for name in vars(resource) if name.startswith("RLIMIT_")))
_RLIMIT_NONE = -1
_FRAME_BYTES_LEAST = 4096
_FRAME_BYTES_MOST = 2**32 - 1

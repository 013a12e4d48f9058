"""The settings of a pool, and the key of a session: plain frozen values that are checked when they are made."""

import difflib
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args, get_origin

import msgspec
from msgspec import Meta

from hermes_pool.errors import InvalidKeyError, SettingsError
from hermes_pool_worker import contract

if sys.platform == "win32":
    resource = None
else:
    import resource

OnCancel = Literal["keep", "discard"]
"""What happens to the history of a turn that is cancelled, stopped, or ended by a time limit."""

ID_CHARS_MAX = 512
"""Longest conversation or user id. Ids are names (a UUID has 36 characters); a megabyte of one is a mistake."""


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


# --- what a value may be ----------------------------------------------------------------------------------------------

VARIABLE_PREFIX: Final = "HERMES_POOL_"
"""How the names of the environment variables that are settings begin."""
NOT_SETTINGS: Final = frozenset({contract.MARKER_VARIABLE, contract.LIFELINE_VARIABLE, contract.RLIMITS_VARIABLE})
"""Variables that the pool sets for its workers, and so for all that their tools start."""

BACKOFF_MAX_S: Final = 60.0
"""The longest back-off of a conversation, in seconds: a person who waits for it is still there after a minute."""
PROBE_MAX_S: Final = 120.0
"""The longest time between two starts while starts fail, in seconds: an outage that is over is noticed within this."""
_FRAME_BYTES_LEAST: Final = 4096
_FRAME_BYTES_MOST: Final = 2**32 - 1
_RLIMIT_NONE: Final = -1
_RLIMITS = () if resource is None else tuple(sorted(name for name in vars(resource) if name.startswith("RLIMIT_")))

# Each says in its description, for the error, what it accepts.
Text = Annotated[str, Meta(description="text")]
Folder = Annotated[Path, Meta(description="a path")]
PositiveFloat = Annotated[float, Meta(gt=0, description="a number over 0")]
NonNegativeFloat = Annotated[float, Meta(ge=0, description="a number, 0 or more")]
PositiveInt = Annotated[int, Meta(gt=0, description="a whole number over 0")]
NonNegativeInt = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]


class _Checked:
    """What the settings and their groups have in common: every value is of its declared type, or they are not made."""

    _path: ClassVar[str] = ""
    """What precedes a field's name where a setting is named."""

    def __post_init__(self) -> None:
        """Convert every value to its declared type, or raise ``SettingsError``."""
        for each in fields(self):  # type: ignore[arg-type]  # each class below is a dataclass
            object.__setattr__(self, each.name, _converted(each, getattr(self, each.name), self._path + each.name))


def _group_of(each: "Field[Any]") -> type[_Checked] | None:
    return each.type if isinstance(each.type, type) and issubclass(each.type, _Checked) else None


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return a declared type without its ``| None``, and whether it had one."""
    args = get_args(hint)
    if NoneType not in args:
        return hint, False
    (rest,) = (arg for arg in args if arg is not NoneType)
    return rest, True


def _in_words(hint: Any) -> str:
    kind, optional = _without_none(hint)
    (words,) = (meta.description for meta in get_args(kind)[1:] if isinstance(meta, Meta) and meta.description)
    return f"{words}, or None" if optional else words


def _converted(each: "Field[Any]", value: object, called: str, *, strict: bool = True) -> Any:
    """Return ``value`` as the field declares it. ``SettingsError`` names the setting as ``called``, and what it may be.

    ``strict=False`` also takes a number as text, which is all that an environment has.
    """
    if group := _group_of(each):
        if not isinstance(value, group):
            raise SettingsError(f"{called} must be {group.__name__}(...), not {value!r:.200}")
        return value
    kind, optional = _without_none(each.type)
    if optional and value is None:
        return None
    try:
        made = msgspec.convert(value, kind, strict=strict, dec_hook=_to_path)
    except (msgspec.ValidationError, UnicodeEncodeError):  # of text with half a surrogate pair
        but = f", not {value!r:.200}" if each.repr else ""  # a secret is shown in no error either
        raise SettingsError(f"{called} must be {_in_words(each.type)}{but}") from None
    if check := each.metadata.get("check"):
        check(made, called)
    return made


def _to_path(_: type, value: object) -> Path:
    """Make a path of text or a path: the one type that ``msgspec`` does not know."""
    if not isinstance(value, str | Path) or "\0" in str(value):
        raise TypeError
    return Path(value)


def _check_variables(variables: Mapping[str, str], called: str) -> None:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name + value:
            shown = name.partition("=")[0]  # what follows may be a secret
            raise SettingsError(f"{called}: {shown!r} cannot be an environment variable")


def _check_rlimits(limits: Mapping[str, int], called: str) -> None:
    for name in limits:
        if name not in _RLIMITS:
            known = f"must be one of {', '.join(_RLIMITS)}" if _RLIMITS else "cannot be set on this platform"
            raise SettingsError(f"{called}: {name!r} {known}")


# --- the settings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Timeouts(_Checked):
    """How long things may take, in seconds."""

    _path: ClassVar = "timeouts."

    start_s: PositiveFloat = 60.0
    """Limit of a start, from its launch until the worker is ready."""
    turn_s: PositiveFloat = 1800.0
    """Limit of a turn, from its hand-over to a worker to its end, replaced workers included."""
    progress_s: PositiveFloat = 600.0
    """Limit of silence in a turn. The clock stands still while a tool runs or a question waits for its answer."""
    question_s: PositiveFloat | None = None
    """Longest wait for the answer to a question (an approval, say), after which it counts as denied. ``None``: as long
    as the agent allows, which with Hermes is ``approvals.timeout`` of its configuration."""
    wait_s: PositiveFloat = 600.0
    """Longest wait in the queue for a conversation, or for a worker where ``workers_max`` is reached."""
    unwatched_s: PositiveFloat | None = None
    """A turn of ``start`` is cancelled once nobody has watched it for so long. ``None``: it goes on."""
    drain_s: NonNegativeFloat = 0.0
    """How long a closing pool lets running and waiting turns come to their ends before it stops what is left."""
    idle_s: PositiveFloat = 900.0
    """A worker without a turn for this long is stopped, after its metadata has been saved."""
    background_s: NonNegativeFloat = 3600.0
    """How long after its last turn work in the background (a job that the agent has reported, a process that a tool
    left running) keeps a worker from being idle, even when room is needed. Then that work is abandoned, and
    ``last_error`` says so. 0: it never keeps a worker."""
    close_grace_s: NonNegativeFloat = 5.0
    """How long a worker may take to end by itself, after a cancel or a request to close, before it is signalled."""
    term_grace_s: NonNegativeFloat = 2.0
    """How long a worker may take to end after SIGTERM, before SIGKILL."""
    database_s: PositiveFloat = 10.0
    """How long one read or write of the store may take before it counts as failed."""
    wedged_s: PositiveFloat = 60.0
    """A worker in a turn is replaced when for this long it has answered nothing, sent nothing and, as far as the system
    can tell, done nothing. One that works, however silent and deaf, is left alone."""


@dataclass(frozen=True, kw_only=True)
class QueueLimits(_Checked):
    """How many messages may wait."""

    _path: ClassVar = "queues."

    turns_max: NonNegativeInt = 64
    """Most messages that wait for one conversation; a further one is refused."""
    admissions_max: PositiveInt = 256
    """Most messages that wait for a worker when ``workers_max`` is reached; a further one is refused. It also bounds
    those that a paused pool holds."""


@dataclass(frozen=True, kw_only=True)
class RestartPolicy(_Checked):
    """What happens when the workers of a conversation die."""

    _path: ClassVar = "restarts."

    replacements_per_turn_max: NonNegativeInt = 1
    """How many dead workers one turn may have replaced before it ends with an error."""
    deaths_in_window_max: PositiveInt = 5
    """Most deaths of one conversation's workers within ``window_s`` without a completed turn in between. One more, and
    no worker is started for it during a back-off."""
    window_s: PositiveFloat = 300.0
    """How long a death counts in ``deaths_in_window_max``, in seconds."""
    backoff_s: Annotated[
        float, Meta(gt=0, le=BACKOFF_MAX_S, description=f"a number over 0, and at most {BACKOFF_MAX_S:g}")
    ] = 0.5
    """The first back-off, in seconds. Each further one is twice as long, up to a minute, until a turn is completed.
    Jitter shortens it by up to half."""
    quarantine_after: NonNegativeInt = 2
    """A message that has ended this many workers is not sent again for a while; 0: it always is."""
    quarantine_s: PositiveFloat = 60.0
    """For how long, in seconds. Then it is let in once more. If that ends another worker it is refused for twice as
    long, up to an hour."""


@dataclass(frozen=True, kw_only=True)
class StartPolicy(_Checked):
    """What happens when no worker can be started."""

    _path: ClassVar = "starts."

    failures_max: PositiveInt = 3
    """After this many failed starts in a row, of any conversations, starts are refused at once. After one that shows
    that none can succeed, they are refused immediately."""
    probe_s: Annotated[
        float, Meta(gt=0, le=PROBE_MAX_S, description=f"a number over 0, and at most {PROBE_MAX_S:g}")
    ] = 10.0
    """After how many seconds one start is tried then. Twice as long after each that fails, up to two minutes. Jitter
    shortens it by up to half."""


@dataclass(frozen=True, kw_only=True)
class MemoryLimits(_Checked):
    """How much memory workers may use, in bytes; ``None`` is no limit.

    It is the memory of a worker and all that it has started. Memory that is shared with other processes counts by its
    share, where the system tells that.
    """

    _path: ClassVar = "memory."

    warn_bytes: PositiveInt | None = None
    """Above this, there is a warning in the log."""
    recycle_bytes: PositiveInt | None = None
    """Above this, a worker is let go when its turn has ended. Its next message gets a new one, in context."""
    kill_bytes: PositiveInt | None = None
    """Above this, a worker is killed at once, and its turn ends as at any other death."""
    total_bytes: PositiveInt | None = None
    """When all workers together are above this, idle ones go dormant, those worth least first, until they are below
    nine tenths of it."""

    def __post_init__(self) -> None:
        """Check that each mark is at least as high as the one before."""
        super().__post_init__()
        names = ("warn_bytes", "recycle_bytes", "kill_bytes")
        marks = [(self._path + name, value) for name in names if (value := getattr(self, name)) is not None]
        for (lower, less), (higher, more) in pairwise(marks):
            if less > more:
                raise SettingsError(f"{lower}={less:,} is over {higher}={more:,}")


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
class PoolSettings(_Checked):
    """How a pool runs. Every field has a default; the unit is the last word of its name (``_s`` is seconds).

    Settings that belong together are groups: ``PoolSettings(timeouts=Timeouts(idle_s=60))``. A path may be given as
    text. ``SettingsError`` for a value, or a pair of values, that makes no sense.
    """

    agent: Annotated[
        str,
        Meta(
            pattern=r"(?s)\A(hermes|echo|[^:]+:.+)\Z",
            description='"hermes", "echo" or "package.module:factory"',
        ),
    ] = "hermes"
    """Who answers: ``hermes``, ``echo`` (no model, no Hermes; for tests and a first try) or ``package.module:factory``
    (see ``hermes_pool_worker.agent``)."""
    agent_paths: Annotated[tuple[str, ...], Meta(description="a tuple of folders (one of them is (folder,))")] = ()
    """Folders added to the worker's import path, for an agent of your own."""
    agent_options: Annotated[Mapping[str, Any], Meta(description="a mapping of names to values")] = field(
        default_factory=dict, repr=False
    )
    """Passed to the agent when it opens: built-in types only. Those of ``hermes`` are listed in the documentation."""
    hermes_home: Folder | None = None
    """``HERMES_HOME`` of the workers; default: the host's variable of that name, else Hermes' own default."""

    worker_python: Annotated[str, Meta(min_length=1, description="the path of an interpreter")] = sys.executable
    """Interpreter that the workers run in; another virtual environment's, when Hermes' pins and yours exclude each
    other. It needs ``msgspec`` and, for ``agent="hermes"``, ``hermes-agent``."""
    worker_env: Annotated[Mapping[str, str], Meta(description="a mapping of text to text")] = field(
        default_factory=dict, repr=False, metadata={"check": _check_variables}
    )
    """Variables added to the worker's environment, which otherwise is a short allow-list of the host's (``PATH``,
    ``HOME``, the locale, proxies and certificates). An API key goes here, or into Hermes' own ``.env``."""
    worker_cwd: Folder | None = None
    """Folder in which workers start, and so the agent's tools; default: ``workspace`` in ``state_dir``."""
    worker_rlimits: Annotated[
        Mapping[str, Annotated[int, Meta(ge=_RLIMIT_NONE, le=2**63 - 1)]],
        Meta(description=f"a mapping of names to whole numbers, {_RLIMIT_NONE} or more"),
    ] = field(default_factory=dict, metadata={"check": _check_rlimits})
    """Limits of the operating system for each worker and, separately, for each process that it starts:
    ``{"RLIMIT_NOFILE": 1024}``. Names of Python's ``resource`` module; -1 is no limit."""
    worker_age_max_s: PositiveFloat | None = None
    """A worker older than this, give or take a tenth, is let go when it has no turn. Hermes does not need it as far as
    was measured: what it does not give back shows in its memory."""

    state_dir: Folder = field(default_factory=_default_state_dir)
    """Folder of the pool's own files. Supervisors that share it are shown together by ``hermes-pool ps``."""
    database_url: Text | None = field(default=None, repr=False)
    """SQLAlchemy URL of the pool's own store; default: an SQLite file in ``state_dir``. Not used when the manager is
    given a ``ConversationStore`` over a table of yours."""

    cluster: Annotated[Literal["alone", "machine"], Meta(description="one of alone and machine")] = "alone"
    """Whether other processes of this machine use the same store. ``alone``: none does. ``machine``: each conversation
    is answered by one of them, and a message that arrives at another goes there."""

    launcher: Annotated[
        Literal["auto", "zygote", "spawn", "portable"], Meta(description="one of auto, zygote, spawn and portable")
    ] = "auto"
    """How workers are started: ``zygote`` (Linux: forked from a process that has imported everything), ``spawn``
    (Linux: own pipes and pidfd), ``portable`` (asyncio's subprocesses), or ``auto`` (the best of the platform)."""
    spares: NonNegativeInt = 0
    """Workers kept ready for conversations to come: started, prepared, bound to none, and used once. They do not count
    against ``workers_max``."""
    workers_max: PositiveInt = 64
    """Most workers at once. At the limit the idle session that is worth least goes dormant to make room. The limit of a
    running pool is changed by ``HermesSessionManager.resize``."""

    busy: Annotated[Literal["wait", "reject"], Meta(description="one of wait and reject")] = "wait"
    """What happens to a message that meets a running turn: it waits, first come first served, or is refused at once."""
    replay: Annotated[
        Literal["until_tool", "always", "never"], Meta(description="one of until_tool, always and never")
    ] = "until_tool"
    """Whether a turn whose worker died is run again: only while no tool has started, always, or never."""
    safe_tools: Annotated[tuple[str, ...], Meta(description="a tuple of names of tools (one of them is (name,))")] = ()
    """Tools that may be used twice without harm, such as one that only reads. A turn that has used no other one may run
    again, and its error may be ``retryable``."""
    on_cancel: Annotated[OnCancel, Meta(description="one of keep and discard")] = "keep"
    """What happens to the history of a turn that is cancelled, stopped, or ended by a time limit. ``keep``: what a
    person has seen of it stays, and the model is told that it ended there; if nothing was seen, no trace stays.
    ``discard``: no trace stays. A turn can be given its own."""
    frame_bytes_max: Annotated[
        int,
        Meta(
            ge=_FRAME_BYTES_LEAST,
            le=_FRAME_BYTES_MOST,
            description=f"a whole number from {_FRAME_BYTES_LEAST:,} (an error report has to fit) to "
            f"{_FRAME_BYTES_MOST:,} (the length word has 32 bits)",
        ),
    ] = 64 * 1024 * 1024
    """Largest frame on the wire in either direction, and so about the longest message or reply."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    queues: QueueLimits = field(default_factory=QueueLimits)
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    starts: StartPolicy = field(default_factory=StartPolicy)
    memory: MemoryLimits = field(default_factory=MemoryLimits)

    @property
    def store_url(self) -> str:
        """SQLAlchemy URL of the store: ``database_url``, or the SQLite file in ``state_dir``."""
        return self.database_url or f"sqlite:///{self.state_dir / 'hermes-pool.db'}"

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ, **given: Any) -> Self:
        """Return the settings that environment variables name; what is ``given`` goes first, a group as a whole.

        A variable is ``HERMES_POOL_`` and the setting's name in capitals, with two underscores after a group:
        ``HERMES_POOL_WORKERS_MAX=8``, ``HERMES_POOL_MEMORY__WARN_BYTES=1000000``. Folders are separated as in ``PATH``,
        mappings are JSON objects, and ``none`` stands for ``None``. An empty variable counts as unset.

        ``SettingsError`` names the variable whose value makes no sense, or that is no setting.
        """
        _check_names(environment)
        values = _read(cls, environment, VARIABLE_PREFIX, without=given)
        for name, group, prefix in _groups():
            if name not in given:
                values[name] = group(**_read(group, environment, prefix))
        return cls(**values, **given)

    def __post_init__(self) -> None:
        """Check the values and bring them into one form; folders become absolute."""
        for name in ("state_dir", "worker_cwd", "hermes_home"):
            if isinstance(value := getattr(self, name), str | Path):
                object.__setattr__(self, name, _absolute(name, value))
        paths = self.agent_paths
        if isinstance(paths, list | tuple):
            made = tuple(
                str(_absolute("agent_paths", path)) if isinstance(path, str | Path) else path for path in paths
            )
            object.__setattr__(self, "agent_paths", made)
        super().__post_init__()
        if self.database_url is None and "?" in str(self.state_dir):
            raise SettingsError(f"state_dir={str(self.state_dir)!r}: a '?' cannot stand in the path of an SQLite file")


def _variables(kind: type[_Checked], prefix: str) -> dict[str, "Field[Any]"]:
    """Return the fields by the names of their variables; a group is none."""
    every = fields(kind)  # type: ignore[arg-type]  # each is a dataclass
    return {prefix + each.name.upper(): each for each in every if _group_of(each) is None}


def _groups() -> Iterator[tuple[str, type[_Checked], str]]:
    """Return the groups, each with its name and what precedes its variables."""
    for each in fields(PoolSettings):
        if group := _group_of(each):
            yield each.name, group, f"{VARIABLE_PREFIX}{each.name.upper()}__"


def _read(
    kind: type[_Checked], environment: Mapping[str, str], prefix: str, *, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values that the environment has for a kind of settings; an empty variable counts as unset."""
    return {
        each.name: _converted(each, _from_text(each, text, variable), variable, strict=False)
        for variable, each in _variables(kind, prefix).items()
        if each.name not in without and (text := environment.get(variable))
    }


def _from_text(each: "Field[Any]", text: str, variable: str) -> object:
    """Return what a variable says, as something that can be converted to the field's type."""
    kind, optional = _without_none(each.type)
    if optional and text.lower() == "none":
        return None
    origin = get_origin(get_args(kind)[0])
    if origin is tuple:
        return tuple(part for part in text.split(os.pathsep) if part)
    if origin is Mapping:
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError):
            raise SettingsError(f"{variable} must be a JSON object") from None
    return text


def _check_names(environment: Mapping[str, str]) -> None:
    """Raise ``SettingsError`` for a variable that looks like a setting and is none."""
    known = [*_variables(PoolSettings, VARIABLE_PREFIX)]
    for _, group, prefix in _groups():
        known += _variables(group, prefix)
    for name in sorted(environment):
        if name.startswith(VARIABLE_PREFIX) and environment[name] and name not in NOT_SETTINGS.union(known):
            nearest = _nearest(name, known)
            raise SettingsError(f"{name} is not a setting; " + (f"did you mean {nearest}?" if nearest else "unset it"))


def _nearest(name: str, known: list[str]) -> str | None:
    """Return the variable that was probably meant: the same words in another order, without the group, or misspelt."""
    by_words = {_words(each.rpartition("__")[2]): each for each in known if "__" in each}
    by_words |= {_words(each): each for each in known}
    by_words |= {each.removeprefix(VARIABLE_PREFIX): each for each in known}
    written = name.removeprefix(VARIABLE_PREFIX).upper()
    for spelling in (_words(written), written):
        if found := difflib.get_close_matches(spelling, by_words, 1):
            return by_words[found[0]]
    return None


def _words(name: str) -> str:
    return " ".join(sorted(name.removeprefix(VARIABLE_PREFIX).replace("__", "_").split("_")))

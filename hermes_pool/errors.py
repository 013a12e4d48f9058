"""Every error that leaves the pool. They share one root, and each class is something that a caller can act on.

Each message says what happened, to which conversation, and what to do. No exception of a library underneath (psutil,
SQLAlchemy, asyncio) reaches a caller.

How ``http_status`` was chosen: 4xx where the request is at fault, or conflicts with another one; 503 where the pool
cannot take the message now; 502 where the agent or its worker failed; 504 where it took too long; 500 where a person
has to fix something. Clients and proxies may repeat 502, 503 and 504 on their own, but not 500.
"""

from collections.abc import Callable, Sequence
from functools import cache
from inspect import Parameter, get_annotations, signature
from typing import Any, ClassVar, TypeVar, get_origin

from hermes_pool.account import ToolUse, TurnAccount
from hermes_pool.crash_report import DeathReport
from hermes_pool_worker.plain import Plain, plain


class HermesPoolError(Exception, Plain):
    """Root of all errors of this library.

    ``conversation_id`` is the conversation concerned, if there is one. Errors can be copied and pickled with all their
    attributes; the cause and the traceback are lost, as with any exception.
    """

    TYPE = "error"
    code: ClassVar[str] = "pool_error"
    """A stable word for programs. Each class has its own, and keeps it even if the class is renamed."""
    http_status: int = 500
    """What a web host should answer."""
    retryable: bool = False
    """Whether the same message may succeed later, with nothing fixed. If ``sent`` is true too, be careful: the
    agent may already have acted on the message, and may act again."""
    retry_after_s: float | None = None
    """In how many seconds to try again; ``None`` if unknown."""
    sent: bool = False
    """Whether the agent may have seen the message."""

    def __init__(self, message: str, *, conversation_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.conversation_id = conversation_id

    def __str__(self) -> str:
        """Return the message, preceded by the conversation."""
        if self.conversation_id is None:
            return self.message
        shown = self.conversation_id if len(self.conversation_id) <= _ID_SHOWN else self.conversation_id[:77] + "..."
        return f"conversation {shown!r}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Return what a web client may know: ``type`` (``error``), ``code``, and what programs read from the error.

        What concerns the machine stays here: the worker's stderr, the stacks, and all of a death but its report's id.
        """
        found = {"type": self.TYPE, **{name: plain(getattr(self, name, None)) for name in self.plain_fields()}}
        found["message"] = plain(self.message.partition(_STDERR)[0])
        report = getattr(self, "report", None)
        if "report_id" in found and report is not None:
            found["report_id"] = report.report_id
        return found

    @classmethod
    def plain_fields(cls) -> dict[str, Any]:
        """Return the fields of ``to_dict``, each with its type."""
        kind: Any = cls  # to the type checker a class is not hashable
        return dict(_plain_fields(kind))

    @classmethod
    def plain_constants(cls) -> dict[str, Any]:
        """Return the fields of ``to_dict`` that are the same for all errors of the class."""
        return {} if cls.__subclasses__() else {"code": cls.code}

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Restore a copy from its attributes, without ``__init__``, whose parameters differ from them."""
        return _restored, (type(self), self.args), self.__dict__


_ID_SHOWN = 80
_Error = TypeVar("_Error", bound=HermesPoolError)


_STDERR = "; its last lines on stderr:\n"
_OF_THE_MACHINE = {"stderr_tail", "what", "stacks", "report"}
"""What does not leave the host with an error."""


@cache
def _plain_fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return the fields of ``to_dict``: what the classes declare, and what their constructors take by name."""
    found: dict[str, Any] = {"code": str, "message": str, "conversation_id": str | None}
    for each in reversed(kind.__mro__):
        if not issubclass(each, HermesPoolError):
            continue
        found |= {name: hint for name, hint in get_annotations(each).items() if str(get_origin(hint)) != str(ClassVar)}
        taken = signature(vars(each)["__init__"]).parameters.values() if "__init__" in vars(each) else ()
        found |= {each.name: each.annotation for each in taken if each.kind is Parameter.KEYWORD_ONLY}
        if "report" in found:
            found["report_id"] = str | None
    return tuple((name, hint) for name, hint in found.items() if name not in _OF_THE_MACHINE)


def _restored(kind: type[_Error], args: tuple[Any, ...]) -> _Error:
    return kind.__new__(kind, *args)


# --- the call is wrong, or comes at the wrong time -------------------------------------------------------------------


class SettingsError(HermesPoolError, ValueError):
    """A setting, or a combination of settings, is invalid. Raised before anything is started."""

    code = "invalid_settings"


class StateDirError(SettingsError):
    """The folder for the pool's files (``state_dir``) cannot be created or written; the message names it."""

    code = "state_dir_unusable"


class InvalidKeyError(HermesPoolError, ValueError):
    """A conversation id or user id is invalid."""

    code = "invalid_key"
    http_status = 400


class InvalidMessageError(HermesPoolError, ValueError):
    """The message is not text. The conversation is unchanged."""

    code = "invalid_message"
    http_status = 400


class MessageTooLargeError(InvalidMessageError):
    """The message is larger than ``frame_bytes_max`` allows. The conversation is unchanged."""

    code = "message_too_large"
    http_status = 413


class MessageQuarantinedError(HermesPoolError):
    """The same message has killed too many workers (``restarts.quarantine_after``). Other messages still work.

    ``fingerprint`` identifies it, for ``release``; ``deaths`` is how many workers it has killed. After
    ``retry_after_s`` seconds it is let in once more. It is not ``retryable``: a person should decide that.
    """

    code = "message_quarantined"
    http_status = 422

    def __init__(
        self,
        message: str,
        *,
        fingerprint: str,
        deaths: int,
        retry_after_s: float | None = None,
        conversation_id: str | None = None,
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s
        self.fingerprint = fingerprint
        self.deaths = deaths


class TurnIdConflictError(HermesPoolError, ValueError):
    """The host gave an id to a message that it had given to another one before. The conversation is unchanged."""

    code = "turn_id_conflict"
    http_status = 409

    def __init__(self, message: str, *, turn_id: str, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.turn_id = turn_id


class InvalidUseError(HermesPoolError, RuntimeError):
    """A method was called where it makes no sense (``Turn.reply`` of a turn that was not entered)."""

    code = "invalid_use"


class PoolClosedError(HermesPoolError):
    """The pool is closing or closed, or was never opened.

    Not retryable: a closed pool stays closed, and a retry loop would never end. The status is 503 nevertheless, since
    the clients of a web host may retry: their next request reaches the host's new process.
    """

    code = "pool_closed"
    http_status = 503


class PoolDrainingError(PoolClosedError):
    """The pool is draining or drained: it begins nothing new until ``resume`` is called.

    Retryable, unlike its parent: a resumed pool takes the message, as does any other pool, and a retry loop ends when
    this pool is closed.
    """

    code = "pool_draining"
    retryable = True


class PoolPausedError(HermesPoolError):
    """The pool is paused, and was not resumed within ``timeouts.wait_s`` (with ``busy="reject"``: at once)."""

    code = "pool_paused"
    http_status = 503
    retryable = True


class ConversationBusyError(HermesPoolError):
    """Another turn of this conversation runs (``busy="reject"``), too many messages wait, or the wait was too long."""

    code = "conversation_busy"
    http_status = 409
    retryable = True


class ConversationElsewhereError(HermesPoolError):
    """Another process answers this conversation, and cannot be reached, or has just given it up."""

    code = "conversation_elsewhere"
    http_status = 503
    retryable = True
    retry_after_s = 1.0

    def __init__(self, message: str, *, conversation_id: str | None = None, address: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.address = address
        """Where that process listens, if it is known."""


class OwnerStoppedError(HermesPoolError):
    """The process that answers this conversation is stopped by a signal. Its worker lives: nobody else may answer."""

    code = "owner_stopped"
    http_status = 503
    retryable = True

    def __init__(self, message: str, *, conversation_id: str | None = None, pid: int | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.pid = pid
        """The pid of that process, on this machine."""


class PoolFullError(HermesPoolError):
    """All ``workers_max`` workers are in use, and no idle one can make room.

    ``position`` is the message's position in the queue, or the one it would have had (1 is next). ``waiting`` is how
    many others are in the queue. ``expected_wait_s`` estimates the wait at that position, in seconds, at the current
    pace (``None``: unknown); ``retry_after_s`` is the same.
    """

    code = "pool_full"
    http_status = 503
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        position: int,
        waiting: int,
        expected_wait_s: float | None = None,
        conversation_id: str | None = None,
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.position = position
        self.waiting = waiting
        self.expected_wait_s = self.retry_after_s = expected_wait_s


# --- no worker is available ------------------------------------------------------------------------------------------


class RestartBackoffError(HermesPoolError):
    """The conversation's workers have died too often: none is started for ``retry_after_s`` seconds."""

    code = "restart_backoff"
    http_status = 503
    retryable = True
    retry_after_s: float

    def __init__(self, message: str, *, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class WorkerStartError(HermesPoolError):
    """No worker could be started. ``step`` names the step that failed: ``launch``, ``hello`` or ``open``.

    ``what`` is the message without the last lines of stderr, which may concern a single conversation.
    """

    code = "worker_start_failed"
    http_status = 503
    retryable = True

    def __init__(
        self, message: str, *, step: str, conversation_id: str | None = None, stderr_tail: Sequence[str] = ()
    ) -> None:
        super().__init__(message + _quoted(stderr_tail), conversation_id=conversation_id)
        self.what = message
        self.step = step
        self.stderr_tail = tuple(stderr_tail)


class WorkerUnusableError(WorkerStartError):
    """No worker can ever start like this: an interpreter, package, folder or setting is missing. Not retried."""

    code = "worker_unusable"
    http_status = 500
    retryable = False


class NoCapacityError(WorkerStartError):
    """The operating system is out of processes, descriptors or memory. Running sessions are not affected."""

    code = "no_capacity"


class WorkerStartTimeoutError(WorkerStartError):
    """The worker was not ready within ``timeouts.start_s``."""

    code = "worker_start_timeout"


class PoolUnavailableError(WorkerStartError):
    """No start was attempted, since earlier ones failed. The next one is allowed in ``retry_after_s`` seconds."""

    code = "pool_unavailable"
    retry_after_s: float

    def __init__(self, message: str, *, step: str, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, step=step, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class PoolUnusableError(PoolUnavailableError, WorkerUnusableError):
    """No start was attempted, since an earlier one has shown that none can succeed. The message has the remedy.

    Once that is fixed, a start is attempted at once if the pool can see it, otherwise after ``retry_after_s`` seconds.
    """

    code = "pool_unusable"
    http_status = 500
    retryable = False


# --- a turn ended without a reply ------------------------------------------------------------------------------------


_REPEATED = (502, 503, 504)


class TurnError(HermesPoolError):
    """A turn ended without a reply. The conversation's next message works.

    ``tools``, ``text``, ``usage``, ``attempts``, ``kept`` and ``model`` tell what is known about the turn: see
    ``TurnAccount``. It is never ``retryable`` once a tool may have acted, nor if the turn was ``kept`` in the history,
    which would then have the message twice.
    """

    code = "turn_failed"
    http_status = 502
    sent = True
    turn_id: str | None = None
    """The turn's id."""
    tools: tuple[ToolUse, ...] = ()
    text: str = ""
    usage: dict[str, int] = {}  # noqa: RUF012 - never changed, and replaced as a whole
    attempts: int = 1
    kept: bool = False
    model: str | None = None
    _final_status: ClassVar[int] = 500
    """The status of what must not be sent again: clients and proxies may repeat 502, 503 and 504 on their own."""

    def account_for(self, turn_id: str, account: TurnAccount) -> None:
        """Take over what is known about the turn, and withdraw the advice to send the message again if need be."""
        self.turn_id = turn_id
        self.tools, self.text, self.usage = account.tools, account.text, account.usage
        self.attempts, self.kept, self.model = account.attempts, account.kept, account.model
        if account.kept or account.may_have_acted:
            self.retryable, self.retry_after_s = False, None
            if self.http_status in _REPEATED:
                self.http_status = self._final_status


class AgentFailedError(TurnError):
    """The agent could not answer (a provider error, say). ``reason`` is a short word for programs."""

    code = "agent_failed"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        reason: str,
        retryable: bool = True,
        retry_after_s: float | None = None,
        conversation_id: str | None = None,
    ) -> None:
        super().__init__(f"the agent failed ({reason}): {message}", conversation_id=conversation_id)
        self.reason = reason
        self.retryable = retryable
        self.retry_after_s = retry_after_s


class WorkerDiedError(TurnError):
    """The worker died in this turn, and no other worker completed it. Raised as one of its two subclasses.

    ``exit`` describes the last death in words, ``returncode`` is its status (negative: the signal; ``None``: unknown),
    ``stderr_tail`` holds the last lines that the worker wrote to stderr, and ``report`` all that is known.
    """

    code = "worker_died"

    def __init__(
        self,
        message: str,
        *,
        exit: str,  # noqa: A002 - the usual word for it
        returncode: int | None,
        conversation_id: str | None = None,
        stderr_tail: Sequence[str] = (),
        report: DeathReport | None = None,
    ) -> None:
        super().__init__(message + _quoted(stderr_tail), conversation_id=conversation_id)
        self.exit = exit
        self.returncode = returncode
        self.stderr_tail = tuple(stderr_tail)
        self.report = report


class WorkerCrashedError(WorkerDiedError):
    """The worker died in this turn, and the turn was given up. No tool had started, or ``replay="always"``.

    Send the message again, but only once: it may be what kills the workers.
    """

    code = "worker_crashed"
    retryable = True


class TurnInterruptedError(WorkerDiedError):
    """The worker died after a tool had started. The turn was not repeated, since the tool may have acted.

    ``tools`` has those that may have acted. Find out whether they did before you send the message again: that would
    repeat their effects. So the error is not retryable, and its status is one that no client repeats on its own.
    """

    code = "turn_interrupted"
    http_status = 500


class TurnTimeoutError(TurnError):
    """The turn ran too long. ``limit`` is the setting that ended it: ``timeouts.turn_s`` or ``timeouts.progress_s``.

    ``verdict`` says what its worker was doing. ``stacks`` are the Python stacks of the worker's threads, if it ignored
    the cancel and was killed.
    """

    code = "turn_timeout"
    http_status = 504
    retryable = True

    def __init__(
        self, message: str, *, limit: str, conversation_id: str | None = None, verdict: str | None = None
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.limit = limit
        self.verdict = verdict
        self.stacks: tuple[str, ...] = ()


class TurnCancelledError(TurnError):
    """The conversation was stopped, or the pool closed, while this turn ran or waited.

    ``sent`` is false if the turn had not begun. The error is ``retryable``, with status 503, if the turn had not begun,
    or if the pool closed while no tool could have acted and nothing was kept. Otherwise the status is 409.
    """

    code = "turn_cancelled"
    _final_status = 409

    def __init__(
        self, message: str, *, sent: bool = True, retryable: bool = False, conversation_id: str | None = None
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.sent = sent
        self.retryable = retryable
        self.http_status = 503 if retryable else 409


# --- the store -------------------------------------------------------------------------------------------------------


class StoreError(HermesPoolError):
    """The database did not answer in time, or refused. It never fails a running turn."""

    code = "store_failed"
    http_status = 503
    retryable = True


class StateNotWritableError(StoreError):
    """The state cannot be stored without loss: ``agent_state`` is no JSON object, or the conversation has no row."""

    code = "state_not_writable"
    http_status = 409
    retryable = False


def _quoted(stderr_tail: Sequence[str]) -> str:
    if not stderr_tail:
        return ""
    return _STDERR + "\n".join(f"    {line}" for line in stderr_tail)

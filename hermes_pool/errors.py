"""Every error that leaves the pool. One root, and each class is one thing that a caller can act on.

All of them say what happened, to which conversation, and what to do. None of an edge's own exceptions (psutil,
SQLAlchemy, asyncio) ever reaches a caller.

How ``http_status`` was chosen: 4xx where the request is at fault, or conflicts with another one; 503 where the pool
cannot take the message now; 502 where the agent or its worker failed with it; 504 where it took too long; 500 where
nothing but a person can help. Clients and proxies repeat 502, 503 and 504 of their own accord, and never 500.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

from hermes_pool.crash_report import DeathReport


class HermesPoolError(Exception):
    """Root of all errors of this library.

    ``conversation_id`` is the conversation it happened to, where there is one. Errors can be copied and pickled, with
    all their attributes; as for any exception, cause and traceback stay behind.
    """

    code: ClassVar[str] = "pool_error"
    """A word for programs. Each class has its own, and it stays the same when a class is renamed."""
    http_status: int = 500
    """What a web host should answer."""
    retryable: bool = False
    """Whether the same message may succeed later without anyone mending anything. Where ``sent`` is true as well, think
    first: the agent may have acted on the message already, and may do so again."""
    retry_after_s: float | None = None
    """In how many seconds to try again; ``None`` where that is not known."""
    sent: bool = False
    """Whether the agent may have seen the message."""

    def __init__(self, message: str, *, conversation_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.conversation_id = conversation_id

    def __str__(self) -> str:
        """Say it, and of which conversation."""
        if self.conversation_id is None:
            return self.message
        shown = self.conversation_id if len(self.conversation_id) <= _ID_SHOWN else self.conversation_id[:77] + "..."
        return f"conversation {shown!r}: {self.message}"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Restore a copy from its attributes, without ``__init__``: that takes other values than it keeps."""
        return _restored, (type(self), self.args), self.__dict__


_ID_SHOWN = 80
_Error = TypeVar("_Error", bound=HermesPoolError)


def _restored(kind: type[_Error], args: tuple[Any, ...]) -> _Error:
    return kind.__new__(kind, *args)


# --- the call itself is wrong, or comes at the wrong time ------------------------------------------------------------


class SettingsError(HermesPoolError, ValueError):
    """A setting, or two together, make no sense; raised before anything is started."""

    code = "invalid_settings"


class StateDirError(SettingsError):
    """The folder of the pool's files (``state_dir``) cannot be made or written; the message names it."""

    code = "state_dir_unusable"


class InvalidKeyError(HermesPoolError, ValueError):
    """A conversation or user id that cannot be one."""

    code = "invalid_key"
    http_status = 400


class InvalidMessageError(HermesPoolError, ValueError):
    """The message is not text. The conversation is as before."""

    code = "invalid_message"
    http_status = 400


class MessageTooLargeError(InvalidMessageError):
    """The message is over ``frame_bytes_max``. The conversation is as before."""

    code = "message_too_large"
    http_status = 413


class MessageQuarantinedError(HermesPoolError):
    """The very same message has ended too many workers (``restarts.quarantine_after``). Any other one works.

    ``fingerprint`` is its name, by which it can be released, and ``deaths`` the number of workers that died of it.
    """

    code = "message_quarantined"
    http_status = 422

    def __init__(self, message: str, *, fingerprint: str, deaths: int, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.fingerprint = fingerprint
        self.deaths = deaths


class PoolClosedError(HermesPoolError):
    """The pool is closing or closed, or was never opened.

    Not retryable: a closed pool stays closed, and a loop that tries again would never end. The status is 503 all the
    same, since the clients of a web host may well try again: their next request gets to the host's new process.
    """

    code = "pool_closed"
    http_status = 503


class PoolDrainingError(PoolClosedError):
    """The pool is being drained, or has been: it begins nothing new until somebody calls ``resume``.

    Retryable, unlike its parent: a resumed pool takes the message, as does any other pool; and a loop that tries again
    ends when this one is closed.
    """

    code = "pool_draining"
    retryable = True


class PoolPausedError(HermesPoolError):
    """The pool is paused, and was not resumed within ``timeouts.wait_s`` (with ``busy="reject"``: at once)."""

    code = "pool_paused"
    http_status = 503
    retryable = True


class ConversationBusyError(HermesPoolError):
    """Another turn of this conversation runs (``busy="reject"``), or too many wait, or the wait took too long."""

    code = "conversation_busy"
    http_status = 409
    retryable = True


class PoolFullError(HermesPoolError):
    """As many workers as allowed run, each with a turn: none can make room.

    ``position`` is the place in the queue that the message had, or would have got (1 is the next to be served),
    ``waiting`` how many others are in the queue, and ``expected_wait_s`` about how many seconds a place like this takes
    at the present pace (``None``: not known yet). ``retry_after_s`` is the same.
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


# --- a worker cannot be had ------------------------------------------------------------------------------------------


class RestartBackoffError(HermesPoolError):
    """The conversation's workers died too often: none is started for ``retry_after_s`` seconds."""

    code = "restart_backoff"
    http_status = 503
    retryable = True
    retry_after_s: float

    def __init__(self, message: str, *, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class WorkerStartError(HermesPoolError):
    """No worker could be started. ``step`` is the one that failed: ``launch``, ``hello`` or ``open``.

    ``what`` is the message without the last lines of stderr, which may be of one conversation only.
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
    """No worker will ever start like this: an interpreter, package, folder or setting is missing. Never tried again."""

    code = "worker_unusable"
    http_status = 500
    retryable = False


class NoCapacityError(WorkerStartError):
    """The operating system has no process, descriptor or memory left to give; sessions that run are not touched."""

    code = "no_capacity"


class WorkerStartTimeoutError(WorkerStartError):
    """The worker was not ready within ``timeouts.start_s``."""

    code = "worker_start_timeout"


class PoolUnavailableError(WorkerStartError):
    """Not even tried: the starts before have failed. The next one is tried in ``retry_after_s`` seconds."""

    code = "pool_unavailable"
    retry_after_s: float

    def __init__(self, message: str, *, step: str, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, step=step, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class PoolUnusableError(PoolUnavailableError, WorkerUnusableError):
    """Not even tried: the start before has shown that none can succeed; the message has the remedy.

    Once that is mended, a start is tried at once where the pool can see it, else in ``retry_after_s`` seconds.
    """

    code = "pool_unusable"
    http_status = 500
    retryable = False


# --- a turn ended without a reply ------------------------------------------------------------------------------------


class TurnError(HermesPoolError):
    """A turn ended without a reply. The conversation's history is as it was before, and its next message works."""

    code = "turn_failed"
    http_status = 502
    sent = True


class AgentFailedError(TurnError):
    """The agent could not answer (a provider's error, say). ``reason`` is a short word for programs."""

    code = "agent_failed"
    retryable = True

    def __init__(self, message: str, *, reason: str, conversation_id: str | None = None) -> None:
        super().__init__(f"the agent failed ({reason}): {message}", conversation_id=conversation_id)
        self.reason = reason


class WorkerDiedError(TurnError):
    """The worker died in this turn, and no other one ran the turn to its end. Raised as one of its two subclasses.

    ``exit`` is the last death in words, ``returncode`` its status (negative: the signal; ``None``: unknown),
    ``stderr_tail`` the last lines that the worker wrote, and ``report`` all that is known of it.
    """

    code = "worker_died"

    def __init__(
        self,
        message: str,
        *,
        exit: str,  # noqa: A002 - the word that people look for
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
    """The worker died in this turn, and so did those that took over. No tool had started, or ``replay="always"``.

    Send the message again, once: it may be what kills the workers.
    """

    code = "worker_crashed"
    retryable = True


class TurnInterruptedError(WorkerDiedError):
    """The worker died after a tool had started: the turn was not repeated, since its effect may have happened.

    ``tools`` are the names of those that may have acted. Find out whether they have before you send the message again:
    it would repeat their effects. So it is not retryable, and its status is one that nothing repeats by itself.
    """

    code = "turn_interrupted"
    http_status = 500

    def __init__(
        self,
        message: str,
        *,
        tools: Sequence[str],
        exit: str,  # noqa: A002 - as above
        returncode: int | None,
        conversation_id: str | None = None,
        stderr_tail: Sequence[str] = (),
        report: DeathReport | None = None,
    ) -> None:
        super().__init__(
            message,
            exit=exit,
            returncode=returncode,
            conversation_id=conversation_id,
            stderr_tail=stderr_tail,
            report=report,
        )
        self.tools = tuple(tools)


class TurnTimeoutError(TurnError):
    """The turn ran too long. ``limit`` is the setting that ended it: ``timeouts.turn_s`` or ``timeouts.progress_s``.

    ``verdict`` is what its worker was judged to be doing, and ``stacks`` are the Python stacks of the worker's threads,
    where it did not obey the cancel and had to be killed.
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

    ``sent`` is false where the turn had not begun. It is ``retryable`` where that, or the end of the pool, is all that
    was wrong; its status is then 503. Else somebody wanted this turn to end, and the status is 409.
    """

    code = "turn_cancelled"

    def __init__(
        self, message: str, *, sent: bool = True, retryable: bool = False, conversation_id: str | None = None
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.sent = sent
        self.retryable = retryable
        self.http_status = 503 if retryable else 409


# --- the store -------------------------------------------------------------------------------------------------------


class StoreError(HermesPoolError):
    """The database did not answer in time, or refused. A turn that runs is never failed by it."""

    code = "store_failed"
    http_status = 503
    retryable = True


class StateNotWritableError(StoreError):
    """The conversation's ``agent_state`` cannot take ours without a loss: it is not a JSON object, or has no row."""

    code = "state_not_writable"
    http_status = 409
    retryable = False


def _quoted(stderr_tail: Sequence[str]) -> str:
    if not stderr_tail:
        return ""
    return "; its last lines on stderr:\n" + "\n".join(f"    {line}" for line in stderr_tail)

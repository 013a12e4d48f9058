"""Every error that leaves the pool. One root, and each class is one thing that a caller can act on.

All of them say what happened, to which conversation, and what to do. None of an edge's own exceptions (psutil,
SQLAlchemy, asyncio) ever reaches a caller.
"""

from collections.abc import Sequence

from hermes_pool.crash_report import DeathReport


class HermesPoolError(Exception):
    """Root of all errors of this library.

    ``conversation_id`` is the conversation that it happened to, where there is one. ``retryable`` says whether the same
    call may succeed later without anybody mending anything.
    """

    retryable = False

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


_ID_SHOWN = 80


# --- the call itself is wrong, or comes at the wrong time ------------------------------------------------------------


class SettingsError(HermesPoolError, ValueError):
    """A setting, or two together, make no sense; raised before anything is started."""


class InvalidKeyError(HermesPoolError, ValueError):
    """A conversation or user id that cannot be one."""


class InvalidMessageError(HermesPoolError, ValueError):
    """The message is no text; it was not sent and the conversation is as before."""


class MessageTooLargeError(InvalidMessageError):
    """The message is over ``frame_bytes_max``; it was not sent and the conversation is as before."""


class MessageQuarantinedError(HermesPoolError):
    """The very same message has ended too many workers (``restarts.quarantine_after``); it was not sent.

    Any other one works.

    ``fingerprint`` is its name, by which it can be released, and ``deaths`` the number of workers that died of it.
    """

    def __init__(self, message: str, *, fingerprint: str, deaths: int, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.fingerprint = fingerprint
        self.deaths = deaths


class PoolClosedError(HermesPoolError):
    """The pool is closing or closed, or was never opened."""


class PoolDrainingError(PoolClosedError):
    """The pool is being drained, or has been: it begins nothing new until somebody calls ``resume``."""


class PoolPausedError(HermesPoolError):
    """The pool is paused, and was not resumed within ``timeouts.wait_s`` (with ``busy="reject"``: at once)."""

    retryable = True


class ConversationBusyError(HermesPoolError):
    """Another turn of this conversation runs (``busy="reject"``), or too many wait, or the wait took too long."""

    retryable = True


class PoolFullError(HermesPoolError):
    """As many workers as allowed run, each with a turn: none can make room.

    ``position`` is the place in line that the message had, or would have got (1 is the next to be served), ``waiting``
    how many others stand in line, and ``expected_wait_s`` about how many seconds a place like this takes at the present
    pace (``None``: not known yet).
    """

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
        self.expected_wait_s = expected_wait_s


# --- a worker cannot be had ------------------------------------------------------------------------------------------


class RestartBackoffError(HermesPoolError):
    """The conversation's workers died too often: none is started for ``retry_after_s`` seconds. Nothing was sent."""

    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class WorkerStartError(HermesPoolError):
    """No worker could be started. ``step`` is the one that failed: ``launch``, ``hello`` or ``open``.

    ``what`` is the message without the last lines of stderr, which may be of one conversation only.
    """

    retryable = True

    def __init__(
        self, message: str, *, step: str, conversation_id: str | None = None, stderr_tail: Sequence[str] = ()
    ) -> None:
        super().__init__(message + _quoted(stderr_tail), conversation_id=conversation_id)
        self.what = message
        self.step = step
        self.stderr_tail = tuple(stderr_tail)


class WorkerUnusableError(WorkerStartError):
    """No worker will ever start like this: a missing interpreter, package, folder or setting. Never tried again."""

    retryable = False


class NoCapacityError(WorkerStartError):
    """The operating system has no process, descriptor or memory left to give; sessions that run are not touched."""


class WorkerStartTimeoutError(WorkerStartError):
    """The worker was not ready within ``timeouts.start_s``."""


class PoolUnavailableError(WorkerStartError):
    """Not even tried: the starts before have failed. The next one is tried in ``retry_after_s`` seconds."""

    def __init__(self, message: str, *, step: str, retry_after_s: float, conversation_id: str | None = None) -> None:
        super().__init__(message, step=step, conversation_id=conversation_id)
        self.retry_after_s = retry_after_s


class PoolUnusableError(PoolUnavailableError, WorkerUnusableError):
    """Not even tried: the start before has shown that none can succeed; the message has the remedy.

    Once that is mended a start is tried at once where the pool can see it, else in ``retry_after_s`` seconds.
    """

    retryable = False


# --- a turn ended without a reply ------------------------------------------------------------------------------------


class TurnError(HermesPoolError):
    """A turn ended without a reply. The conversation's history is as it was before, and its next message works."""


class AgentFailedError(TurnError):
    """The agent could not answer (a provider's error, say). ``reason`` is a short word for programs."""

    retryable = True

    def __init__(self, message: str, *, reason: str, conversation_id: str | None = None) -> None:
        super().__init__(f"the agent failed ({reason}): {message}", conversation_id=conversation_id)
        self.reason = reason


class WorkerCrashedError(TurnError):
    """The worker died in this turn, and so did the one that took over.

    ``exit`` is the last death in words, ``returncode`` its status (negative: the signal; ``None``: unknown),
    ``stderr_tail`` the last lines that the worker wrote, and ``report`` all that is known of it.
    """

    retryable = True

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


class TurnInterruptedError(WorkerCrashedError):
    """The worker died after a tool had started: the turn was not repeated, since its effect may have happened.

    ``tools`` are the names of those that may have acted.
    """

    retryable = False

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

    retryable = True

    def __init__(
        self, message: str, *, limit: str, conversation_id: str | None = None, verdict: str | None = None
    ) -> None:
        super().__init__(message, conversation_id=conversation_id)
        self.limit = limit
        self.verdict = verdict
        self.stacks: tuple[str, ...] = ()


class TurnCancelledError(TurnError):
    """The conversation was stopped, or the pool closed, while this turn ran or waited."""


# --- the store -------------------------------------------------------------------------------------------------------


class StoreError(HermesPoolError):
    """The database did not answer in time, or refused. A turn that runs is never failed by it."""

    retryable = True


class StateNotWritableError(StoreError):
    """The conversation's ``agent_state`` cannot take ours without a loss: it is no JSON object, or has no row."""

    retryable = False


def _quoted(stderr_tail: Sequence[str]) -> str:
    if not stderr_tail:
        return ""
    return "; its last lines on stderr:\n" + "\n".join(f"    {line}" for line in stderr_tail)

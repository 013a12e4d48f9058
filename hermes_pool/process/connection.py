"""One worker: its process, the frames to and from it, its stderr, and its end.

A connection is one incarnation and is never reused. It is opened (launch, hello, open), exchanges frames, and dies. Its
death is reported exactly once, with everything that is known about it. It knows frames, but nothing of turns.
"""

import asyncio
import contextlib
import errno
import functools
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Protocol, TypeVar, assert_never

from hermes_pool.errors import NoCapacityError, WorkerStartError, WorkerStartTimeoutError, WorkerUnusableError
from hermes_pool.policy.liveness import stacks_of
from hermes_pool.process.death import SIGKILL, Death, How, ProcessTree, Stopped, end_tree
from hermes_pool.process.launcher import Command, Exit, Launcher, WorkerProcess
from hermes_pool.process.stderr_tail import LINES_KEPT, StderrTail
from hermes_pool.system import processes
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import contract, wire

LAST_BYTES_S = 0.25
"""How long to read on after a worker's exit, if its pipe stays open: a tool may hold it."""
EXIT_AFTER_EOF_S = 1.0
"""How long a worker may live after it has closed its side of the wire."""
KILLED_EXIT_S = 5.0
"""How long to wait for the exit after SIGKILL. A process in an uninterruptible call takes longer, and is reported."""
STACKS_S = 0.5
"""How long to wait at most for the Python stacks of a worker that hangs."""
LARGE_FRAME_BYTES = 16 * 1024
"""The frame size from which on larger blocks are read."""
UNSOLICITED_MAX = 10_000
"""How many unsolicited frames, such as those of a turn that is over, are tolerated from one turn to the next."""

Answered = TypeVar("Answered", wire.Hello, wire.Prepared, wire.Opened)


class ConnectionListener(Protocol):
    """The owner of a worker: a conversation's worker slot, or the pool's spares."""

    def connection_begun(self, connection: "WorkerConnection") -> None:
        """Take the connection of a worker that is being started."""

    def connection_heard(self, frame: wire.TurnFrame) -> bool:
        """Take a frame of a turn; return whether it was expected."""

    def connection_heard_texts(self, frames: Sequence[wire.FromWorker]) -> int:
        """Take the pieces of text of the running turn with which a batch of frames begins; return how many."""

    def connection_background(self, frame: wire.BackgroundFrame) -> bool:
        """Take a frame about background work; return whether it was expected."""

    def connection_stderr(self, line: str) -> None:
        """Take a line that the worker wrote to its stderr."""

    def connection_died(self, connection: "WorkerConnection", death: Death) -> None:
        """Take the death of the worker. Called once, after the last frame."""


class WorkerConnection:
    """A worker, from its launch to its death.

    ``listener`` changes at most once: when a session takes a spare. ``steps`` holds how long each step of the start
    took, in seconds.
    """

    def __init__(
        self,
        marker: str,
        listener: ConnectionListener,
        *,
        frame_bytes_max: int,
        on_imported: Callable[[list[str]], None],
    ) -> None:
        self.marker = marker
        self.listener = listener
        self.stderr = StderrTail(LINES_KEPT, self._stderr_line)
        self.started_at = monotonic()
        self.steps: dict[str, float] = {}
        self.process: WorkerProcess | None = None
        self.opened: wire.Opened | None = None
        self.death: Death | None = None
        """Set once it has died."""
        self.verdict: str | None = None
        """The diagnosis for which it was killed, if any."""
        self.stacks: tuple[str, ...] = ()
        """The stacks of its threads before that."""
        self._encoder = _encoder_for(frame_bytes_max)
        self._on_imported = on_imported
        loop = asyncio.get_running_loop()
        self._decoder: wire.FrameDecoder[wire.FromWorker] = wire.FrameDecoder(wire.FromWorker, frame_bytes_max)
        # The answers that a start waits for, one after the other.
        self._hello: asyncio.Future[wire.Hello] = loop.create_future()
        self._prepared: asyncio.Future[wire.Prepared] = loop.create_future()
        self._opened: asyncio.Future[wire.Opened] = loop.create_future()
        self._step_failed: Callable[[Death], None] | None = None
        """Fails the step of the start that is waiting for an answer."""
        self._asked: asyncio.Future[Any] | None = None
        """The answer about the history that is waited for, between turns."""
        self._dead = asyncio.Event()
        self._exit: Exit | None = None
        self._ended = False
        self._cause: str | None = None
        self.pinged_at: float | None = None
        """When the oldest unanswered ping was sent (monotonic time); ``None`` if there is none."""
        self._pings = 0
        self._answered = 0  # the number of the latest answered ping
        self._unsolicited = 0
        self._has_reported_imports = False
        self._on_stderr_line: Callable[[str], None] | None = None
        self._wanted = False
        self._timer: asyncio.TimerHandle | None = None

    # --- starting ---

    async def launch(self, launcher: Launcher, command: Command, deadline: float) -> None:
        """Start the process and wait for its hello, until ``deadline`` on the loop's clock.

        If this, ``prepare`` or ``open`` raises, nothing is left of the worker; a ``WorkerStartError`` names the step.
        """
        async with self._step("launch", deadline):
            try:
                self.process = await launcher.launch(command, self)
            except OSError as error:
                raise _launch_error(error, command) from error
        async with self._step("hello", deadline):
            hello = await self._answer(self._hello, "hello")
            if hello.protocol != wire.PROTOCOL:
                raise WorkerUnusableError(
                    f"the worker speaks protocol {hello.protocol} and this supervisor {wire.PROTOCOL}: "
                    "install the same hermes-pool on both sides",
                    step="hello",
                )

    async def prepare(self, request: wire.Prepare, deadline: float) -> wire.Prepared:
        """Prepare a spare worker for a conversation that is not known yet."""
        async with self._step("prepare", deadline):
            self.send(request)
            return await self._answer(self._prepared, "prepare")

    async def open(self, request: "asyncio.Future[wire.Open]", deadline: float) -> None:
        """Bind the worker to a conversation, once ``request`` is done; its answer is then in ``opened``."""
        async with self._step("open", deadline):
            self.send(await asyncio.shield(request))
            self.opened = await self._answer(self._opened, "open")

    @contextlib.asynccontextmanager
    async def _step(self, name: str, deadline: float) -> AsyncIterator[None]:
        began = monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except BaseException as error:
            await _finished(asyncio.ensure_future(self.kill("was given up while starting")))
            if not isinstance(error, TimeoutError):
                raise
            done = ", ".join(f"{step} took {seconds:.2f} s" for step, seconds in self.steps.items())
            raise WorkerStartTimeoutError(
                f"the worker did not complete the step {name!r} within timeouts.start_s"
                + (f" ({done})" if done else ""),
                step=name,
                stderr_tail=self.stderr.lines(),
            ) from None
        self.steps[name] = monotonic() - began

    async def _answer(self, answer: "asyncio.Future[Answered]", step: str) -> Answered:
        if self.death is not None and not answer.done():
            raise self._died_early(self.death, step)

        def fail(death: Death) -> None:
            if not answer.done():
                answer.set_exception(self._died_early(death, step))

        self._step_failed = fail
        return await answer

    def _died_early(self, death: Death, step: str) -> WorkerStartError:
        tail = death.stderr_tail
        if death.exit.returncode == contract.EXIT_UNUSABLE and death.cause is None:
            remedy = tail[-1] if tail else "it gave no reason"
            return WorkerUnusableError(f"no worker can start like this: {remedy}", step=step, stderr_tail=tail[:-1])
        return WorkerStartError(f"the worker {death} before it was ready (step {step!r})", step=step, stderr_tail=tail)

    # --- speaking ---

    def send(self, message: wire.Message) -> None:
        """Send a message; raise ``wire.FrameTooLargeError`` if it is larger than the worker accepts."""
        if self.process is not None:
            self.process.write(self._encoder.encode(message))

    def hand_over(self, turn: wire.Turn) -> None:
        """Hand it a turn. Restarts the count of unsolicited frames, unless there were already too many."""
        if self._unsolicited < UNSOLICITED_MAX:
            self._unsolicited = 0
        if self.process is not None:  # like ``send``, with one call less on the path of every turn
            self.process.write(self._encoder.encode(turn))

    async def ask_history(
        self, request: wire.Flush | wire.ReadTurns, timeout_s: float
    ) -> wire.Flushed | wire.TurnsRead:
        """Ask the idle worker about its history; one question at a time. Raise ``TimeoutError`` if no answer comes."""
        self._asked = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                self.send(request)
                answer: wire.Flushed | wire.TurnsRead = await self._asked
                return answer
        finally:
            self._asked = None

    def ping(self) -> None:
        """Send a ping, unless one is still unanswered. Whatever the worker sends next counts as the answer."""
        if self.pinged_at is None:
            self.pinged_at = monotonic()
            self._pings += 1
            self.send(wire.Ping(self._pings))

    async def take_stacks(self) -> tuple[str, ...]:
        """Return the Python stacks of all its threads, or nothing if it does not write them in time.

        The signal interrupts system calls of the worker: call this only right before a kill.
        """
        process = self.process
        if process is None or contract.STACKS_SIGNAL is None or self._exit is not None:
            return ()
        if not await in_thread_or_here(partial(processes.catches, process.pid, contract.STACKS_SIGNAL)):
            return ()
        lines: list[str] = []
        self._on_stderr_line = lines.append
        process.send_signal(contract.STACKS_SIGNAL)
        count = -1
        loop = asyncio.get_running_loop()
        end = loop.time() + STACKS_S
        while loop.time() < end and (count != len(lines) or not lines):  # until no more lines arrive
            count = len(lines)
            await asyncio.sleep(STACKS_S / 10)
        self._on_stderr_line = None
        self.stacks = stacks_of(lines)
        return self.stacks

    def pause_reading(self) -> None:
        """Stop reading, to slow the worker down. Does nothing after its exit: the last frames must be read."""
        if self.process is not None and self._exit is None:
            self.process.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading."""
        if self.process is not None:
            self.process.resume_reading()

    # --- what the process does (launcher.ProcessListener) ---

    def stdout_received(self, data: bytes | memoryview) -> bool:
        """Take the next bytes of the wire; return whether the worker is sending large frames."""
        self.pinged_at = None
        decoder = self._decoder
        frames = decoder.feed(data)
        # A model that is faster than this host sends many pieces at once.
        taken = 0 if len(frames) == 1 or self._unsolicited else self.listener.connection_heard_texts(frames)
        for frame in frames[taken:] if taken else frames:
            if self._unsolicited >= UNSOLICITED_MAX:  # it is condemned, and nothing that it sends counts any more
                return False
            expected = (
                self.listener.connection_heard(frame) if isinstance(frame, wire.TurnMessage) else self._heard(frame)
            )
            if not expected:
                self._unsolicited += 1
                if self._unsolicited == UNSOLICITED_MAX:
                    self.condemn(f"broke the protocol ({UNSOLICITED_MAX:,} unsolicited frames)")
        if decoder.failed is not None and self._cause is None:
            self.condemn(f"broke the protocol ({decoder.failed})")
        return decoder.missing > LARGE_FRAME_BYTES or len(data) >= LARGE_FRAME_BYTES * (len(frames) or 1)

    def _heard(self, frame: wire.WorkerFrame) -> bool:
        """Take a frame that belongs to no turn; return whether it was expected. A few stray ones are harmless."""
        match frame:
            case wire.BackgroundStarted() | wire.BackgroundFinished():
                return self.listener.connection_background(frame)
            case wire.Pong(number):
                expected = self._answered < number <= self._pings
                if expected:
                    self._answered = number
                return expected
            case wire.Imported(modules):
                expected = not self._has_reported_imports
                if expected:
                    self._has_reported_imports = True
                    self._on_imported(modules)
                return expected
            case wire.Hello():
                return _resolve(frame, self._hello)
            case wire.Prepared():
                return _resolve(frame, self._prepared)
            case wire.Opened():
                return _resolve(frame, self._opened)
            case wire.Flushed() | wire.TurnsRead():
                return self._asked is not None and _resolve(frame, self._asked)
            case wire.Closed():
                return self._wanted
        assert_never(frame)

    def stdout_ended(self) -> None:
        """Expect the exit, since the wire has ended. A process that stays is killed."""
        self._ended = True
        if self._exit is not None:
            self._die()
        elif self._timer is None:
            self._after(EXIT_AFTER_EOF_S, lambda: self.condemn("closed its side of the wire"))

    def stdin_ended(self) -> None:
        """Expect the exit, since the worker no longer reads. A process that stays is killed."""
        if self._exit is None and self._timer is None:
            self._after(EXIT_AFTER_EOF_S, lambda: self.condemn("closed its side of the wire"))

    def stderr_received(self, data: bytes | memoryview) -> None:
        """Take the next bytes of its stderr."""
        self.stderr.feed(data)

    def exited(self, status: Exit) -> None:
        """Take the exit status. What the worker wrote before is still read, for a limited time."""
        self._exit = status
        self.resume_reading()
        if self._ended:
            self._die()
        else:
            self._after(LAST_BYTES_S, self._die)

    def _after(self, delay_s: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, act)

    def condemn(self, cause: str) -> None:
        """Kill it at once; ``cause`` is worded to follow "the worker". This counts as an unwanted death."""
        self._cause = self._cause or cause
        if self.process is not None:
            self.process.send_signal(SIGKILL)

    def _die(self) -> None:
        if self.death is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        assert self._exit is not None  # noqa: S101 - for the type checker
        if self.process is not None:
            self.process.close()
        cause = self._cause
        if cause is None and self._decoder.mid_frame:
            cause = "broke off inside a frame"
        self.death = Death(self._exit, self.stderr.lines(), cause, self._wanted)
        self._dead.set()
        if self._step_failed is not None:
            self._step_failed(self.death)
        if self._asked is not None and not self._asked.done():
            self._asked.set_exception(TimeoutError())
        self.listener.connection_died(self, self.death)

    def _stderr_line(self, line: str) -> None:
        if self._on_stderr_line is not None:
            self._on_stderr_line(line)
        self.listener.connection_stderr(line)

    # --- ending ---

    def is_frozen(self) -> bool:
        """Return whether a signal or a debugger has stopped it, so that it would not begin a turn."""
        return self.process is not None and self.death is None and processes.is_frozen(self.process.pid)

    async def dead(self) -> Death:
        """Wait for the death and return it."""
        await self._dead.wait()
        assert self.death is not None  # noqa: S101 - for the type checker
        return self.death

    async def stop(self, close_grace_s: float, term_grace_s: float) -> Stopped:
        """Ask it to close, then send SIGTERM, then SIGKILL to it and all its descendants; each step is bounded."""
        self._wanted = True  # before anything is sent, so that the death is known to be wanted
        how: How = "closed"
        tree = await self._tree()
        self.send(wire.Close())
        if not await self._died_within(close_grace_s):
            how = await self._signal(term_grace_s, tree)
        return await self._stopped(how, tree)

    async def kill(self, cause: str, term_grace_s: float = 0.0) -> Stopped:
        """Kill it; ``cause`` is worded to follow "the worker". SIGTERM comes first if ``term_grace_s`` is over 0."""
        self._wanted = True
        self._cause = self._cause or cause
        how: How = "killed"
        tree: ProcessTree = {}
        if self.process is not None and self.death is None:
            how = await self._signal(term_grace_s, tree)
        return await self._stopped(how, tree)

    async def _tree(self) -> ProcessTree:
        """Return the processes below it. Works only while it lives: afterwards they cannot be attributed to it."""
        if self.process is None or self.death is not None:
            return {}
        found = await in_thread_or_here(partial(processes.descendants, self.process.pid, self.process.create_time))
        return {each.pid: each for each in found}

    async def _signal(self, term_grace_s: float, tree: ProcessTree) -> How:
        """End it by signals, and all that is below it; add that to ``tree``, and return what ended the worker."""
        process = self.process
        if process is None:
            return "closed"
        tree |= await self._tree()
        if term_grace_s > 0:
            self.send(wire.Close())  # it outlives a SIGTERM that the pool does not mean
            process.send_signal(signal.SIGTERM)
            if await self._died_within(term_grace_s):
                return "terminated"
        process.send_signal(SIGKILL)
        await in_thread_or_here(partial(processes.kill, tree.values()))
        await self._died_within(KILLED_EXIT_S)
        return "killed"

    async def _stopped(self, how: How, tree: ProcessTree) -> Stopped:
        status = self.death.exit if self.death is not None else Exit(None)
        if self.process is None:
            return Stopped(status, how)
        worker = self.process.pid, self.process.create_time
        strays, left = await in_thread_or_here(partial(end_tree, worker, self.marker, tree))
        return Stopped(status, how, strays, worker, left)

    async def _died_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        return self._dead.is_set()


@functools.cache
def _encoder_for(frame_bytes_max: int) -> wire.FrameEncoder:
    """Return an encoder that connections share: a frame is written or copied before the next one is encoded."""
    return wire.FrameEncoder(wire.worker_takes(frame_bytes_max))


async def _finished(ending: asyncio.Future[Stopped]) -> None:
    """Wait for the end of a worker even if the caller is cancelled: nothing of the worker may be left."""
    while not ending.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({ending})


def _resolve(frame: Answered, answer: "asyncio.Future[Answered]") -> bool:
    """Pass a frame to the step of the start that waits for it; return whether it is the first one."""
    if answer.done():
        return False
    answer.set_result(frame)
    return True


def _launch_error(error: OSError, command: Command) -> WorkerStartError:
    """Return the error for what really failed: the operating system reports several causes as "not found"."""
    program = command.argv[0]
    if not command.cwd.is_dir():
        return WorkerUnusableError(
            f"the working folder {command.cwd} does not exist: create it, or correct worker_cwd", step="launch"
        )
    if isinstance(error, FileNotFoundError):
        return WorkerUnusableError(f"there is no interpreter {program}: correct worker_python", step="launch")
    if isinstance(error, PermissionError):
        return WorkerUnusableError(
            f"{program} may not be executed: correct its permissions, or worker_python", step="launch"
        )
    if error.errno in _CAPACITY:
        return NoCapacityError(
            f"the system has no resources for another worker ({error.strerror}): raise the limit on descriptors or "
            "processes, or lower workers_max",
            step="launch",
        )
    return WorkerStartError(f"the worker could not be launched: {error}", step="launch")


_CAPACITY = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC})

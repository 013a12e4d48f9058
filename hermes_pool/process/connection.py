"""One worker: its process, the frames to and from it, its log, and how it ends.

A connection is one incarnation and is never reused. It is opened (launch, hello, open), speaks, and dies exactly once;
its death is reported once, with everything that is known of it. It knows messages and nothing of turns.
"""

import asyncio
import contextlib
import errno
import functools
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, Protocol

from hermes_pool.errors import NoCapacityError, WorkerStartError, WorkerStartTimeoutError, WorkerUnusableError
from hermes_pool.policy.liveness import stacks_of
from hermes_pool.process.launcher import Command, Exit, Launcher, WorkerProcess
from hermes_pool.process.stderr_tail import StderrTail
from hermes_pool.system import processes
from hermes_pool.system.threads import in_thread_or_here
from hermes_pool_worker import wire

_SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Windows has none, and its SIGTERM cannot be ignored."""

EXIT_UNUSABLE = 78
"""``EX_CONFIG``: the worker says that it can never start like this, and why, in its last line."""

LAST_BYTES_S = 0.25
"""How long a dead worker's pipe may stay open (a tool may hold it) before its last bytes count as read."""
DEAF_EXIT_S = 1.0
"""How long a worker that has closed its side of the wire may live on."""
KILLED_EXIT_S = 5.0
"""How long a process may take to go after SIGKILL; one in an uninterruptible call takes longer, and is reported."""
STRAYS_ROUNDS_MAX = 3
"""How often what carries a stopped worker's marker is looked for: what is being ended may still fork."""
STACKS_S = 0.5
"""How long the Python stacks of a worker that hangs may take to come, at most."""
LARGE_FRAME_BYTES = 16 * 1024
"""While frames are that large, much is read at once."""
UNASKED_MAX = 10_000
"""Most frames of a worker that nobody waits for, such as those of a turn that is over, from one turn to the next."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended.

    ``exit`` is the process's status, ``cause`` what led to it as far as we did it (a broken protocol, a limit), and
    ``wanted`` whether the pool had decided it before the first signal.
    """

    exit: Exit
    stderr_tail: tuple[str, ...]
    cause: str | None = None
    wanted: bool = False

    def __str__(self) -> str:
        """Say it in words."""
        if self.cause:
            return f"{self.cause} and {self.exit}"
        if self.exit.returncode == -_SIGKILL and not self.wanted:
            return f"{self.exit}, possibly because the machine is out of memory"
        return str(self.exit)


@dataclass(frozen=True, slots=True)
class Stopped:
    """What it took to stop a worker, what went with it, and the proof that nothing of it is left."""

    exit: Exit
    how: str
    """``closed`` by itself, ``terminated`` or ``killed``."""
    strays: tuple[int, ...] = ()
    """Pids of what its tools had left running and is ended now, be it by the pool (with SIGKILL) or by the worker."""
    worker: tuple[int, float] | None = None
    """Pid and create time (seconds since the epoch); ``None`` where no process was ever started."""
    left: tuple[int, ...] = ()
    """Pids that, by the process table, live on or may do so after all that: of the worker, of what was below it when
    its end began, and of what carries its marker. Empty but for a process that the kernel itself cannot end."""


class ConnectionListener(Protocol):
    """Whose worker it is: a session, or the pool's spares."""

    def connection_begun(self, connection: "WorkerConnection") -> None:
        """Take note that this worker, which is not ready yet, is started for it."""

    def connection_heard(self, message: Any) -> None:
        """Take a frame that belongs to a turn."""

    def connection_background(self, message: wire.BackgroundStarted | wire.BackgroundFinished) -> None:
        """Take note of work that outlasts its turn, and of its end."""

    def connection_said(self, line: str) -> None:
        """Take a line that the worker wrote to its stderr."""

    def connection_died(self, connection: "WorkerConnection", death: Death) -> None:
        """Take note of its death; called once, after the last frame."""


class WorkerConnection:
    """A worker, from its launch to its death.

    ``listener`` may change once: when a spare becomes a session's. ``steps`` are the seconds that each step of the
    start took.
    """

    def __init__(
        self,
        marker: str,
        listener: ConnectionListener,
        *,
        frame_bytes_max: int,
        stderr_lines_max: int,
        on_imported: Callable[[list[str]], None],
    ) -> None:
        self.marker = marker
        self.listener = listener
        self.stderr = StderrTail(stderr_lines_max, self._said)
        self.started_at = monotonic()
        self.steps: dict[str, float] = {}
        self.process: WorkerProcess | None = None
        self.opened: wire.Opened | None = None
        self.death: Death | None = None
        """Set when it is over."""
        self.verdict: str | None = None
        self.stacks: tuple[str, ...] = ()
        """What was judged of it, and where its threads were, before it was killed for that."""
        self._encoder = _encoder_for(frame_bytes_max)
        self._on_imported = on_imported
        loop = asyncio.get_running_loop()
        self._decoder: wire.FrameDecoder[Any] = wire.FrameDecoder(wire.FromWorker, frame_bytes_max)
        # What the start waits for, each once.
        self._awaited: dict[type[wire.Message], asyncio.Future[Any]] = {
            kind: loop.create_future() for kind in (wire.Hello, wire.Prepared, wire.Opened)
        }
        self._waits_for: tuple[asyncio.Future[Any], str] | None = None
        self._dead = asyncio.Event()
        self._exit: Exit | None = None
        self._ended = False
        self._cause: str | None = None
        self.asked_at: float | None = None
        """When it was asked for a sign of life (monotonic time); ``None`` when it owes none."""
        self._pings = 0
        self._answered = 0  # the latest ping that was
        self._unasked = 0
        self._has_told_imports = False
        self._overhears: Callable[[str], None] | None = None
        self._wanted = False
        self._timer: asyncio.TimerHandle | None = None

    # --- starting ---

    async def launch(self, launcher: Launcher, command: Command, deadline: float) -> None:
        """Start the process and wait for its greeting, until ``deadline`` (of the loop's clock).

        Here and in the next two, a ``WorkerStartError`` names the step that failed, and nothing is left of the worker.
        """
        async with self._step("launch", deadline):
            try:
                self.process = await launcher.launch(command, self)
            except OSError as error:
                raise _launch_error(error, command) from error
        async with self._step("hello", deadline):
            hello = await self._answer(wire.Hello, "hello")
            if hello.protocol != wire.PROTOCOL:
                raise WorkerUnusableError(
                    f"the worker speaks protocol {hello.protocol} and this supervisor {wire.PROTOCOL}: "
                    "install the same hermes-pool on both sides",
                    step="hello",
                )

    async def prepare(self, request: wire.Prepare, deadline: float) -> wire.Prepared:
        """Have it get ready for a conversation that is not known yet."""
        async with self._step("prepare", deadline):
            self.send(request)
            prepared: wire.Prepared = await self._answer(wire.Prepared, "prepare")
        return prepared

    async def open(self, request: "asyncio.Future[wire.Open]", deadline: float) -> None:
        """Bind it to a conversation, once it is known which; ``opened`` is its answer."""
        async with self._step("open", deadline):
            self.send(await asyncio.shield(request))
            self.opened = await self._answer(wire.Opened, "open")

    @contextlib.asynccontextmanager
    async def _step(self, name: str, deadline: float) -> AsyncIterator[None]:
        began = monotonic()
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except BaseException as error:
            await asyncio.shield(self.kill("its start was given up"))
            if not isinstance(error, TimeoutError):
                raise
            done = ", ".join(f"{step} took {seconds:.2f} s" for step, seconds in self.steps.items())
            raise WorkerStartTimeoutError(
                f"the worker did not get past the step {name!r} within start_timeout_s"
                + (f" ({done})" if done else ""),
                step=name,
                stderr_tail=self.stderr.lines(),
            ) from None
        self.steps[name] = monotonic() - began

    async def _answer(self, kind: type[wire.Message], step: str) -> Any:
        future = self._awaited[kind]
        if self.death is not None and not future.done():
            raise self._died_early(self.death, step)
        self._waits_for = (future, step)
        return await future

    def _died_early(self, death: Death, step: str) -> WorkerStartError:
        tail = death.stderr_tail
        if death.exit.returncode == EXIT_UNUSABLE and death.cause is None:
            remedy = tail[-1] if tail else "it did not say why"
            return WorkerUnusableError(f"no worker can start like this: {remedy}", step=step, stderr_tail=tail[:-1])
        return WorkerStartError(f"the worker {death} before it was ready (step {step!r})", step=step, stderr_tail=tail)

    # --- speaking ---

    def send(self, message: wire.Message) -> None:
        """Send a message of ours; ``wire.FrameTooLargeError`` when it is over what the worker takes."""
        if self.process is not None:
            self.process.write(self._encoder.encode(message))

    def hand_over(self, turn: wire.Turn) -> None:
        """Give it a turn; what it sends unasked is counted anew from here on, unless it was too much already."""
        if self._unasked < UNASKED_MAX:
            self._unasked = 0
        self.send(turn)

    def ask(self) -> None:
        """Ask for a sign of life, unless it owes one already; whatever it sends next is one."""
        if self.asked_at is None:
            self.asked_at = monotonic()
            self._pings += 1
            self.send(wire.Ping(self._pings))

    async def take_stacks(self) -> tuple[str, ...]:
        """Return the Python stacks of all its threads, or nothing where it cannot tell them in time.

        It interrupts what a thread waits for in the system: to be asked right before a kill, and of nobody else.
        """
        process = self.process
        if process is None or processes.STACKS_SIGNAL is None or self._exit is not None:
            return ()
        if not await in_thread_or_here(partial(processes.catches, process.pid, processes.STACKS_SIGNAL)):
            return ()
        lines: list[str] = []
        self._overhears = lines.append
        process.send_signal(processes.STACKS_SIGNAL)
        told = -1
        loop = asyncio.get_running_loop()
        end = loop.time() + STACKS_S
        while loop.time() < end and (told != len(lines) or not lines):  # until nothing more comes
            told = len(lines)
            await asyncio.sleep(STACKS_S / 10)
        self._overhears = None
        self.stacks = stacks_of(lines)
        return self.stacks

    def pause_reading(self) -> None:
        """Slow the worker down: nobody consumes what it sends. Not once it has ended, or its end would go unseen."""
        if self.process is not None and self._exit is None:
            self.process.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self.process is not None:
            self.process.resume_reading()

    # --- what the process does (launcher.ProcessListener) ---

    def stdout_received(self, data: bytes | memoryview) -> bool:
        """Take the next bytes of the wire; say whether its frames are large ones at present."""
        self.asked_at = None
        decoder = self._decoder
        messages = decoder.feed(data)
        for message in messages:
            if self._unasked >= UNASKED_MAX:  # it is condemned: nothing that it says counts any more
                return False
            if isinstance(message, wire.TurnMessage):
                self.listener.connection_heard(message)
            elif isinstance(message, wire.BackgroundStarted | wire.BackgroundFinished):
                self.listener.connection_background(message)
            elif isinstance(message, wire.Imported) and not self._has_told_imports:
                self._has_told_imports = True
                self._on_imported(message.modules)
            elif isinstance(message, wire.Pong) and self._answered < message.number <= self._pings:
                self._answered = message.number
            elif (awaited := self._awaited.get(type(message))) is not None and not awaited.done():
                awaited.set_result(message)
            else:
                self.note_unasked()
        if decoder.failed is not None and self._cause is None:
            self.condemn(f"broke the protocol ({decoder.failed})")
        return decoder.missing > LARGE_FRAME_BYTES or len(data) >= LARGE_FRAME_BYTES * (len(messages) or 1)

    def note_unasked(self) -> None:
        """Take note of a frame that nobody waits for. Some are chance; one that sends them without an end attacks."""
        self._unasked += 1
        if self._unasked == UNASKED_MAX:
            self.condemn(f"broke the protocol ({UNASKED_MAX:,} frames that nobody had asked for)")

    def stdout_ended(self) -> None:
        """Take note that the wire has ended: the process must be ending, or is made to."""
        self._ended = True
        if self._exit is not None:
            self._die()
        elif self._timer is None:
            self._after(DEAF_EXIT_S, lambda: self.condemn("closed its side of the wire"))

    def stdin_ended(self) -> None:
        """Take note that it reads no more: the process must be ending, or is made to."""
        if self._exit is None and self._timer is None:
            self._after(DEAF_EXIT_S, lambda: self.condemn("closed its side of the wire"))

    def stderr_received(self, data: bytes | memoryview) -> None:
        """Take the next bytes of its log."""
        self.stderr.feed(data)

    def exited(self, status: Exit) -> None:
        """Take note of its end; what it wrote before is still read, unless a tool holds the pipe open."""
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
        """Kill it at once for ``cause``, which follows "the worker". It counts as a death that nobody wanted."""
        self._cause = self._cause or cause
        if self.process is not None:
            self.process.send_signal(_SIGKILL)

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
            cause = "stopped inside a frame"
        self.death = Death(self._exit, self.stderr.lines(), cause, self._wanted)
        self._dead.set()
        if self._waits_for is not None:
            future, step = self._waits_for
            if not future.done():
                future.set_exception(self._died_early(self.death, step))
        self.listener.connection_died(self, self.death)

    def _said(self, line: str) -> None:
        if self._overhears is not None:
            self._overhears(line)
        self.listener.connection_said(line)

    # --- ending ---

    def is_frozen(self) -> bool:
        """Say whether it is stopped, by a signal or a debugger, and so would keep what it is given."""
        return self.process is not None and self.death is None and processes.is_frozen(self.process.pid)

    async def dead(self) -> Death:
        """Wait for the end, whoever causes it."""
        await self._dead.wait()
        assert self.death is not None  # noqa: S101 - for the type checker
        return self.death

    async def stop(self, close_grace_s: float, term_grace_s: float) -> Stopped:
        """Ask it to close, then SIGTERM, then SIGKILL it and all its descendants; each step has its limit."""
        self._wanted = True  # before anything is sent, so that the death is known to be wanted
        how = "closed"
        family = await self._family()
        self.send(wire.Close())
        if not await self._died_within(close_grace_s):
            how = await self._signal(term_grace_s, family)
        return await self._stopped(how, family)

    async def kill(self, cause: str, term_grace_s: float = 0.0) -> Stopped:
        """End it without asking, for ``cause``; SIGTERM comes first where it may take a moment."""
        self._wanted = True
        self._cause = self._cause or cause
        how = "killed"
        family: Family = {}
        if self.process is not None and self.death is None:
            how = await self._signal(term_grace_s, family)
        return await self._stopped(how, family)

    async def _family(self) -> "Family":
        """Return what is below it. To be asked while it lives: afterwards nothing tells whose they were."""
        if self.process is None or self.death is not None:
            return {}
        found = await in_thread_or_here(partial(processes.descendants, self.process.pid, self.process.create_time))
        return {each.pid: each for each in found}

    async def _signal(self, term_grace_s: float, family: "Family") -> str:
        """Signal it and all that is below it, and add that to ``family``; return the how at which it went."""
        process = self.process
        if process is None:
            return "closed"
        family |= await self._family()
        if term_grace_s > 0:
            process.send_signal(signal.SIGTERM)
            if await self._died_within(term_grace_s):
                return "terminated"
        process.send_signal(_SIGKILL)
        await in_thread_or_here(partial(processes.kill, family.values()))
        await self._died_within(KILLED_EXIT_S)
        return "killed"

    async def _stopped(self, how: str, family: "Family") -> Stopped:
        status = self.death.exit if self.death is not None else Exit(None)
        if self.process is None:
            return Stopped(status, how)
        worker = self.process.pid, self.process.create_time
        strays, left = await in_thread_or_here(partial(_end_family, worker, self.marker, family))
        return Stopped(status, how, strays, worker, left)

    async def _died_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._dead.wait()
        return self._dead.is_set()


@functools.cache
def _encoder_for(frame_bytes_max: int) -> wire.FrameEncoder:
    """Return one for all connections of a kind: a frame is with the pipe, or copied, before the next one is made."""
    return wire.FrameEncoder(wire.worker_takes(frame_bytes_max))


def kill_strays(marker: str) -> tuple[int, ...]:
    """End what a worker's tools have left: every process that carries its marker. Return the pids; blocks."""
    return tuple(processes.kill(processes.find_by_marker(marker)))


Family = dict[int, Any]
"""Processes (``psutil.Process``) by their pid."""


def _end_family(worker: tuple[int, float], marker: str, family: Family) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """End what is left of a stopped worker; return the pids that are gone, and those that are not. Blocks."""
    processes.kill(family.values())
    left = {pid for pid, each in family.items() if _may_live(pid, each.create_time())}
    strays = set(family) - left
    marked = processes.find_by_marker(marker)
    for _ in range(STRAYS_ROUNDS_MAX):
        if not marked:
            break
        strays |= set(processes.kill(marked))
        marked = processes.find_by_marker(marker)
    left |= {each.pid for each in marked}
    if _may_live(*worker):
        left.add(worker[0])
    return tuple(sorted(strays - left - {worker[0]})), tuple(sorted(left))


def _may_live(pid: int, create_time: float) -> bool:
    return processes.identify(pid, create_time) in (processes.IdentityCheck.CURRENT, processes.IdentityCheck.UNKNOWN)


def _launch_error(error: OSError, command: Command) -> WorkerStartError:
    """Say which of the things that the operating system calls "not found" it was."""
    program = command.argv[0]
    if not command.cwd.is_dir():
        return WorkerUnusableError(
            f"the working folder {command.cwd} does not exist: make it, or set worker_cwd", step="launch"
        )
    if isinstance(error, FileNotFoundError):
        return WorkerUnusableError(f"there is no interpreter {program}: correct worker_python", step="launch")
    if isinstance(error, PermissionError):
        return WorkerUnusableError(f"{program} may not be executed: correct worker_python", step="launch")
    if error.errno in _CAPACITY:
        return NoCapacityError(
            f"there is no room for another worker here ({error.strerror}): raise the limit of descriptors or "
            "processes, or lower workers_max",
            step="launch",
        )
    return WorkerStartError(f"the worker could not be launched: {error}", step="launch")


_CAPACITY = frozenset({errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC})

"""Starts workers by forking them from a zygote: a process that has imported all that they need.

The supervisor makes the pipes, passes the child's ends over a socket, and gets a pid and its pidfd back. The zygote
reaps its children and reports how they ended. When it dies, the workers live on and the next launch starts another one;
when a file that it read has changed, its successor is started first and takes over when it is ready. Whenever no zygote
can fork, the worker is spawned instead, and the log says so.

What to import is learnt and not listed: the agent's own ``preload`` comes first, and each worker tells after its first
turn what it still had to import; that is kept in a file and given to the next zygote.
"""

import array
import asyncio
import contextlib
import errno
import hashlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hermes_pool.process.launcher import Command, Exit, Listener, WorkerProcess
from hermes_pool.process.pipes import ChildPipes
from hermes_pool.process.spawn import PidfdProcess, SpawnLauncher, with_lifeline
from hermes_pool.system.file_stamps import Stamps, stamps_of
from hermes_pool_worker import procfs, wire
from hermes_pool_worker.contract import DATAGRAM_BYTES_MAX, ZYGOTE_OPTION

LEAVE_S = 3.0
"""How long a zygote may take to leave by itself."""
STATUS_S = 0.5
"""How long the report of a worker's exit status may take after the pidfd has told of the exit."""
RETRY_AFTER_S = 30.0
"""After a zygote that could not be started, workers are spawned for this long before another one is tried."""
LEARNT_CHARS_MAX = 100_000
"""All names of modules that are remembered, together: they go to a zygote in one datagram. Hermes has 30,000."""
MODULES_WORTH_IT = 10
"""A zygote is replaced when workers had to import at least this many modules themselves."""
STDERR_BYTES_KEPT = 4096


class ZygoteLauncher:
    """Forks workers where possible and spawns them where not. One zygote at a time serves; a successor may warm up."""

    def __init__(
        self,
        command: Command,
        options: Mapping[str, Any],
        learnt_in: Path,
        ready_timeout_s: float,
        log: Any,
        *,
        lifeline: Callable[[], int | None] = lambda: None,
        on_widowed: Callable[[WorkerProcess], None] = lambda _worker: None,
    ) -> None:
        """Prepare. ``command`` is that of a plain worker; the zygote shares its interpreter, agent and environment.

        ``lifeline`` returns the descriptor that a process has to inherit, to die with the supervisor. ``on_widowed``
        hears of each worker that died after its zygote, which else ends what a worker leaves in its session.
        """
        interpreter, flag, program, *arguments = command.argv
        self._command = Command((interpreter, flag, program, ZYGOTE_OPTION, *arguments), command.env, command.cwd)
        self._options = dict(options)
        self._ready_timeout_s = ready_timeout_s
        key = hashlib.blake2b("\0".join(command.argv).encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self._learnt_file = learnt_in / f"preload-{key}.json"
        self._learnt: set[str] = set()
        self._log = log
        self._lifeline = lifeline
        self._on_widowed = on_widowed
        self._spawn = SpawnLauncher(lifeline)
        self._serving: Zygote | None = None
        self._warming: asyncio.Task[Zygote] | None = None
        self._retry_at = 0.0
        self._closed = False

    def warm_up(self) -> None:
        """Begin to start a zygote, if there is none."""
        if self._warming is None and not self._closed:
            self._warming = asyncio.get_running_loop().create_task(self._start())
            self._warming.add_done_callback(self._started)

    async def launch(self, command: Command, listener: Listener) -> WorkerProcess:
        """Fork a worker; spawn it where that fails."""
        if not command.cwd.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(command.cwd))
        try:
            zygote = await self._ready()
            return await zygote.fork(command, listener)
        except NotForkedError as error:
            self._log.warning("spawned_instead", reason=str(error))
            return await self._spawn.launch(command, listener)

    async def close(self) -> None:
        """End the zygotes; their workers live on."""
        self._closed = True
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait({self._warming})
        if self._serving is not None:
            await self._serving.close()

    def learn(self, modules: Sequence[str]) -> None:
        """Remember what a worker had to import; a zygote that would spare many workers much is replaced."""
        new = set(modules) - self._learnt
        if not new or sum(map(len, self._learnt | new)) > LEARNT_CHARS_MAX:
            return
        self._learnt |= new
        with contextlib.suppress(OSError):  # without the file, the next process learns it anew
            self._learnt_file.parent.mkdir(parents=True, exist_ok=True)
            scratch = self._learnt_file.with_suffix(f".{os.getpid()}")
            scratch.write_bytes(msgspec.json.encode(sorted(self._learnt)))
            scratch.replace(self._learnt_file)
        if len(new) >= MODULES_WORTH_IT:
            self.warm_up()

    @property
    def pid(self) -> int | None:
        """Pid of the zygote that serves."""
        return None if self._serving is None or self._serving.gone else self._serving.pid

    async def _ready(self) -> "Zygote":
        serving = self._serving
        if serving is not None and not serving.gone:
            if serving.stale():
                self.warm_up()  # and fork from this one until the successor is ready
            return serving
        if asyncio.get_running_loop().time() < self._retry_at:
            raise NotForkedError("the last zygote could not be started")
        self.warm_up()
        assert self._warming is not None  # noqa: S101 - for the type checker: it was just set
        await asyncio.wait({self._warming})
        if self._serving is None or self._serving.gone:
            raise NotForkedError("the zygote could not be started")
        return self._serving

    async def _start(self) -> "Zygote":
        self._recall()
        zygote = Zygote(self._log, self._lifeline, self._on_widowed)
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await zygote.start(self._command, wire.Preload(sorted(self._learnt), self._options))
        except TimeoutError:
            await zygote.close()
            raise NotForkedError(f"it was not ready within {self._ready_timeout_s:g} s") from None
        except BaseException:
            await zygote.close()
            raise
        return zygote

    def _started(self, task: "asyncio.Task[Zygote]") -> None:
        self._warming = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._retry_at = asyncio.get_running_loop().time() + RETRY_AFTER_S
            self._log.warning("zygote_failed", error=str(error))
            return
        predecessor, self._serving = self._serving, task.result()
        self._log.info("zygote_ready", pid=self._serving.pid, modules=self._serving.modules)
        if predecessor is not None:
            predecessor.retire()

    def _recall(self) -> None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            self._learnt |= set(msgspec.json.decode(self._learnt_file.read_bytes(), type=list[str]))


class NotForkedError(Exception):
    """A zygote cannot fork; the text says why."""


class Zygote:
    """One zygote process, from its start to its end. Its messages are answered in the order in which they were sent."""

    def __init__(
        self, log: Any, lifeline: Callable[[], int | None], on_widowed: Callable[[WorkerProcess], None]
    ) -> None:
        self._log = log
        self._lifeline = lifeline
        self._on_widowed = on_widowed
        self._loop = asyncio.get_running_loop()
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._popen: subprocess.Popen[bytes] | None = None
        self._stderr = b""
        self._stderr_end: int | None = None
        self._preloaded: asyncio.Future[wire.Preloaded] = self._loop.create_future()
        self._forking = asyncio.Lock()
        self._forked: asyncio.Future[tuple[int, int]] | None = None
        self._number = 0
        self._children: dict[int, ForkedChild] = {}
        self._pidfd: int | None = None
        self._reaped = asyncio.Event()
        self._watched: list[str] = []
        self._stamps: Stamps = ()
        self._retired = False
        self.gone = False
        self.pid = 0
        self.modules = 0

    # --- starting and ending ---

    async def start(self, command: Command, request: wire.Preload) -> None:
        """Start it and wait until it has imported everything. ``NotForkedError`` says why it did not."""
        stderr_end, theirs = os.pipe()
        os.set_blocking(stderr_end, False)
        try:
            self._popen = subprocess.Popen(  # noqa: ASYNC220 - 0.3 ms, once
                command.argv,
                stdin=self._theirs.fileno(),
                stdout=theirs,
                stderr=theirs,
                cwd=command.cwd,
                start_new_session=True,
                **with_lifeline(command.env, self._lifeline()),
            )
        except OSError as error:
            os.close(stderr_end)
            raise NotForkedError(f"the zygote could not be launched: {error}") from error
        finally:
            os.close(theirs)
            self._theirs.close()
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._stderr_end = stderr_end
        self._loop.add_reader(stderr_end, self._hear_stderr)
        self._loop.add_reader(self._control, self._hear)
        self._send(request, ())
        ready = await self._preloaded
        self.modules = ready.modules
        self._watched, self._stamps = ready.watched, stamps_of(ready.watched)

    def retire(self) -> None:
        """Fork no more; leave when the last child has ended, since only it can tell how that one ends."""
        self._retired = True
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._retired and not self._children:
            self._end("it was replaced")

    async def close(self) -> None:
        """End it, and wait until the process is gone."""
        self._end("the pool is closing")
        self._theirs.close()
        if self._popen is None or self._pidfd is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):  # it ends first what workers' tools may have left
                await self._reaped.wait()
        except TimeoutError:
            self._popen.kill()
            await self._reaped.wait()

    def _reap(self) -> None:
        assert self._popen is not None  # noqa: S101 - for the type checker
        assert self._pidfd is not None  # noqa: S101
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self._popen.wait()
        self._reaped.set()
        self._end(f"it has ended with status {self._popen.returncode}")

    def _end(self, why: str) -> None:
        """Take note that no message can come any more. Closing the socket makes the process leave, if it lives."""
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._stderr_end is not None:
            self._hear_stderr()
        if self._stderr_end is not None:
            self._loop.remove_reader(self._stderr_end)
            os.close(self._stderr_end)
            self._stderr_end = None
        error = NotForkedError(f"the zygote is gone ({why})" + (f": {self._last_words()}" if self._stderr else ""))
        for waiting in (self._preloaded, self._forked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # seen, also where nobody waits
        for child in list(self._children.values()):
            child.status_is_lost()

    def _last_words(self) -> str:
        return self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]

    # --- forking ---

    def stale(self) -> bool:
        """Whether a file that it has read is another one now."""
        return stamps_of(self._watched) != self._stamps

    async def fork(self, command: Command, listener: Listener) -> WorkerProcess:
        """Return a forked worker that runs ``command``, whose program it has loaded already."""
        pipes, number = ChildPipes(), 0
        try:
            async with self._forking:
                if self.gone:
                    raise NotForkedError("the zygote is gone")
                number = self._number = self._number + 1
                forked = self._forked = self._loop.create_future()
                child = self._children[number] = ForkedChild(number, listener, self._has_ended)
                self._send(wire.Fork(number, dict(command.env), str(command.cwd)), pipes.child_ends())
                try:
                    pid, pidfd = await forked
                except asyncio.CancelledError:
                    if forked.done() and not forked.cancelled() and forked.exception() is None:
                        os.close(forked.result()[1])  # the answer and the cancel came at the same time
                    raise
            try:
                process = child.process = PidfdProcess(pid, pidfd, pipes, child.is_over)
            except OSError as error:
                os.close(pidfd)
                raise NotForkedError(str(error)) from error
            pipes.connect(listener)
        except BaseException:
            # A child that was forked all the same sees the end of its wire, and leaves.
            pipes.close()
            self._forget(number)
            raise
        return process

    def _has_ended(self, child: "ForkedChild") -> None:
        self._forget(child.number)
        if self.gone and child.process is not None:
            self._on_widowed(child.process)

    def _forget(self, number: int) -> None:
        self._children.pop(number, None)
        self._leave_if_done()

    def _send(self, message: wire.ToZygote, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._control.sendmsg([msgspec.msgpack.encode(message)], rights)
        except OSError as error:
            raise NotForkedError(f"the zygote takes no request: {error}") from error

    # --- hearing ---

    def _hear(self) -> None:
        descriptors = array.array("i")
        try:
            data, ancillary, _, _ = self._control.recvmsg(
                DATAGRAM_BYTES_MAX, socket.CMSG_SPACE(descriptors.itemsize), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        if not data:
            self._end("it has died")
        elif not self._take(_decode(data), descriptors):
            for each in descriptors:  # of a child that nobody awaits any more
                os.close(each)

    def _take(self, message: wire.FromZygote, descriptors: Sequence[int]) -> bool:
        """Take a message; say whether its descriptors have found an owner."""
        match message:
            case wire.Preloaded() if not self._preloaded.done():
                self._preloaded.set_result(message)
            case wire.Forked(number, pid) if self._awaits(number) and descriptors:
                self._answer((pid, descriptors[0]))
                return True
            case wire.NotForked(number, reason, retryable) if self._awaits(number):
                self._answer(NotForkedError(reason))
                if not retryable:
                    self.retire()
            case wire.Reaped(number, returncode) if number in self._children:
                self._children[number].has_status(returncode)
        return False

    def _awaits(self, number: int) -> bool:
        return self._forked is not None and number == self._number and not self._forked.done()

    def _answer(self, answer: tuple[int, int] | NotForkedError) -> None:
        assert self._forked is not None  # noqa: S101 - for the type checker
        if isinstance(answer, NotForkedError):
            self._forked.set_exception(answer)
        else:
            self._forked.set_result(answer)

    def _hear_stderr(self) -> None:
        assert self._stderr_end is not None  # noqa: S101 - for the type checker
        try:
            data = os.read(self._stderr_end, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._stderr_end)
            os.close(self._stderr_end)
            self._stderr_end = None
            return
        self._stderr = (self._stderr + data)[-STDERR_BYTES_KEPT:]
        for line in data.decode("utf-8", "replace").splitlines():
            self._log.info("zygote_stderr", line=line)


class ForkedChild:
    """Brings the two halves of a death together: the pidfd tells that it happened, the zygote tells how."""

    def __init__(self, number: int, listener: Listener, has_ended: "Callable[[ForkedChild], None]") -> None:
        self.number = number
        self.process: WorkerProcess | None = None
        self._listener = listener
        self._has_ended = has_ended
        self._over = False
        self._status: Exit | None = None
        self._patience: asyncio.TimerHandle | None = None

    def is_over(self, pidfd: int) -> None:
        """Take note that the process has ended."""
        self._over = True
        if self._status is None and self.process is not None:
            self._status = _status_of_zombie(self.process.pid, pidfd)
        if self._status is not None:
            self._tell(self._status)
        else:
            self._patience = asyncio.get_running_loop().call_later(STATUS_S, self.status_is_lost)

    def has_status(self, returncode: int) -> None:
        """Take note of its status."""
        self._status = self._status or Exit(returncode)
        if self._over:
            self._tell(self._status)

    def status_is_lost(self) -> None:
        """Take note that nobody will report its status."""
        self._status = self._status or Exit(None)
        if self._over:
            self._tell(self._status)

    def _tell(self, status: Exit) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._has_ended(self)
        self._listener.exited(status)


def _status_of_zombie(pid: int, pidfd: int) -> Exit | None:
    """Return the status of a process that nobody has waited for yet, or ``None`` where the zygote has to tell it.

    It has to be woken for that, which doubles the time until a death is known.
    """
    fields = procfs.stat(pid, procfs.EXIT_STATUS)
    try:
        signal.pidfd_send_signal(pidfd, 0)  # it is still there, so what was read is of no other process
    except OSError:
        return None
    if fields is None or fields[procfs.STATE] != b"Z":
        return None
    status = int(fields[procfs.EXIT_STATUS])
    return Exit(os.waitstatus_to_exitcode(status)) if status else None


_decode = msgspec.msgpack.Decoder(wire.FromZygote).decode

"""One zygote process, as the supervisor sees it.

The supervisor creates the pipes of a worker, passes the child's ends to the zygote over a socket, and gets a pid and
its pidfd back. The zygote reaps its children and reports how they ended.
"""

import array
import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hermes_pool.process.forked_child import ForkedChild
from hermes_pool.process.launcher import Command, ProcessListener, WorkerProcess
from hermes_pool.process.lifeline import with_lifeline
from hermes_pool.process.pidfd import PidfdProcess
from hermes_pool.process.pipes import ChildPipes
from hermes_pool.system.file_stamps import FileStamps, stamps_of
from hermes_pool_worker import wire
from hermes_pool_worker.contract import DATAGRAM_BYTES_MAX

LEAVE_S = 3.0
"""How long a zygote may take to leave by itself before it is killed."""
STDERR_BYTES_KEPT = 4096

_decode = msgspec.msgpack.Decoder(wire.FromZygote).decode


class NotForkedError(Exception):
    """No zygote can fork; the text says why."""


class Zygote:
    """One zygote process, from its start to its end. It answers requests in the order in which they were sent.

    ``pid`` is 0 until it is launched; ``modules`` is how many modules it has imported; ``gone`` is true once no message
    can be exchanged any more.
    """

    def __init__(
        self,
        log: Any,
        lifeline: Callable[[], int | None],
        on_exit_without_zygote: Callable[[WorkerProcess], None],
    ) -> None:
        """Create the control socket. The parameters are those of ``ZygoteLauncher``."""
        self._log = log
        self._lifeline = lifeline
        self._on_exit_without_zygote = on_exit_without_zygote
        self._loop = asyncio.get_running_loop()
        self._control, self._its_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
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
        self._stamps: FileStamps = ()
        self._retired = False
        self.gone = False
        self.pid = 0
        self.modules = 0

    # --- starting and ending ---

    async def start(self, command: Command, request: wire.Preload) -> None:
        """Start the process and wait until it has imported everything. Raises ``NotForkedError`` if it cannot."""
        stderr_end, its_stderr = os.pipe()
        os.set_blocking(stderr_end, False)
        try:
            self._popen = subprocess.Popen(  # noqa: ASYNC220 - 0.3 ms, once
                command.argv,
                stdin=self._its_control.fileno(),
                stdout=its_stderr,
                stderr=its_stderr,
                cwd=command.cwd,
                start_new_session=True,
                **with_lifeline(command.env, self._lifeline()),
            )
        except OSError as error:
            os.close(stderr_end)
            raise NotForkedError(f"the zygote could not be launched: {error}") from error
        finally:
            os.close(its_stderr)
            self._its_control.close()
        self.pid = self._popen.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._stderr_end = stderr_end
        self._loop.add_reader(stderr_end, self._read_stderr)
        self._loop.add_reader(self._control, self._read_control)
        self._send(request, ())
        ready = await self._preloaded
        self.modules = ready.modules
        self._watched, self._stamps = ready.watched, stamps_of(ready.watched)

    def retire(self) -> None:
        """Stop forking; leave once the last child has ended, since only the zygote can report how that one ended."""
        self._retired = True
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._retired and not self._children:
            self._disconnect("it was replaced")

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self._disconnect("the pool is closing")
        self._its_control.close()
        if self._popen is None or self._pidfd is None:
            return
        try:
            async with asyncio.timeout(LEAVE_S):  # it first ends what the tools of workers may have left
                await self._reaped.wait()
        except TimeoutError:
            self._popen.kill()
            await self._reaped.wait()

    def _ended(self) -> None:
        assert self._popen is not None  # noqa: S101 - for the type checker
        assert self._pidfd is not None  # noqa: S101
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self._popen.wait()
        self._reaped.set()
        self._disconnect(f"it ended with status {self._popen.returncode}")

    def _disconnect(self, reason: str) -> None:
        """Close the socket, which makes the process leave if it is alive, and fail whatever waits for an answer."""
        if self.gone:
            return
        self.gone = True
        self._loop.remove_reader(self._control)
        self._control.close()
        if self._stderr_end is not None:
            self._read_stderr()
        if self._stderr_end is not None:
            self._loop.remove_reader(self._stderr_end)
            os.close(self._stderr_end)
            self._stderr_end = None
        error = NotForkedError(f"the zygote is gone ({reason})" + (f": {self._last_line()}" if self._stderr else ""))
        for waiting in (self._preloaded, self._forked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # mark it as retrieved, even if nothing awaits it
        for child in list(self._children.values()):
            child.status_lost()

    def _last_line(self) -> str:
        return self._stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]

    # --- forking ---

    def stale(self) -> bool:
        """Return whether a file that it has read has changed since."""
        return stamps_of(self._watched) != self._stamps

    async def fork(self, command: Command, listener: ProcessListener) -> WorkerProcess:
        """Fork a worker and return it. Of ``command`` only environment and folder count: the program is loaded already.

        Raises ``NotForkedError`` if the zygote cannot fork, ``OSError`` if there is no pipe to be had.
        """
        pipes, number = ChildPipes(), 0
        try:
            async with self._forking:
                if self.gone:
                    raise NotForkedError("the zygote is gone")
                number = self._number = self._number + 1
                forked = self._forked = self._loop.create_future()
                child = self._children[number] = ForkedChild(number, listener, self._child_ended)
                self._send(wire.Fork(number, dict(command.env), str(command.cwd)), pipes.child_ends())
                try:
                    pid, pidfd = await forked
                except asyncio.CancelledError:
                    if forked.done() and not forked.cancelled() and forked.exception() is None:
                        os.close(forked.result()[1])  # the answer and the cancellation came at the same time
                    raise
            try:
                process = child.process = PidfdProcess(pid, pidfd, pipes, child.ended)
            except OSError as error:
                os.close(pidfd)
                raise NotForkedError(str(error)) from error
            pipes.connect(listener)
        except BaseException:
            # A child that was forked nevertheless sees the end of its input, and leaves.
            pipes.close()
            self._forget(number)
            raise
        return process

    def _child_ended(self, child: ForkedChild) -> None:
        self._forget(child.number)
        if self.gone and child.process is not None:
            self._on_exit_without_zygote(child.process)

    def _forget(self, number: int) -> None:
        self._children.pop(number, None)
        self._leave_if_done()

    def _send(self, message: wire.ToZygote, descriptors: Sequence[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._control.sendmsg([msgspec.msgpack.encode(message)], rights)
        except OSError as error:
            raise NotForkedError(f"the zygote does not accept requests: {error}") from error

    # --- reading ---

    def _read_control(self) -> None:
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
            self._disconnect("it has died")
        elif not self._handle(_decode(data), descriptors):
            for each in descriptors:  # pidfds of a child that nothing waits for any more
                os.close(each)

    def _handle(self, message: wire.FromZygote, descriptors: Sequence[int]) -> bool:
        """Handle a message; return whether its descriptors were taken over."""
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
                self._children[number].reaped(returncode)
        return False

    def _awaits(self, number: int) -> bool:
        return self._forked is not None and number == self._number and not self._forked.done()

    def _answer(self, answer: tuple[int, int] | NotForkedError) -> None:
        assert self._forked is not None  # noqa: S101 - for the type checker
        if isinstance(answer, NotForkedError):
            self._forked.set_exception(answer)
        else:
            self._forked.set_result(answer)

    def _read_stderr(self) -> None:
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

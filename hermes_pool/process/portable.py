"""Starts workers with asyncio's own subprocesses, on platforms without pidfd."""

import asyncio
import contextlib
import subprocess
import sys
from typing import Any, cast

import psutil

from hermes_pool.process.launcher import Command, Exit, ProcessListener, WorkerProcess


class PortableLauncher:
    """Starts workers on macOS, Windows, and a Linux without pidfd. Untested on the first two."""

    async def launch(self, command: Command, listener: ProcessListener) -> WorkerProcess:
        """Start a process in a session (POSIX) or a process group (Windows) of its own."""
        loop = asyncio.get_running_loop()
        group: dict[str, Any] = {"start_new_session": True}
        if sys.platform == "win32":
            group = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
        try:
            transport, protocol = await loop.subprocess_exec(
                lambda: _PortableProcess(listener), *command.argv, env=command.env, cwd=command.cwd, **group
            )
        except NotImplementedError as error:
            raise OSError(
                f"{type(loop).__name__} cannot start subprocesses; on Windows use asyncio's ProactorEventLoop "
                "(uvicorn: without --reload)"
            ) from error
        try:
            protocol.create_time = psutil.Process(transport.get_pid()).create_time()
        except psutil.Error as error:
            transport.kill()
            transport.close()
            raise OSError(f"it started, but its process cannot be identified: {error}") from error
        return protocol

    async def close(self) -> None:
        """Do nothing: no process is kept between launches."""


class _PortableProcess(asyncio.SubprocessProtocol):
    """A child process behind asyncio's transport; implements ``WorkerProcess``."""

    create_time: float

    def __init__(self, listener: ProcessListener) -> None:
        self._listener = listener
        self._transport: asyncio.SubprocessTransport | None = None
        self.pid = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1:
            self._listener.stdout_received(data)
        else:
            self._listener.stderr_received(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self._listener.stdout_ended()
        elif fd == 0:
            self._listener.stdin_ended()

    def process_exited(self) -> None:
        status = self._transport.get_returncode() if self._transport is not None else None
        # asyncio reports 255 for a child whose status something else has collected.
        self._listener.exited(Exit(None if status == _UNKNOWN_TO_ASYNCIO else status))

    def write(self, data: bytes | bytearray) -> None:
        pipe = self._pipe(0)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.WriteTransport", pipe).write(data)

    def pause_reading(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.ReadTransport", pipe).pause_reading()

    def resume_reading(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and not pipe.is_closing():
            cast("asyncio.ReadTransport", pipe).resume_reading()

    def send_signal(self, number: int) -> None:
        if self._transport is not None:
            with contextlib.suppress(ProcessLookupError):
                self._transport.send_signal(number)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return None if self._transport is None else self._transport.get_pipe_transport(fd)


_UNKNOWN_TO_ASYNCIO = 255

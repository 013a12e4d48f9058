"""Floors: the least that such a conversation can cost, in the plainest code possible and without any safety."""

import asyncio
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from _bench.fleet import Fleet
from hermes_pool_worker import wire

WORKER = [sys.executable, str(Path(__file__).with_name("floor_worker.py"))]
_decode: Any = msgspec.msgpack.Decoder(wire.FromWorker).decode


def _turn(text: str) -> bytearray:
    return wire.encode(wire.Turn("turn", 1, text))


class Raw(Fleet):
    """Blocking pipes: one caller, no event loop."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.communicate()

    def _worker(self, key: str) -> "subprocess.Popen[bytes]":
        worker = self._workers.get(key)
        if worker is None:
            worker = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._workers[key] = worker
        return worker

    def _ask(self, key: str, text: str) -> Any:
        worker = self._worker(key)
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(_turn(text))
        worker.stdin.flush()
        return worker.stdout.read

    async def send(self, key: str, text: str) -> str:
        read = self._ask(key, text)
        done: wire.TurnDone = _decode(read(int.from_bytes(read(wire.HEADER_BYTES), "big")))
        return done.text

    async def pid(self, key: str) -> int:
        return self._worker(key).pid

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        read = self._ask(key, text)
        while isinstance(message := _decode(read(int.from_bytes(read(wire.HEADER_BYTES), "big"))), wire.TextDelta):
            yield len(message.text)


class Aio(Fleet):
    """asyncio as in its documentation: ``create_subprocess_exec`` and ``StreamReader``."""

    def __init__(self, situation: Any) -> None:
        super().__init__(situation)
        self._workers: dict[str, Process] = {}

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
            await worker.wait()

    async def _worker(self, key: str) -> Process:
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = await asyncio.create_subprocess_exec(*WORKER, stdin=PIPE, stdout=PIPE)
        return worker

    async def _ask(self, key: str, text: str) -> asyncio.StreamReader:
        worker = self._workers.get(key) or await self._worker(key)
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(_turn(text))
        await worker.stdin.drain()
        return worker.stdout

    async def send(self, key: str, text: str) -> str:
        stdout = await self._ask(key, text)
        while True:
            size = int.from_bytes(await stdout.readexactly(wire.HEADER_BYTES), "big")
            message = _decode(await stdout.readexactly(size))
            if isinstance(message, wire.TurnDone):
                return message.text

    async def pid(self, key: str) -> int:
        return (await self._worker(key)).pid

    async def revive(self, key: str) -> None:
        del self._workers[key]

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        stdout = await self._ask(key, text)
        while True:
            size = int.from_bytes(await stdout.readexactly(wire.HEADER_BYTES), "big")
            message = _decode(await stdout.readexactly(size))
            if isinstance(message, wire.TurnDone):
                return
            yield len(message.text)

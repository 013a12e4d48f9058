"""A host that uses its pool where it must not: for ``test_wrong_place``. Arguments: the state folder."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hermes_pool import HermesSessionManager, InvalidUseError, PoolSettings


async def main(state_dir: str) -> None:
    pool = HermesSessionManager(PoolSettings(agent="echo", state_dir=Path(state_dir)))
    await pool.__aenter__()
    await pool.send("c", "one")

    async def enter() -> None:
        async with pool.turn("c", "hello"):
            pass

    async def watch() -> None:
        async for _ in pool.events("c"):
            pass

    uses: list[Callable[[], Coroutine[Any, Any, Any]]] = [
        lambda: pool.send("c", "hello"), enter, watch, lambda: pool.start("c", "hello"), lambda: pool.cancel("c"),
        lambda: pool.answer("c", "q", "yes"), lambda: pool.steer("c", "hm"), lambda: pool.stop("c"),
        lambda: pool.transcript("c"), pool.close,
    ]  # fmt: skip

    def use() -> list[str]:
        told = []
        for each in uses:
            try:
                asyncio.run(each())
            except InvalidUseError as error:
                told.append(str(error))
        return told

    told = await asyncio.to_thread(use)
    assert len(told) == len(uses), told
    assert "another event loop" in told[0]

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        asyncio._set_running_loop(None)
        thread = threading.Thread(target=lambda: os.write(write, "\n".join(use()).encode()))
        thread.start()
        thread.join()
        try:

            async def own() -> str:
                async with HermesSessionManager(PoolSettings(agent="echo", state_dir=Path(f"{state_dir}-2"))) as mine:
                    return (await mine.send("c", "/count")).text

            os.write(write, f"\nown {asyncio.run(asyncio.wait_for(own(), 20))}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as told_by_child:
        lines = (await asyncio.to_thread(told_by_child.read)).splitlines()
    await asyncio.to_thread(os.waitpid, child, 0)
    assert len(lines) == len(uses) + 1, lines
    assert "forked" in lines[0]
    assert lines[-1] == "own 1"

    assert (await pool.send("c", "/count")).text == "2"
    (row,) = await pool.sessions()
    assert row.restart_count == 0
    print("unharmed", row.pid)
    await pool.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

"""A host that opens its pool in one task, uses it in others, and closes it in a further one: for ``test_any_loop``.

Arguments: the module of the loop (``asyncio`` or ``uvloop``), the launcher, a folder.
"""

import asyncio
import signal
import sys
from importlib import import_module
from pathlib import Path

import anyio

from hermes_pool import HermesSessionManager, PoolSettings


async def main(launcher: str, folder: Path) -> None:
    settings = PoolSettings(
        agent="obedient:Agent",
        agent_paths=(str(Path(__file__).parents[1] / "agents"),),
        agent_options={"folder": str(folder)},
        launcher=launcher,  # type: ignore[arg-type]  # one of its words
        state_dir=folder / "state",
    )
    pool = HermesSessionManager(settings)
    await asyncio.create_task(pool.__aenter__())

    async def request(text: str) -> str:
        return (await pool.send("c", text)).text

    # The request that starts the worker goes away: its worker stays.
    first = asyncio.create_task(request("wait for nothing"))
    marks = folder / "marks"
    while not marks.exists() or "begun" not in marks.read_text():  # noqa: ASYNC110 - a worker writes it
        await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    (row,) = await pool.sessions()

    # Others run out of time in scopes of two kinds, beside requests that do not.
    for number, scope in enumerate(("asyncio", "anyio")):
        beside = asyncio.create_task(pool.send(f"beside {number}", "not affected"))
        try:
            if scope == "asyncio":
                async with asyncio.timeout(0.05):
                    await request("wait for nothing")
            else:
                with anyio.fail_after(0.05):
                    await request("wait for nothing")
        except TimeoutError:
            print("timed out")
        async with anyio.create_task_group() as group:
            group.start_soon(request, "in a group")
        assert (await beside).text == "not affected"
        assert await request(f"after {number}") == f"after {number}"
    (again,) = [each for each in await pool.sessions() if each.conversation_id == "c"]
    assert (again.pid, again.restart_count) == (row.pid, 0)
    assert row.pid is not None

    # A signal's handler closes it, in a task of its own.
    closed = asyncio.Event()

    async def close() -> None:
        await pool.close()
        closed.set()

    tasks = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: tasks.append(asyncio.create_task(close())))
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(closed.wait(), 20)
    print("closed")


if __name__ == "__main__":
    module, launcher, folder = sys.argv[1:]
    with asyncio.Runner(debug=False, loop_factory=import_module(module).new_event_loop) as runner:
        runner.run(main(launcher, Path(folder)))

"""The way of one warm turn through the host, traced: every further call costs each message of each conversation."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import hermes_pool
import hermes_pool_worker
from hermes_pool import SessionKey
from tests.support import OpenPool, until

PACKAGES = (str(Path(hermes_pool.__file__).parent), str(Path(hermes_pool_worker.__file__).parent))
CALLS_MAX = 47
"""What it takes now. A change that adds to it says why here. The first and the last event of a turn, which those see
who watch the conversation, take four; the line, which shows who waits, two; what a reply tells of its turn, one."""
MODULES_MAX = 15


async def test_a_warm_turn_takes_few_calls_in_few_modules(open_pool: OpenPool) -> None:
    pool = await open_pool()
    await pool.send("c", "hello")
    metadata = pool._sessions[SessionKey("c")].metadata
    await until(lambda: metadata.identity_is_stored, "the new session to be stored")
    traces = [await traced(pool) for _ in range(5)]
    shortest = min(traces, key=len)  # one of them asks for the next save
    listing = "\n".join(f"{Path(file).stem}: {name}" for file, name in shortest)
    assert len(shortest) <= CALLS_MAX, listing
    assert len({file for file, _ in shortest}) <= MODULES_MAX, listing


async def traced(pool: hermes_pool.HermesSessionManager) -> list[tuple[str, str]]:
    """Every call of a Python function of ours, in order, while one message is answered."""
    calls: list[tuple[str, str]] = []

    def trace(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES):
            calls.append((code.co_filename, code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        await pool.send("c", "hello")
    finally:
        sys.setprofile(before)
    return calls

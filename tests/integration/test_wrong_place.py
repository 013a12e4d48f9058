"""A pool is used in its own process and its own loop; elsewhere it says so, and its owner notices nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_pool.control import client, messages

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork")
HOSTS = Path(__file__).with_name("hosts")

FORKS_AND_WAITS = """
import asyncio, os, sys, time
from hermes_pool import HermesSessionManager, PoolSettings

async def main():
    pool = HermesSessionManager(PoolSettings(agent="echo", state_dir=sys.argv[1]))
    await pool.__aenter__()
    await pool.send("c", "hello")
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_another_loop_and_a_forked_process_are_refused_and_harm_nobody(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", HOSTS / "forker_host.py", tmp_path / "state"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout.split()[:1], ran.stderr) == (0, ["unharmed"], "")


def test_a_host_that_has_forked_does_not_seem_to_live_when_it_is_dead(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FORKS_AND_WAITS, tmp_path], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        child = int(host.stdout.readline())
        try:
            (seen,) = client.query(tmp_path, messages.Ps())
            assert isinstance(seen.response, messages.PsReply)
            host.kill()
            host.wait()
            began = time.monotonic()
            assert client.query(tmp_path, messages.Ps()) == []
            assert time.monotonic() - began < 0.5
        finally:
            os.kill(child, signal.SIGKILL)

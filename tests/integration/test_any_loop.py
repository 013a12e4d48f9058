"""The pool on each event loop, and in tasks that come and go: a program of its own, where warnings are errors."""

import subprocess
import sys
from pathlib import Path

import pytest

HOST = Path(__file__).with_name("hosts") / "any_loop.py"


@pytest.mark.parametrize("launcher", ["zygote", "spawn", "portable"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_pool_is_opened_used_and_closed_by_tasks_that_come_and_go(tmp_path: Path, loop: str, launcher: str) -> None:
    if loop == "uvloop" and sys.platform == "win32":
        pytest.skip("there is no uvloop for Windows")
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", HOST, loop, launcher, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "timed out\ntimed out\nclosed\n", "")

"""What is said about a process of this machine, with real processes."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hermes_pool.cluster import neighbours
from hermes_pool.cluster.neighbours import Condition, Identity
from hermes_pool_worker import procfs
from tests.support import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def of(process: subprocess.Popen[bytes]) -> Identity:
    fields = procfs.stat(process.pid)
    assert fields is not None
    return replace(Identity.of_this_process(), pid=process.pid, began=fields[procfs.BEGAN].decode())


def test_an_identity_survives_its_text() -> None:
    me = Identity.of_this_process()
    assert Identity.from_text(me.to_text()) == me
    for text in ("", "{}", "[]", '{"pid": 1}', me.to_text().replace(str(me.pid), '"x"', 1)):
        assert Identity.from_text(text) is None


async def test_alive_stopped_and_dead(process: subprocess.Popen[bytes]) -> None:
    found = of(process)
    assert found.condition() is Condition.ALIVE
    assert replace(found, began="1").condition() is Condition.DEAD  # the pid belongs to another one now
    process.send_signal(signal.SIGSTOP)
    await until(lambda: found.condition() is Condition.STOPPED, "the process to be stopped")
    process.kill()
    await until(lambda: found.condition() is Condition.DEAD, "it to be a zombie")
    process.wait()
    assert found.condition() is Condition.DEAD


def test_another_machine_is_never_called_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    me = Identity.of_this_process()
    assert replace(me, host="elsewhere", boot="another").condition() is Condition.ELSEWHERE
    assert replace(me, namespace="pid:[1]").condition() is Condition.ELSEWHERE
    for machine, expected in (("", Condition.ELSEWHERE), ("0123456789abcdef", Condition.DEAD)):
        monkeypatch.setattr(
            neighbours, "_surroundings", lambda machine=machine: (me.boot, me.namespace, me.host, machine)
        )
        assert replace(me, machine=machine, boot="another").condition() is expected


async def test_a_process_that_proc_hides_is_alive_until_it_ends(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of(process)
    monkeypatch.setattr(procfs, "stat", lambda *_: None)
    assert found.condition() is Condition.ALIVE
    process.kill()
    await until(lambda: found.condition() is Condition.DEAD, "its end to be seen")

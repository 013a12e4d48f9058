"""A host that goes: a deploy, a service manager, a terminal. Its turns come to their ends, or are told why not."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hermes_pool import PoolClosedError, PoolDrainingError, Reply, TurnCancelledError
from tests.support import AGENTS, Obedient, OpenPool, known, quick, until

HOST = """
    import asyncio, logging, signal, sys
    from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings

    async def main():
        settings = PoolSettings(
            agent="obedient:Agent", agent_paths=({agents!r},), agent_options={{"folder": {folder!r}}},
            state_dir={state!r}, launcher={launcher!r},
        )
        told = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        pool = await HermesSessionManager(settings).__aenter__()
        await pool.send("a", "hello")
        turns = [await pool.start(name, "stream_and_wait go") for name in "ab"]
        in_line = await pool.start("a", "in line")
        await told.wait()
        print("told", flush=True)
        await pool.close(drain_s=20)
        for turn in (*turns, in_line):
            print("outcome", type(turn.outcome).__name__, getattr(turn.outcome, "text", ""), turn.outcome.attempts)
        print("deaths", len(pool.deaths()))

    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("zygote", signal.SIGTERM),
        ("spawn", signal.SIGTERM),
        ("portable", signal.SIGTERM),
        ("zygote", signal.SIGINT),
        *(
            pytest.param(launcher, number, marks=pytest.mark.slow)
            for launcher, number in [
                ("zygote", signal.SIGHUP),
                ("spawn", signal.SIGHUP),
                ("portable", signal.SIGHUP),
                ("spawn", signal.SIGINT),
                ("portable", signal.SIGINT),
            ]
        ),
    ],
)
def test_a_signal_to_all_processes_of_a_service_cuts_no_turn_short(
    obedient: Obedient, tmp_path: Path, launcher: str, number: signal.Signals
) -> None:
    """As systemd does by default with SIGTERM to the control group, and a terminal to the group in its foreground."""
    program = textwrap.dedent(HOST).format(
        agents=str(AGENTS), folder=str(obedient.folder), state=str(tmp_path / "state"), launcher=launcher
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as host:  # fmt: skip
        try:
            end = time.monotonic() + 20
            while obedient.marks("begun").count("stream_and_wait go") < 2:
                assert time.monotonic() < end, "the turns do not run"
                time.sleep(0.01)
            service = psutil.Process(host.pid)
            members = [service, *service.children(recursive=True)]
            for member in members:
                os.kill(member.pid, number)
            assert known(host.stdout).readline() == "told\n"
            obedient.allow("go")
            said, _ = host.communicate(timeout=30)
        finally:
            host.kill()
    assert said.splitlines() == [
        "outcome Reply stream_and_wait go 1",
        "outcome Reply stream_and_wait go 1",
        "outcome Reply in line 1",
        "deaths 0",
    ], said
    _, left = psutil.wait_procs(members, timeout=5)
    assert left == []


async def test_a_closing_pool_finishes_what_it_has_and_refuses_the_rest(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings(), timeouts=quick(drain_s=20))
    running = await pool.start("c", "wait go")
    in_line = await pool.start("c", "in line")
    await until(lambda: obedient.marks("begun"), "the turn to run")
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)
    with pytest.raises(PoolDrainingError) as refused:
        await pool.start("d", "too late")
    assert refused.value.retryable
    assert pool.pool().state == "draining"
    obedient.allow("go")
    ends = await closing
    assert [end.how for end in ends.values()] == ["closed"]
    assert [(await turn.reply()).text for turn in (running, in_line)] == ["wait go", "in line"]
    with pytest.raises(PoolClosedError):
        await pool.start("c", "much too late")


async def test_what_a_deploy_cuts_off_may_be_sent_again_where_it_had_no_effect(
    open_pool: OpenPool, obedient: Obedient
) -> None:
    pool = await open_pool(**obedient.settings())
    silent = await pool.start("silent", "wait never")
    talks = await pool.start("talks", "stream_and_wait never")
    acts = await pool.start("acts", "tool_then_wait never")
    in_line = await pool.start("silent", "in line")
    await until(lambda: len(obedient.marks("begun")) == 3, "the turns to run")
    await pool.close(drain_s=0.2)
    outcomes = [turn.outcome for turn in (silent, talks, acts)]
    assert all(isinstance(each, TurnCancelledError) for each in outcomes)
    assert [each.retryable for each in outcomes if not isinstance(each, Reply | None)] == [True, False, False]
    assert [each.kept for each in outcomes if isinstance(each, TurnCancelledError)] == [False, True, True]
    assert not isinstance(in_line.outcome, Reply)
    assert known(in_line.outcome).retryable
    assert sorted(obedient.marks("begun")) == ["stream_and_wait never", "tool_then_wait never", "wait never"]

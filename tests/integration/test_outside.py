"""Deaths, breakers and quarantine as people outside see and reset them, with the command line and real workers."""

import asyncio
import json
import logging
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hermes_pool import (
    HermesSessionManager,
    MessageQuarantinedError,
    PoolClosedError,
    PoolSettings,
    PoolUnavailableError,
    PoolUnusableError,
    RestartBackoffError,
    RestartPolicy,
    SessionKey,
    StartPolicy,
    WorkerCrashedError,
    WorkerStartError,
    WorkerUnusableError,
)
from hermes_pool.cli import app
from hermes_pool.process.death import end_tree
from hermes_pool.snapshot import SessionSnapshot
from hermes_pool_worker.contract import MARKER_VARIABLE
from tests.support import Obedient, OpenPool, alive, quick, until

LAUNCHERS = pytest.mark.parametrize("launcher", ["zygote", "spawn"])
REFUSAL_S = 0.005


@dataclass(frozen=True)
class Told:
    status: int
    out: str
    err: str


Run = Callable[..., Awaitable[Told]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``hermes-pool`` in a process of its own, while the pool in this one goes on."""

    async def run_it(*arguments: str) -> Told:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "hermes_pool", *arguments),
            env={**os.environ, "HERMES_POOL_STATE_DIR": str(tmp_path / "state")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 20)
        assert "Traceback" not in err.decode()
        assert process.returncode is not None
        return Told(process.returncode, out.decode(), err.decode())

    return run_it


async def seen(run: Run) -> dict[str, dict[str, Any]]:
    """The rows of ``ps --json`` by conversation."""
    return {row["conversation_id"]: row for row in json.loads((await run("ps", "--json")).out)["sessions"]}


async def row_of(pool: HermesSessionManager, conversation_id: str) -> SessionSnapshot:
    return next(row for row in await pool.sessions() if row.conversation_id == conversation_id)


async def refused_in_s(work: Awaitable[Any], kind: type[Exception]) -> float:
    began = time.perf_counter()
    with pytest.raises(kind):
        await work
    return time.perf_counter() - began


# --- deaths -----------------------------------------------------------------------------------------------------------


async def test_a_death_has_one_id_in_the_error_the_log_and_the_command_line(
    open_pool: OpenPool, obedient: Obedient, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await open_pool(**obedient.settings(), restarts=RestartPolicy(replacements_per_turn_max=0))
    await pool.send("other", "hello")
    turn = asyncio.create_task(pool.send("c", "wait for_ever"))
    await until(lambda: "wait for_ever" in obedient.marks("begun"), "the turn to run")
    pid = (await row_of(pool, "c")).pid
    assert pid is not None
    with caplog.at_level(logging.WARNING, "hermes_pool"):
        psutil.Process(pid).kill()
        with pytest.raises(WorkerCrashedError) as caught:
            await turn
        await until(lambda: "worker_died" in caplog.text, "the log")
    report = caught.value.report
    assert report is not None
    assert report.report_id in str(caught.value)
    (logged,) = [line for line in caplog.messages if line.startswith("worker_died")]
    assert f"report_id={report.report_id!r}" in logged
    assert pool.deaths() == [report]

    shown = await run("deaths", report.report_id)
    assert (shown.status, shown.err) == (0, "")
    facts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in shown.out.splitlines()}
    assert (facts["report"], facts["conversation"]) == (report.report_id, "c")
    assert facts["exit"] == report.exit
    assert "SIGKILL" in facts["exit"]
    assert facts["turn"].startswith(f"{report.turn_id}, attempt 1")
    assert facts["worker"].startswith(f"pid {pid}, incarnation 1,")

    told = json.loads((await run("deaths", "--json")).out)
    assert [(each["pid"], each["problem"]) for each in told["supervisors"]] == [(os.getpid(), None)]
    (death,) = told["deaths"]
    assert (death["report_id"], death["exit"], death["pid"]) == (report.report_id, report.exit, pid)
    assert (death["returncode"], death["supervisor_pid"]) == (-9, os.getpid())
    table = (await run("deaths")).out.splitlines()
    assert table[0].split() == ["WHEN", "REPORT", "CONVERSATION", "TURN", "EXIT"]
    assert table[1].split()[1:4] == [report.report_id, "c", report.turn_id]
    rows = await seen(run)
    assert (rows["c"]["last_death"], rows["other"]["last_death"]) == (report.report_id, None)


async def test_deaths_that_are_wanted_are_none_and_an_unknown_report_is_said_to_be_unknown(
    open_pool: OpenPool, run: Run
) -> None:
    pool = await open_pool()
    await pool.send("c", "hello")
    await pool.stop("c")
    assert pool.deaths() == []
    none = await run("deaths")
    assert (none.status, none.out, none.err) == (0, "", "no worker has died unexpectedly\n")
    unknown = await run("deaths", "cafe0123")
    assert (unknown.status, unknown.out) == (1, "")
    assert "no report cafe0123" in unknown.err


async def test_the_latest_deaths_are_kept_the_latest_first(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(
        **obedient.settings(), restarts=RestartPolicy(replacements_per_turn_max=0, quarantine_after=0)
    )
    for name in ("a", "b", "a"):
        with pytest.raises(WorkerCrashedError):
            await pool.send(name, "die")
    deaths = pool.deaths()
    assert [report.conversation_id for report in deaths] == ["a", "b", "a"]
    assert deaths[0].at >= deaths[-1].at
    assert (await row_of(pool, "a")).last_death == deaths[0].report_id
    await pool.close()
    assert pool.deaths() == deaths, "a closed pool still knows"


@pytest.mark.parametrize("command", [("deaths",), ("reset",), ("reset", "c"), ("release", "c", "cafe0123")])
def test_without_a_supervisor_the_commands_say_so(tmp_path: Path, command: tuple[str, ...]) -> None:
    told = CliRunner().invoke(app.app, [*command, "--state-dir", str(tmp_path / "none")])
    assert (told.exit_code, told.stdout) == (1, "")
    assert (
        told.stderr
        == f"hermes-pool: no supervisor is running for {tmp_path / 'none'}: start one, or check --state-dir\n"
    )
    assert list(tmp_path.iterdir()) == []


# --- breakers ---------------------------------------------------------------------------------------------------------


async def test_a_flapping_session_backs_off_is_shown_and_is_let_in_after_a_reset(
    open_pool: OpenPool, obedient: Obedient, run: Run
) -> None:
    pool = await open_pool(
        **obedient.settings(),
        restarts=RestartPolicy(deaths_in_window_max=1, backoff_s=60.0, quarantine_after=0),
    )
    with pytest.raises(WorkerCrashedError):
        await pool.send("c", "die")
    with pytest.raises(RestartBackoffError) as refused:
        await pool.send("c", "hello")
    assert (await pool.send("other", "hello")).text == "hello"
    rows = await seen(run)
    row, other = rows["c"], rows["other"]
    assert (row["restart_breaker"], row["state"], row["pid"]) == ("open", "stopped", None)
    assert 20 < row["retry_after_s"] <= refused.value.retry_after_s
    assert (other["restart_breaker"], other["retry_after_s"]) == ("closed", None)
    table = await run("ps")
    (line,) = [line for line in table.out.splitlines() if line.startswith("c ")]
    assert line.split()[3].startswith("stopped,backoff=")
    assert "starts" not in table.err, "those of the pool are well"

    assert (await run("reset", "c")).out == f"supervisor {os.getpid()}: reset\n"
    after = await row_of(pool, "c")
    assert (after.restart_breaker, after.retry_after_s) == ("closed", None)
    assert (await pool.send("c", "hello")).text == "hello"
    assert "unknown conversation" in (await run("reset", "c", "--user", "ada")).out


async def test_a_missing_interpreter_fails_fast_with_the_remedy_and_is_tried_at_once_when_it_is_there(
    open_pool: OpenPool, run: Run, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    pool = await open_pool(worker_python=str(python))
    with pytest.raises(WorkerUnusableError):
        await pool.send("c", "hello")
    took = [await refused_in_s(pool.send(f"c-{number}", "hello"), PoolUnusableError) for number in range(10)]
    assert sorted(took)[5] < REFUSAL_S
    starts = json.loads((await run("ps", "--json")).out)["supervisors"][0]["pool"]["starts"]
    assert starts["state"] == "open"
    assert 0 < starts["retry_after_s"] <= 10
    assert "correct worker_python" in starts["last_error"]
    head = (await run("ps")).err
    assert "starts are refused for " in head
    assert f"there is no interpreter {python}: correct worker_python" in head

    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert (await pool.send("c", "hello")).text == "hello"
    starts = pool.pool().starts
    assert starts is not None
    assert (starts.state, starts.last_error) == ("closed", None)


async def test_what_was_mended_where_the_pool_cannot_see_it_works_after_a_reset(
    open_pool: OpenPool, run: Run, tmp_path: Path
) -> None:
    python, hidden = tmp_path / "python", tmp_path / "which"
    python.write_text(f'#!/bin/sh\nexec "$(cat {hidden})" "$@"\n')
    python.chmod(0o755)
    pool = await open_pool(worker_python=str(python), starts=StartPolicy(failures_max=2, probe_s=60.0))
    for name in ("a", "b"):
        with pytest.raises(WorkerStartError):
            await pool.send(name, "hello")
    took = [await refused_in_s(pool.send(f"c-{number}", "hello"), PoolUnavailableError) for number in range(10)]
    assert sorted(took)[5] < REFUSAL_S
    hidden.write_text(sys.executable)
    await refused_in_s(pool.send("a", "hello"), PoolUnavailableError)
    assert "starts are refused for " in (await run("ps")).err
    assert (await run("reset")).out == f"supervisor {os.getpid()}: worker starts are allowed again\n"
    assert (await pool.send("a", "hello")).text == "hello"


# --- quarantine -------------------------------------------------------------------------------------------------------


async def test_a_message_that_kills_twice_is_quarantined_shown_and_released(
    open_pool: OpenPool, obedient: Obedient, run: Run
) -> None:
    pool = await open_pool(**obedient.settings(), replay="never")
    key, text, flag = SessionKey("c", "ada"), "die_once here", obedient.folder / "died_here"
    for _ in range(2):
        assert [row.quarantined for row in await pool.sessions()] in ([], [()])
        with pytest.raises(WorkerCrashedError):
            await pool.send(key, text)
        flag.unlink()
    with pytest.raises(MessageQuarantinedError) as caught:
        await pool.send(key, text)
    fingerprint = caught.value.fingerprint
    assert f"hermes-pool release CONVERSATION {fingerprint}" in str(caught.value)
    assert (await pool.send(key, "another")).text == "another"
    assert (await seen(run))["c"]["quarantined"] == [fingerprint]
    assert f"quarantined: {fingerprint}" in (await run("ps")).out

    flag.touch()  # what it died of is mended
    unknown = await run("release", "c", fingerprint)
    assert unknown.status == 1
    assert unknown.err == f"hermes-pool: conversation 'c': no quarantined message has the fingerprint {fingerprint}\n"
    with pytest.raises(MessageQuarantinedError):
        await pool.send(key, text)
    assert (await run("release", "c", fingerprint, "--user", "ada")).out == "released\n"
    assert (await row_of(pool, "c")).quarantined == ()
    assert (await pool.send(key, text)).text == text
    assert pool.release(key, fingerprint) is False


async def test_a_reset_of_a_conversation_releases_its_messages(open_pool: OpenPool, obedient: Obedient) -> None:
    pool = await open_pool(**obedient.settings())
    with pytest.raises(WorkerCrashedError):
        await pool.send("c", "die")
    with pytest.raises(MessageQuarantinedError):
        await pool.send("c", "die")
    pool.reset("other")
    with pytest.raises(MessageQuarantinedError):
        await pool.send("c", "die")
    pool.reset("c")
    with pytest.raises(WorkerCrashedError):
        await pool.send("c", "die")


async def test_a_pool_that_is_not_open_resets_and_releases_nothing(tmp_path: Path) -> None:
    pool = HermesSessionManager(PoolSettings(agent="echo", state_dir=tmp_path))
    assert pool.deaths() == []
    assert pool.pool().starts is None
    with pytest.raises(PoolClosedError):
        pool.reset()
    with pytest.raises(PoolClosedError):
        pool.release("c", "cafe0123")


# --- the proof of a stop ----------------------------------------------------------------------------------------------


HIDES = ("", "deaf", "setsid daemon deaf", "setsid daemon cleared deaf")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere not all of it can be found")
@LAUNCHERS
@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_a_stop_tells_what_it_ended_and_that_nothing_is_left(
    open_pool: OpenPool, faulty: Callable[..., dict[str, Any]], launcher: str, how: str
) -> None:
    pool = await open_pool(
        **faulty("leaves_all_kinds_of_tools"),
        launcher=launcher,
        timeouts=quick(close_grace_s=5.0 if how == "closed" else 0.2),
    )
    tools = {int((await pool.send("c", f"tool {hides}")).text) for hides in HIDES}
    other = int((await pool.send("other", "tool deaf")).text)
    row = await row_of(pool, "c")
    assert row.pid is not None
    if how == "killed":
        psutil.Process(row.pid).suspend()
    stopped = await pool.stop("c")
    assert stopped is not None
    assert (stopped.how, stopped.worker, stopped.left) == (how, (row.pid, row.create_time), ())
    assert tools <= set(stopped.strays)
    assert row.pid not in stopped.strays
    assert not [pid for pid in (row.pid, *stopped.strays) if alive(pid)]
    assert alive(other), "another one's is let be"
    ends = await pool.close()
    assert [end.left for end in ends.values()] == [()]
    assert other in ends[SessionKey("other")].strays
    assert not alive(other)


TOOL_WHILE_CLOSING = """
import pathlib, subprocess, threading
from hermes_pool_worker.echo import EchoAgent

class Agent(EchoAgent):
    def close(self):
        tool = subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})
        pathlib.Path("tool").write_text(str(tool.pid))
        threading.Event().wait()
"""


@LAUNCHERS
async def test_a_tool_that_is_started_while_its_worker_is_being_stopped_goes_as_well(
    open_pool: OpenPool, tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "late.py").write_text(TOOL_WHILE_CLOSING)
    pool = await open_pool(
        agent="late:Agent",
        agent_paths=(str(tmp_path),),
        worker_cwd=tmp_path,
        launcher=launcher,
        timeouts=quick(close_grace_s=0.5),
    )
    await pool.send("c", "hello")
    stopped = await pool.stop("c")
    tool = int((tmp_path / "tool").read_text())
    assert not alive(tool)
    assert stopped is not None
    assert stopped.how != "closed"
    assert (stopped.strays, stopped.left) == ((tool,), ())


def test_what_carries_the_marker_and_cannot_be_ended_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    marker = secrets.token_hex(8)
    lost = subprocess.Popen(["sleep", "1000"], env={MARKER_VARIABLE: marker})
    try:
        with monkeypatch.context() as patched:
            patched.setattr("hermes_pool.system.processes.kill", lambda *_: [])
            assert end_tree((lost.pid, 1.0), marker, {}) == ((), (lost.pid,))
        assert end_tree((lost.pid, 1.0), marker, {}) == ((), ()), "a worker is no stray of itself"
    finally:
        lost.kill()
        lost.wait(10)


@pytest.mark.parametrize("hides", ["setsid deaf", "setsid deaf cleared"])
async def test_what_cannot_be_ended_is_said_to_be_left(
    open_pool: OpenPool, faulty: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, hides: str
) -> None:
    pool = await open_pool(**faulty("leaves_all_kinds_of_tools"), launcher="spawn", timeouts=quick(close_grace_s=0.2))
    tool = int((await pool.send("c", f"tool {hides}")).text)
    row = await row_of(pool, "c")
    assert row.pid is not None
    psutil.Process(row.pid).suspend()
    with monkeypatch.context() as patched:
        # As with one that waits for a disk: the signal is sent, and nothing comes of it.
        patched.setattr("hermes_pool.system.processes.kill", lambda *_: [])
        stopped = await pool.stop("c")
    assert stopped is not None
    assert tool in stopped.left
    assert alive(tool)
    assert stopped.strays == ()
    for pid in stopped.left:
        if alive(pid):
            psutil.Process(pid).kill()

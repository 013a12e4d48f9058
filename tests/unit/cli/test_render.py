"""What the command line prints and understands, without any process."""

import dataclasses
import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from hermes_pool.cli import render
from hermes_pool.crash_report import DeathReport
from hermes_pool.snapshot import BreakerSnapshot, PoolSnapshot, SessionSnapshot
from tests.support import known

HOSTILE = "a\x1b[31mred\x07\r\n\u202egnp.exe\ud800\0"
FULL = SessionSnapshot(
    conversation_id="conversation-5f3a2b1c-8d7e-4f60-9a1b-2c3d4e5f6071",
    session_id="20260302_141516_ab12cd",
    state="starting",
    pid=4194304,
    health="alive",
    uptime_s=11_520,
    idle_s=None,
    rss_bytes=1_400_000_000,
    cpu_s=3723.5,
    turns=12345,
    restart_count=12,
    last_error="worker died: SIGKILL (likely out of memory)",
)


def fitted(rows: list[SessionSnapshot], width: int = 80) -> str:
    out = io.StringIO()
    render._print_fitted(
        Console(file=out, width=width, force_terminal=True, color_system=None), [*map(render._cells, rows)]
    )
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 132, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    wide = dataclasses.replace(FULL, conversation_id="会話" * 40, user_id="ユーザー", last_error=None)
    table = fitted([FULL, wide, SessionSnapshot(conversation_id="c", state="idle")], width)
    lines = table.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert len(lines) >= 5
    if width >= 80:
        for cell in ("4194304", "starting", "3h12m", "1.3G", "62m", "12345", "12"):
            assert cell in lines[1]
        assert lines[1].startswith("conv")
        assert "6071 " in lines[1], "the end of an id tells it from others"
        assert "likely out of memory)" in " ".join(" ".join(lines[4:]).split())
    if width == 200:
        assert FULL.conversation_id in lines[1]


def test_nothing_hostile_reaches_the_terminal() -> None:
    row = SessionSnapshot(
        conversation_id=HOSTILE, user_id=HOSTILE, session_id=HOSTILE, state="idle", last_error=HOSTILE
    )
    for text in (fitted([row], 200), fitted([row]), render.plain_table([render._cells(row)])):
        assert not set(text) & set("\x1b\x07\r\u202e\ud800\0")
        text.encode()
    assert "\\x1b[31mred\\x07\\r\\n\\u202e" in render.plain_table([render._cells(row)])


def test_markup_in_an_id_is_text() -> None:
    assert "[bold]:smile:[/bold]" in fitted([SessionSnapshot(conversation_id="[bold]:smile:[/bold]", state="idle")])


def test_the_plain_table_is_complete_and_aligned() -> None:
    lines = render.plain_table(
        [render._cells(FULL), render._cells(SessionSnapshot(conversation_id="c", state="idle"))]
    ).split("\n")
    assert FULL.conversation_id in lines[1]
    assert lines[1].endswith(known(FULL.last_error))
    assert lines[0].index("SESSION") == lines[1].index(known(FULL.session_id))
    assert lines[2].split() == ["c", "-", "-", "idle", "-", "-", "-", "-", "0", "0", "-"]


def test_a_state_says_when_the_process_is_not_well() -> None:
    assert render._cells(dataclasses.replace(FULL, health="frozen"))[3] == "starting,frozen"


def test_a_state_says_for_how_long_a_session_backs_off_and_stays_one_word() -> None:
    row = SessionSnapshot(conversation_id="c", state="stopped", restart_breaker="open", retry_after_s=12.9)
    assert render._cells(row)[3] == "stopped,backoff=12s"
    assert render._cells(dataclasses.replace(row, restart_breaker="half_open", retry_after_s=None))[3] == "stopped"


@pytest.mark.parametrize(("health", "colour"), [("alive", "green"), ("frozen", "red")])
def test_jobs_are_counted_in_the_state_and_are_no_trouble(health: str, colour: str) -> None:
    row = SessionSnapshot(conversation_id="c", state="idle", health=health, jobs=("tests", "build"))
    state = render._cells(row)[3]
    assert state == ("idle,jobs=2" if health == "alive" else "idle,frozen,jobs=2")
    assert render._colour(state) == colour


@pytest.mark.parametrize(("last_error", "told"), [(None, ""), ("it failed", "; it failed")])
def test_quarantined_messages_are_told_before_the_last_error(last_error: str | None, told: str) -> None:
    row = SessionSnapshot(conversation_id="c", state="idle", quarantined=("0a1b", "2c3d"), last_error=last_error)
    assert render._cells(row)[-1] == f"quarantined: 0a1b, 2c3d{told}"


@pytest.mark.parametrize(
    ("starts", "told"),
    [
        (None, ""),
        (("closed", None, None), ""),
        (("open", 12.9, "no python\x1b"), "; worker starts are refused for 12s: no python\\x1b"),
        (("open", None, "no python"), "; worker starts have failed and are being retried: no python"),
        (("half_open", 5.0, "no python"), "; worker starts have failed and are being retried: no python"),
    ],
)
def test_the_head_line_tells_of_starts_only_where_they_fail(
    starts: tuple[str, float | None, str | None] | None, told: str
) -> None:
    breaker = None
    if starts is not None:
        state, retry_after_s, error = starts
        breaker = BreakerSnapshot(
            state=state, failures=3, failures_max=3, retry_after_s=retry_after_s, last_error=error
        )
    pool = PoolSnapshot(state="open", workers=1, workers_max=64, starts=breaker)
    assert render.headline(pool) == f"open: 1 of 64 workers{told}"


# --- deaths -----------------------------------------------------------------------------------------------------------

DEATH = DeathReport(
    report_id="3f2a91cd",
    conversation_id="conversation-5f3a2b1c-8d7e-4f60-9a1b-2c3d4e5f6071",
    at="2026-03-02T14:15:16.123+00:00",
    pid=4194304,
    incarnation=2,
    uptime_s=75.25,
    exit="was killed by SIGKILL (signal 9), possibly because the machine is out of memory",
    returncode=-9,
    turn_id="ab12cd34-12345",
    attempt=1,
    last_event="ToolStarted",
    silent_s=2.04,
    tools_open=("terminal", "web"),
    memory=((12.5, 60 << 20), (2.5, 5 << 30)),
    verdict="wedged: nothing moves",
    stacks=('File "agent.py", line 7 in turn',),
    stderr_tail=("last words",),
)


def test_a_report_is_shown_whole() -> None:
    assert render.report_lines(DEATH) == [
        "report:       3f2a91cd",
        "conversation: conversation-5f3a2b1c-8d7e-4f60-9a1b-2c3d4e5f6071",
        "when:         2026-03-02T14:15:16.123+00:00",
        "worker:       pid 4194304, incarnation 2, ran for 75.2 s",
        "exit:         was killed by SIGKILL (signal 9), possibly because the machine is out of memory",
        "turn:         ab12cd34-12345, attempt 1; last event ToolStarted, 2.0 s before the death",
        "open tools:   terminal, web",
        "verdict:      wedged: nothing moves",
        "memory:",
        "        12.5 s before: 60M",
        "         2.5 s before: 5.0G",
        "stacks:",
        '    File "agent.py", line 7 in turn',
        "last lines on stderr:",
        "    last words",
    ]


def test_a_report_without_a_turn_says_what_it_does_not_know() -> None:
    bare = DeathReport(
        report_id="3f2a91cd", conversation_id="c", at="2026-03-02T14:15:16.123+00:00", pid=None, incarnation=1,
        uptime_s=0.0, exit="exited with status 3", returncode=3,
    )  # fmt: skip
    assert render.report_lines(bare)[3:] == [
        "worker:       no process, incarnation 1, ran for 0.0 s",
        "exit:         exited with status 3",
        "turn:         none was running",
        "open tools:   none",
        "verdict:      none",
        "memory: none",
        "stacks: none",
        "last lines on stderr: none",
    ]


def test_nothing_hostile_of_a_report_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = dataclasses.replace(
        DEATH, conversation_id=HOSTILE, exit=HOSTILE, stderr_tail=(HOSTILE,), stacks=(HOSTILE,), verdict=HOSTILE,
        tools_open=(HOSTILE,), last_event=HOSTILE,
    )  # fmt: skip
    render.print_deaths([hostile])
    text = capsys.readouterr().out + "\n".join(render.report_lines(hostile))
    assert "\\x1b[31mred" in text
    assert not set(text) & set("\x1b\x07\r\u202e\ud800\0")


@pytest.mark.parametrize("width", [80, 132])
def test_the_table_of_deaths_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    rows = (
        render._death_cells(DEATH),
        render._death_cells(dataclasses.replace(DEATH, conversation_id="[red]", turn_id=None)),
    )
    render._print_deaths_fitted(Console(file=out, width=width, force_terminal=True, color_system=None), rows)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width
    assert lines[0].split() == ["when", "report", "conversation", "turn", "exit"]
    assert "3f2a91cd conv" in lines[1]
    assert "[red]" in out.getvalue()
    assert "out of memory" in " ".join(line[-(width - 59) :].strip() for line in lines)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (-1, "0s"),
        (0.9, "0s"),
        (99, "99s"),
        (100, "1m"),
        (6000, "1h40m"),
        (172_800, "2d0h"),
        (1e9, "11574d"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0B"), (999, "999B"), (10_240, "10K"), (5 << 20, "5.0M"), (1 << 50, "1024T")]
)
def test_sizes(count: int | None, text: str) -> None:
    assert render.size(count) == text


def test_every_duration_and_size_is_short() -> None:
    assert max(len(render.duration(2.0**n)) for n in range(28)) <= 6
    assert max(len(render.size(2**n + k)) for n in range(50) for k in (0, -1)) <= 5


@pytest.mark.parametrize("text", ["conversation-0123456789", "会話" * 20, "é" * 50, "ab"])
@pytest.mark.parametrize("cells", [3, 6, 7, 20])
def test_shortened_ids_fit_and_keep_both_ends(text: str, cells: int) -> None:
    short = render.shortened(text, cells)
    assert cell_len(short) <= cells
    if cells >= 6:
        assert short == text or (short[0] == text[0] and short[-1] == text[-1])

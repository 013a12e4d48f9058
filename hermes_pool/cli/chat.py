"""A chat in the terminal: the loop behind ``hermes-pool chat``."""

import asyncio
import dataclasses
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from hermes_pool.cli.render import print_error, visible
from hermes_pool.errors import HermesPoolError
from hermes_pool.settings import PoolSettings
from hermes_pool_worker import wire

if TYPE_CHECKING:
    from hermes_pool.conversation.reply import Reply
    from hermes_pool.conversation.turn import Turn
    from hermes_pool.manager import HermesSessionManager

_LINES_WAITING_MAX: Final = 100
_STOP_NOTICE_AFTER_S: Final = 0.5
_INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C ended."""


def talk(settings: PoolSettings, conversation: str, *, scripted: bool) -> int:
    """Chat until the input ends, and return the exit status."""
    with ExitStack() as stack:
        banner = f"conversation {conversation!r}, agent {settings.agent}"
        if scripted:
            from hermes_pool.testing.scripted_model import ScriptedModel, write_hermes_home  # noqa: PLC0415

            home = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="hermes-pool-", ignore_cleanup_errors=True))
            )
            model = stack.enter_context(ScriptedModel())
            # Its sessions live in a folder that is removed at the end, so nothing outside may remember them.
            settings = dataclasses.replace(
                settings,
                agent="hermes",
                hermes_home=write_hermes_home(home / "hermes", model.url),
                database_url=f"sqlite:///{home / 'hermes-pool.db'}",
            )
            banner = (
                f"conversation {conversation!r}, real Hermes on a SCRIPTED model: its replies follow fixed rules, no "
                "language model is involved"
            )
        try:
            return asyncio.run(_talk(settings, conversation, banner))
        except KeyboardInterrupt:  # before our handler was installed, or after it was removed
            return _INTERRUPTED


async def _talk(settings: PoolSettings, conversation: str, banner: str) -> int:
    from hermes_pool.manager import HermesSessionManager  # noqa: PLC0415

    status = 0
    async with Terminal() as terminal:
        terminal.note(banner + ("; Ctrl-C stops the answer, Ctrl-D leaves" if terminal.interactive else ""))
        async with HermesSessionManager(settings) as sessions:
            while (text := await terminal.message()) is not None:
                end = await Exchange(sessions, conversation, text, terminal).run()
                if end == "left":
                    return _INTERRUPTED
                if end == "failed" and not terminal.interactive:
                    status = 1
    return status


class Terminal:
    """Standard input, standard output and the interrupt key of a chat.

    A thread reads the input, because an event loop cannot wait for a file or, on some systems, for a terminal. It reads
    the descriptor itself: a thread that is blocked in ``sys.stdin`` would keep the interpreter from ending.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._is_screen = sys.stdout.isatty()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._room = threading.Semaphore(_LINES_WAITING_MAX)
        self._interrupted = asyncio.Event()
        self._leaving = False
        self._ended = False
        self._mid_line = False
        self._handlers: dict[int, Any] = {}
        from rich.console import Console  # noqa: PLC0415

        self._console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._signalled)
        threading.Thread(target=self._read, name="hermes-pool-input", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._start_line()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    # --- input ---

    def _signalled(self, number: int, _frame: FrameType | None) -> None:
        self._leaving = self._leaving or number == signal.SIGTERM
        self._loop.call_soon_threadsafe(self._interrupted.set)

    def _read(self) -> None:
        waiting = b""
        with suppress(OSError, RuntimeError):  # the input or the event loop is closed
            while data := os.read(0, 65536):
                *lines, waiting = (waiting + data).split(b"\n")
                for line in lines:
                    self._hand_over(line)
            if waiting:
                self._hand_over(waiting)
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _hand_over(self, line: bytes) -> None:
        self._room.acquire()  # released by the event loop, when it takes the line
        self._loop.call_soon_threadsafe(self._lines.put_nowait, line.decode("utf-8", "replace").rstrip("\r"))

    async def line(self) -> str | None:
        """Return the next line; ``None`` at the end of the input, however often it is called."""
        if self._ended:
            return None
        line = await self._lines.get()
        if line is None:
            self._ended = True
        else:
            self._room.release()
        return line

    async def message(self) -> str | None:
        """Prompt for the next message; ``None`` if the user leaves."""
        while not self._leaving:
            self._interrupted.clear()
            if self.interactive:
                self._start_line()
                self._write("> ", "bold")
            reading = asyncio.ensure_future(self.line())
            if not await self.unless_interrupted(reading):
                reading.cancel()
                return None
            self._mid_line = self.interactive and reading.result() is None
            text = reading.result()
            if text is None or text.strip():
                return text
        return None

    async def unless_interrupted(self, work: Awaitable[Any]) -> bool:
        """Wait for ``work`` or the interrupt key. Return whether ``work`` is done; it is never cancelled."""
        task = asyncio.ensure_future(work)
        key = asyncio.ensure_future(self._interrupted.wait())
        try:
            await asyncio.wait({task, key}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            key.cancel()
        self._interrupted.clear()
        return task.done()

    @property
    def leaving(self) -> bool:
        """Whether the process was asked to terminate (SIGTERM)."""
        return self._leaving

    # --- output ---

    def show_piece(self, text: str, style: str = "") -> None:
        """Print a piece of the answer as it arrives, if the output is a terminal."""
        if self._is_screen:
            self._write(visible(text.replace("\r\n", "\n"), keep="\n\t"), style)

    def print_answer(self, text: str) -> None:
        """Print the complete answer, byte for byte, if the output is not a terminal."""
        if not self._is_screen:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line that is not part of an answer."""
        line = visible(text, keep="\n")
        if self._is_screen:
            self._start_line()
            self._write(line + "\n", "dim")
        else:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def error(self, error: HermesPoolError) -> None:
        """Print an error."""
        self._start_line()
        print_error(str(error))

    def ask(self, text: str) -> None:
        """Print a question and leave the cursor behind it."""
        self._start_line()
        self._write(visible(text, keep="\n"), "yellow")

    def _start_line(self) -> None:
        if self._mid_line:
            self._write("\n")

    def _write(self, text: str, style: str = "") -> None:
        if not text:
            return
        if self._is_screen:
            # Not print(), which would lay out each piece as a paragraph of its own.
            self._console.out(text, style=style or None, end="", highlight=False)
            sys.stdout.flush()
        elif self.interactive:  # a prompt: the output is redirected, but the input is a terminal
            sys.stderr.write(text)
            sys.stderr.flush()
        self._mid_line = not text.endswith("\n")


class Exchange:
    """One message, and what is shown of its answer."""

    def __init__(self, sessions: "HermesSessionManager", conversation: str, text: str, terminal: Terminal) -> None:
        self._sessions = sessions
        self._conversation = conversation
        self._text = text
        self._terminal = terminal
        self._turn: Turn | None = None
        """The turn, once it has begun."""
        self._attempt = 1
        self._shown = ""
        self._asking: set[asyncio.Task[None]] = set()
        self._one_question = asyncio.Lock()

    async def run(self) -> Literal["answered", "stopped", "failed", "left"]:
        """Show the answer, and return how it ended. Ctrl-C stops it; a second Ctrl-C leaves the chat."""
        work = asyncio.ensure_future(self._show_turn())
        stopped, left = False, False
        try:
            if not await self._terminal.unless_interrupted(work):
                stopped = True
                self._withdraw_questions()
                stopping = asyncio.ensure_future(self._turn.cancel()) if self._turn is not None else None
                if stopping is None:
                    work.cancel()
                if not (await asyncio.wait({work}, timeout=_STOP_NOTICE_AFTER_S))[0]:
                    self._terminal.note("stopping; Ctrl-C again leaves")
                left = self._terminal.leaving or not await self._terminal.unless_interrupted(work)
                if stopping is not None:
                    stopping.cancel()
        finally:
            self._withdraw_questions()
            work.cancel()
            await asyncio.wait({work})
        end = self._ended(work, stopped=stopped)
        if stopped:
            self._terminal.note("stopped")
        return "left" if left else end

    def _ended(self, work: "asyncio.Task[Reply]", *, stopped: bool) -> Literal["answered", "stopped", "failed"]:
        try:
            reply = work.result()
        except asyncio.CancelledError:
            return "stopped"
        except HermesPoolError as error:
            if stopped:
                return "stopped"
            self._terminal.error(error)
            return "failed"
        if not self._shown.endswith(reply.text):
            # Some of it did not arrive in pieces.
            begun = reply.text.startswith(self._shown)
            self._terminal.show_piece(reply.text[len(self._shown) :] if begun else "\n" + reply.text)
        self._terminal.show_piece("" if reply.text.endswith("\n") else "\n")
        self._terminal.print_answer(reply.text)
        if reply.notice:
            self._terminal.note(f"[{reply.notice}]")
        return "stopped" if stopped else "answered"

    async def _show_turn(self) -> "Reply":
        async with self._sessions.turn(self._conversation, self._text) as turn:
            self._turn = turn
            async for event in turn:
                self._show_event(turn, event)
            return await turn.reply()

    def _show_event(self, turn: "Turn", event: wire.TurnEvent) -> None:
        terminal = self._terminal
        if event.attempt != self._attempt:
            self._attempt, self._shown = event.attempt, ""
            self._withdraw_questions()
            terminal.note("[the worker died and was replaced; the answer starts over]")
        match event:
            case wire.TextDelta(text=text):
                self._shown += text
                terminal.show_piece(text)
            case wire.ReasoningDelta(text=text):
                terminal.show_piece(text, "dim italic")
            case wire.ToolStarted(name=name, arguments=arguments):
                terminal.note(f"[{name} {_one_line(arguments)}]")
            case wire.ToolFinished(name=name, ok=False, result=result):
                terminal.note(f"[{name} failed: {_one_line(result)}]")
            case wire.Status(text=text):
                terminal.note(f"[{_one_line(text)}]")
            case wire.Question():
                asking = asyncio.ensure_future(self._ask(turn, event))
                self._asking.add(asking)
                asking.add_done_callback(self._asking.discard)

    def _withdraw_questions(self) -> None:
        """Stop asking: the turn is over, or another worker runs it."""
        for asking in self._asking:
            asking.cancel()

    async def _ask(self, turn: "Turn", question: wire.Question) -> None:
        async with self._one_question:
            choices = question.choices
            if not self._terminal.interactive:
                # The next line of the input is a message. It must not be taken for consent.
                self._terminal.note(f"[declined, because the input is not a terminal: {_one_line(question.text)}]")
                refusal = "deny" if question.kind == "approval" else "No user is available to answer."
                await turn.answer(question.question_id, refusal)
                return
            what = "Allow this?\n  " if question.kind == "approval" else ""
            listed = "".join(f"\n  {number}) {choice}" for number, choice in enumerate(choices, 1))
            while True:
                self._terminal.ask(f"{what}{question.text}{listed}\n? ")
                line = await self._terminal.line()
                if line is None:
                    answer: str | None = "deny" if question.kind == "approval" else ""
                else:
                    answer = parse_choice(line.strip(), choices, free=question.kind == "clarify")
                if answer is not None:
                    await turn.answer(question.question_id, answer)
                    return


def parse_choice(line: str, choices: Sequence[str], *, free: bool) -> str | None:
    """Return the choice that a line names, by number or word. Any other line is an answer only if ``free``."""
    if line.isdecimal() and 0 < int(line) <= len(choices):
        return choices[int(line) - 1]
    for choice in choices:
        if line.casefold() == choice.casefold():
            return choice
    return line if free and line else None


def _one_line(text: str, chars: int = 200) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= chars else f"{flat[: chars - 3]}..."

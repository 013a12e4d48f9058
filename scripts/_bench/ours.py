"""The pool itself, through its public API, with an echo agent."""

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from _bench.fleet import DELTAS, Fleet, NotSupportedError, Situation, tree
from hermes_pool import HermesSessionManager, PoolSettings, Reply, SettingsError, TextDelta, TurnEnded

AGENT = "hermes_pool_bench_agent:BenchAgent"
SPARES = 2


def settings_of(launcher: str, spares: int, **more: Any) -> PoolSettings:
    """Return settings. Raises ``NotSupportedError`` if this version of the pool lacks the launcher."""
    if spares:
        more["spares"] = spares
    try:
        return PoolSettings(launcher=launcher, **more)  # type: ignore[arg-type] # what it may be is tried
    except (SettingsError, TypeError) as error:
        raise NotSupportedError(f"not supported ({error})") from error


class Pool(Fleet):
    """A manager with echo workers."""

    launcher = "spawn"
    spares = 0
    readies_itself = True
    manager: HermesSessionManager

    def __init__(self, situation: Situation) -> None:
        super().__init__(situation)
        self._folder = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        folder = Path(
            self._folder.enter_context(tempfile.TemporaryDirectory(prefix="hpb-", ignore_cleanup_errors=True))
        )
        how: dict[str, Any] = {"agent": "echo", "agent_options": {"durable": False}}
        if self.situation.faulty:
            from hermes_pool import RestartPolicy  # noqa: PLC0415 - older versions, measured beside this one, have none

            how = {
                "agent": AGENT,
                "agent_paths": (str(Path(__file__).parent),),
                # the same message is killed again and again
                "restarts": RestartPolicy(replacements_per_turn_max=0, quarantine_after=0),
            }
        settings = settings_of(
            self.launcher, self.spares, state_dir=folder, workers_max=self.situation.sessions + 8, **how
        )
        self.manager = HermesSessionManager(settings)
        await self.manager.__aenter__()
        return self

    async def send(self, key: str, text: str) -> str:
        return (await self.manager.send(key, text)).text

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.manager.close()
        self._folder.close()

    async def pid(self, key: str) -> int:
        for row in await self.manager.sessions():
            if row.conversation_id == key and row.pid is not None:
                return row.pid
        raise LookupError(f"{key} has no worker")

    async def helpers(self) -> set[int]:
        workers = {row.pid for row in await self.manager.sessions()}
        return tree() - workers - {os.getpid()}

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        assert text.startswith(DELTAS)
        async with self.manager.turn(key, text) as turn:
            async for event in turn:
                if isinstance(event, TextDelta):
                    yield len(event.text)
            await turn.reply()


class Zygote(Pool):
    """The same with forked workers."""

    launcher = "zygote"


class TurnFace(Zygote):
    """The same by ``turn``: one caller, who reads the events and then takes the reply."""

    async def send(self, key: str, text: str) -> str:
        async with self.manager.turn(key, text) as turn:
            async for _ in turn:
                pass
            return (await turn.reply()).text


class Events(Zygote):
    """The same by ``start`` and ``events``: a turn of the conversation, and one who watches the conversation."""

    def __init__(self, situation: Situation) -> None:
        super().__init__(situation)
        self._watching: dict[str, AsyncIterator[tuple[int, object]]] = {}

    async def send(self, key: str, text: str) -> str:
        watching = self._watch(key)
        await self.manager.start(key, text)
        async for _, event in watching:
            if isinstance(event, TurnEnded):
                return event.outcome.text if isinstance(event.outcome, Reply) else ""
        raise LookupError("the turn has no end")

    async def stream(self, key: str, text: str) -> AsyncIterator[int]:
        watching = self._watch(key)
        await self.manager.start(key, text)
        async for _, event in watching:
            if isinstance(event, TextDelta):
                yield len(event.text)
            elif isinstance(event, TurnEnded):
                return

    def _watch(self, key: str) -> AsyncIterator[tuple[int, object]]:
        """The one watcher of a conversation, which stays for all its turns."""
        if key not in self._watching:
            self._watching[key] = self.manager.events(key)
        return self._watching[key]


class Spare(Zygote):
    """The same with spare workers."""

    spares = SPARES

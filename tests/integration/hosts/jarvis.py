"""The example host of the documents, in a process of its own, and what tests say to it."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.integration.hosts import ROOT, Host
from tests.support import AGENTS, until

EXAMPLE = ROOT / "docs" / "examples" / "jarvis"


class Jarvis(Host):
    """``docs/examples/jarvis`` with the agent ``showman``, or with another one."""

    def __init__(self, folder: Path, *, port: int = 0, environ: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.show = folder / "show"
        self.show.mkdir(exist_ok=True)
        own = {
            "PYTHONPATH": f"{ROOT}:{EXAMPLE}",
            "JARVIS_DATABASE": f"sqlite:///{folder / 'jarvis.db'}",
            "HERMES_POOL_AGENT": "showman:Agent",
            "HERMES_POOL_AGENT_PATHS": str(AGENTS),
            "HERMES_POOL_AGENT_OPTIONS": json.dumps({"folder": str(self.show)}),
        }
        super().__init__("jarvis.app:create_app", folder, "--factory", port=port, environ={**own, **(environ or {})})

    def allow(self, name: str) -> None:
        """Let the agent go on that waits for this name."""
        (self.show / name).touch()

    @property
    def asked(self) -> list[str]:
        """The messages that have reached the agent."""
        try:
            return (self.show / "asked").read_text().splitlines()
        except FileNotFoundError:
            return []


async def say(client: httpx.AsyncClient, conversation: str, turn_id: str, text: str) -> httpx.Response:
    return await client.post(f"/conversations/{conversation}/messages", json={"id": turn_id, "text": text})


async def messages(client: httpx.AsyncClient, conversation: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get(f"/conversations/{conversation}")).json()["messages"]
    return found


async def answer_to(client: httpx.AsyncClient, conversation: str, turn_id: str) -> dict[str, Any]:
    """Wait until an answer is stored, and return it."""

    async def found() -> dict[str, Any] | None:
        for message in await messages(client, conversation):
            if (message["turn_id"], message["role"]) == (turn_id, "assistant"):
                return message
        return None

    return await until(found, f"an answer to {turn_id}")

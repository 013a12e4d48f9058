"""Minimal echo servers over stdio with the MCP and ACP Python SDKs: ``peer_servers.py mcp|acp``."""

import asyncio
import os
import sys
from typing import Any

WAIT, DELTAS = "/wait", "/deltas"


def serve_mcp() -> None:
    """Serve a tool ``answer``. Pieces are sent as progress notifications."""
    from mcp.server.mcpserver import Context, MCPServer  # noqa: PLC0415 - only one of the two is needed

    server = MCPServer("echo", log_level="ERROR")

    async def answer(text: str, context: Context) -> str:
        if text == WAIT:
            await asyncio.sleep(3600)
        if text.startswith(DELTAS):
            _, count, size = text.split()
            piece = "x" * int(size)
            for number in range(int(count)):
                await context.report_progress(number, message=piece)
            return ""
        return text

    def pid() -> int:
        return os.getpid()

    for tool in (answer, pid):
        server.tool()(tool)
    server.run("stdio")


def serve_acp() -> None:
    """Serve sessions. Answers are sent as message chunks."""
    import acp  # noqa: PLC0415

    class Echo:
        def on_connect(self, conn: Any) -> None:
            self.client = conn

        async def initialize(self, protocol_version: int, **_: Any) -> Any:
            return acp.InitializeResponse(protocol_version=protocol_version)

        async def new_session(self, cwd: str, **_: Any) -> Any:
            return acp.NewSessionResponse(session_id="echo")

        async def prompt(self, session_id: str, prompt: list[Any], **_: Any) -> Any:
            text = prompt[0].text
            if text == WAIT:
                await asyncio.sleep(3600)
            count, piece = 1, text
            if text.startswith(DELTAS):
                _, number, size = text.split()
                count, piece = int(number), "x" * int(size)
            for _number in range(count):
                await self.client.session_update(session_id, acp.update_agent_message_text(piece))
            return acp.PromptResponse(stop_reason="end_turn")

    asyncio.run(acp.run_agent(Echo()))


if __name__ == "__main__":
    {"mcp": serve_mcp, "acp": serve_acp}[sys.argv[1]]()

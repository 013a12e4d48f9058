"""What is known about a turn however it ended: what was said, what may have been done, and whether it is remembered."""

import msgspec

from hermes_pool_worker.plain import Plain


class ToolUse(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """One use of a tool in a turn."""

    name: str
    call_id: str = ""
    """Names the call, as its events do; empty if only the history knows of it."""
    arguments: str = ""
    """A preview, shortened by the agent."""
    finished: bool = False
    """Whether the agent has reported its end."""
    ok: bool | None = None
    """Whether it succeeded; ``None`` until it has finished."""
    may_have_acted: bool = True
    """False only for a tool that the settings name safe (``safe_tools``): to use it again does no harm."""


class TurnAccount(msgspec.Struct, Plain, frozen=True, kw_only=True):
    """What is known about a turn that has ended. Each reply and each ``TurnError`` has these members."""

    tools: tuple[ToolUse, ...] = ()
    """The tools that were used, over all attempts, in the order in which they started."""
    text: str = ""
    """The reply, or what had been said of it."""
    usage: dict[str, int] = {}
    """The agent's figures for this turn (``input_tokens``, ``output_tokens``, ...)."""
    attempts: int = 1
    """How many times the turn was begun: 1, and one more for each worker that died in it and was replaced."""
    kept: bool = False
    """Whether the turn is in the conversation's history, so that later prompts carry it."""
    model: str | None = None
    """The model that answered, where the agent names it."""

    @property
    def may_have_acted(self) -> bool:
        """Whether a tool that is not named safe was used."""
        return any(tool.may_have_acted for tool in self.tools)

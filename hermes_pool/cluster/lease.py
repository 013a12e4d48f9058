"""Who takes part, and who has a conversation."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Supervisor:
    """A supervisor as it has presented itself."""

    id: str
    address: str
    process: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Who has a conversation. ``owner`` is ``None`` if nobody has it that is known and not buried."""

    owner_id: str | None
    owner: Supervisor | None
    fence: int

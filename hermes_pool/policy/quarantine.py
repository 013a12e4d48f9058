"""Messages that kill workers are not sent again."""

import os
from dataclasses import dataclass
from hashlib import blake2b

from hermes_pool.errors import (
    MessageQuarantinedError,
)
from hermes_pool.settings import RestartPolicy
from hermes_pool.snapshot import KillerSnapshot

QUARANTINE_KEPT = 32
"""How many messages that have killed are remembered for a session; the one that killed longest ago goes first."""
_FINGERPRINT_BYTES = 8
_FINGERPRINT_KEY = os.urandom(16)
"""So that nobody who sees a fingerprint can try out which short message it is of."""


@dataclass(frozen=True, slots=True)
class Killer:
    """A message that has ended workers."""

    deaths: int
    chars: int
    """Length of the text: most messages are told apart by it, and need no fingerprint."""


class Quarantine:
    """The messages of one session that end workers: after ``quarantine_after`` of them a message is sent no more.

    Deaths count over the attempts of a turn and over turns. A completed turn clears its message; so does a release. A
    ``quarantine_after`` of 0 refuses none. At most ``QUARANTINE_KEPT`` are remembered, in memory only.
    """

    def __init__(self, policy: RestartPolicy, *, conversation_id: str | None = None) -> None:
        self._after = policy.quarantine_after
        self._conversation_id = conversation_id
        self.killers: dict[str, Killer] = {}
        """By fingerprint; the one that killed last is at the end. Mostly empty, so that nothing has to be asked."""

    def check(self, text: str) -> None:
        """Raise ``MessageQuarantinedError`` for a message that has ended too many workers."""
        fingerprint = self._known(text)
        if fingerprint is None or not self._refuses(self.killers[fingerprint]):
            return
        deaths = self.killers[fingerprint].deaths
        raise MessageQuarantinedError(
            f"this message has ended {deaths} worker{'' if deaths == 1 else 's'} (restarts.quarantine_after) and "
            f"is not sent again: word it differently, or mend what they died of and release it (fingerprint "
            f"{fingerprint}) with release() or: hermes-pool release CONVERSATION {fingerprint}",
            fingerprint=fingerprint,
            deaths=deaths,
            conversation_id=self._conversation_id,
        )

    def note_death(self, text: str) -> None:
        """Count a worker that died without anybody's wish while it had this message."""
        fingerprint = _fingerprint(text)
        before = self.killers.pop(fingerprint, None)
        self.killers[fingerprint] = Killer(1 if before is None else before.deaths + 1, len(text))
        if len(self.killers) > QUARANTINE_KEPT:
            self.killers.pop(next(iter(self.killers)))

    def note_completed(self, text: str) -> None:
        """Clear a message: its turn has ended with a reply."""
        if (fingerprint := self._known(text)) is not None:
            self.release(fingerprint)

    def release(self, fingerprint: str) -> bool:
        """Let a message in again, as if it had never killed; say whether it was known."""
        return self.killers.pop(fingerprint, None) is not None

    def reset(self) -> None:
        """Let all messages in again."""
        self.killers.clear()

    def snapshot(self) -> tuple[KillerSnapshot, ...]:
        """Return the messages that have killed, the last one at the end."""
        return tuple(
            KillerSnapshot(fingerprint=fingerprint, deaths=killer.deaths, quarantined=self._refuses(killer))
            for fingerprint, killer in self.killers.items()
        )

    def _refuses(self, killer: Killer) -> bool:
        return killer.deaths >= self._after > 0

    def _known(self, text: str) -> str | None:
        """Return the fingerprint of a message that has killed. The path of every message: mostly there is none."""
        if not any(killer.chars == len(text) for killer in self.killers.values()):
            return None
        fingerprint = _fingerprint(text)
        return fingerprint if fingerprint in self.killers else None


def _fingerprint(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")  # half a surrogate pair cannot be sent, but must not raise here
    return blake2b(data, digest_size=_FINGERPRINT_BYTES, key=_FINGERPRINT_KEY).hexdigest()

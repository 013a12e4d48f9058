"""Keeps a message that kills workers from being sent again."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from hermes_pool.errors import MessageQuarantinedError
from hermes_pool.settings import RestartPolicy
from hermes_pool.snapshot import KillerSnapshot

QUARANTINE_KEPT = 32
"""How many killer messages are remembered per session; the one that killed longest ago is dropped first."""
QUARANTINE_MAX_S = 3600.0
"""The longest time for which a message is refused, in seconds."""
_FINGERPRINT_BYTES = 8
_FINGERPRINT_KEY = os.urandom(16)
"""A secret key, so that a fingerprint cannot be matched against guessed messages."""


@dataclass(frozen=True, slots=True)
class Killer:
    """A message that has killed workers."""

    deaths: int
    chars: int
    """Length of the text. It rules out most messages without computing a fingerprint."""
    until: float
    """Until when it is refused, if it is."""


class Quarantine:
    """The killer messages of one session: each is refused once ``restarts.quarantine_after`` workers have died of it.

    It is refused for ``restarts.quarantine_s``, and then let in once more, because it may be innocent: workers are also
    killed from outside. Each further death refuses it for twice as long as the one before. ``clock`` is monotonic.

    Deaths add up over the attempts of a turn and over turns. A completed turn clears its message, and so does a
    release. With 0, no message is refused. At most ``QUARANTINE_KEPT`` messages are remembered, in memory only.
    """

    def __init__(
        self, policy: RestartPolicy, clock: Callable[[], float], *, conversation_id: str | None = None
    ) -> None:
        self._after = policy.quarantine_after
        self._first_s = policy.quarantine_s
        self._clock = clock
        self._conversation_id = conversation_id
        self.killers: dict[str, Killer] = {}
        """By fingerprint; the latest to kill is last. Usually empty, so check that before anything else."""

    def check(self, text: str) -> None:
        """Raise ``MessageQuarantinedError`` if the message has killed too many workers."""
        fingerprint = self._known(text)
        if fingerprint is None or not self._refuses(self.killers[fingerprint]):
            return
        killer = self.killers[fingerprint]
        deaths, left_s = killer.deaths, killer.until - self._clock()
        raise MessageQuarantinedError(
            f"this message has ended {deaths} worker{'' if deaths == 1 else 's'} (restarts.quarantine_after) and "
            f"is not sent again for {left_s:.0f} s: reword it, or fix the cause of the deaths and release it "
            f"(fingerprint {fingerprint}) with release() or: hermes-pool release CONVERSATION {fingerprint}",
            fingerprint=fingerprint,
            deaths=deaths,
            retry_after_s=left_s,
            conversation_id=self._conversation_id,
        )

    def note_death(self, text: str) -> None:
        """Count a worker that died with this message, although the pool did not want it to."""
        fingerprint = _fingerprint(text)
        before = self.killers.pop(fingerprint, None)
        deaths = 1 if before is None else before.deaths + 1
        refused_s = min(QUARANTINE_MAX_S, self._first_s * 2.0 ** min(30, max(0, deaths - self._after)))
        self.killers[fingerprint] = Killer(deaths, len(text), self._clock() + refused_s)
        if len(self.killers) > QUARANTINE_KEPT:
            self.killers.pop(next(iter(self.killers)))

    def note_completed(self, text: str) -> None:
        """Clear a message whose turn has ended with a reply."""
        if (fingerprint := self._known(text)) is not None:
            self.release(fingerprint)

    def release(self, fingerprint: str) -> bool:
        """Forget that a message has killed; return whether it was known."""
        return self.killers.pop(fingerprint, None) is not None

    def reset(self) -> None:
        """Forget all killer messages."""
        self.killers.clear()

    def snapshot(self) -> tuple[KillerSnapshot, ...]:
        """Return the killer messages, the latest to kill last."""
        return tuple(
            KillerSnapshot(fingerprint=fingerprint, deaths=killer.deaths, quarantined=self._refuses(killer))
            for fingerprint, killer in self.killers.items()
        )

    def _refuses(self, killer: Killer) -> bool:
        return killer.deaths >= self._after > 0 and self._clock() < killer.until

    def _known(self, text: str) -> str | None:
        """Return the fingerprint of a killer message, else ``None``. Runs for each message, so it is quick for most."""
        if not any(killer.chars == len(text) for killer in self.killers.values()):
            return None
        fingerprint = _fingerprint(text)
        return fingerprint if fingerprint in self.killers else None


def _fingerprint(text: str) -> str:
    data = text.encode("utf-8", "surrogatepass")  # a lone surrogate cannot be sent, but must not raise here
    return blake2b(data, digest_size=_FINGERPRINT_BYTES, key=_FINGERPRINT_KEY).hexdigest()

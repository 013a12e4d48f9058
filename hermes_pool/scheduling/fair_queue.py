"""Who is next: a queue that users share fairly."""

from collections.abc import Hashable, Iterator
from itertools import chain, zip_longest
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """Somebody who can stand in the queue."""

    @property
    def user(self) -> Hashable:
        """Whose turn it is counted as."""

    def __hash__(self) -> int:
        """Be told apart from all others."""


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """A line in which users take turns, and each user's own are served first come first served."""

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[W, None]] = {}  # in the order of their next turns

    def __len__(self) -> int:
        """Count all who wait."""
        return sum(map(len, self._users.values()))

    def __bool__(self) -> bool:
        """Say whether anybody waits."""
        return bool(self._users)

    def __iter__(self) -> Iterator[W]:
        """Go through all in the order in which they will be served if nobody else comes."""
        rounds = zip_longest(*map(list, self._users.values()))
        return (waiter for waiter in chain.from_iterable(rounds) if waiter is not None)

    def add(self, waiter: W) -> None:
        """Take a place: behind one's own, and where one has none, behind all users."""
        self._users.setdefault(waiter.user, {})[waiter] = None

    def discard(self, waiter: W) -> None:
        """Leave the queue; nothing happens to one who has left."""
        own = self._users.get(waiter.user)
        if own is not None:
            own.pop(waiter, None)
            if not own:
                del self._users[waiter.user]

    def pop(self) -> W:
        """Return who is next; ``StopIteration`` when nobody waits."""
        user = next(iter(self._users))
        own = self._users.pop(user)
        waiter = next(iter(own))
        del own[waiter]
        if own:
            self._users[user] = own  # behind all others
        return waiter

    def position(self, waiter: W) -> int:
        """Return one's place, 1 for who is next."""
        return next(place for place, other in enumerate(self, 1) if other is waiter)

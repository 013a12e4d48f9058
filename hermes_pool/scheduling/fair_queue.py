"""A queue that users share fairly."""

from collections.abc import Hashable, Iterator
from itertools import chain, zip_longest
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """An entry of the queue."""

    @property
    def user(self) -> Hashable:
        """The user it counts for."""

    def __hash__(self) -> int:
        """Return a hash that tells it apart from the other entries."""


W = TypeVar("W", bound=Waiting)


class FairQueue(Generic[W]):
    """A queue that serves users in turn (round robin), and the entries of each user first come, first served."""

    def __init__(self) -> None:
        self._users: dict[Hashable, dict[W, None]] = {}  # the user that is served next comes first

    def __len__(self) -> int:
        """Return the number of entries."""
        return sum(map(len, self._users.values()))

    def __bool__(self) -> bool:
        """Return whether there is an entry."""
        return bool(self._users)

    def __iter__(self) -> Iterator[W]:
        """Iterate in the order in which the entries will be served if no other one is added."""
        rounds = zip_longest(*map(list, self._users.values()))
        return (waiter for waiter in chain.from_iterable(rounds) if waiter is not None)

    def add(self, waiter: W) -> None:
        """Add an entry behind those of its user; a user without entries goes behind all users."""
        self._users.setdefault(waiter.user, {})[waiter] = None

    def discard(self, waiter: W) -> None:
        """Remove an entry; do nothing if it is not in the queue."""
        own = self._users.get(waiter.user)
        if own is not None:
            own.pop(waiter, None)
            if not own:
                del self._users[waiter.user]

    def pop(self) -> W:
        """Remove and return the next entry; raise ``StopIteration`` if the queue is empty."""
        user = next(iter(self._users))
        own = self._users.pop(user)
        waiter = next(iter(own))
        del own[waiter]
        if own:
            self._users[user] = own  # behind all others
        return waiter

    def position(self, waiter: W) -> int:
        """Return the place of an entry, 1 for the next one."""
        return next(place for place, other in enumerate(self, 1) if other is waiter)

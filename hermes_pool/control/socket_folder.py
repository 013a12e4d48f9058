"""Where control sockets live, how a client finds them, and who may connect.

Each running supervisor owns two files in ``<state_dir>/control``, a folder that only its user may enter (0700)::

    <pid>-<token>.lock    the pointer: the host's name, a newline, the absolute path of the socket
    <pid>-<token>.sock    the socket (0600), unless the path is too long for one

The supervisor holds a lock on the pointer for as long as it lives. The kernel drops that lock when the process ends, in
whatever way. A client that gets the lock therefore knows that the supervisor is dead, and removes both files. A pid
alone would prove nothing: it may belong to another process by now.

Where the path of ``state_dir`` is too long for a Unix socket, the socket lies in a short folder of the system, to which
the pointer leads. The client needs no environment variable to find it, and any number of supervisors can share one
``state_dir``.

A name that starts with a dot is a file in the making. It is renamed once it is complete, so no client sees half of one.
"""

import os
import secrets
import socket
import stat
import struct
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hermes_pool.errors import HermesPoolError

if sys.platform != "win32":
    import fcntl

FOLDER: Final = "control"
"""Name of the folder below ``state_dir``."""
ADDRESS_BYTES_MAX: Final = 103
"""Longest path of a Unix socket that every supported system accepts, in bytes (Linux alone: 107)."""
BACKLOG: Final = 128
"""Connections that the kernel queues until the supervisor accepts them."""


class ControlError(HermesPoolError):
    """The control folder or its socket cannot be used. The message names the folder and the remedy."""

    code = "control_failed"


def unix_sockets_available() -> bool:
    """Return whether this platform has Unix sockets. Without them there is no control socket, and nothing to query."""
    return sys.platform != "win32" and hasattr(socket, "AF_UNIX")


def is_peer_allowed(connection: socket.socket, user_ids: set[int]) -> bool:
    """Return whether the process at the other end runs as one of these users.

    ``True`` where the system does not say: there the modes of the folder and the socket have to suffice.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    size = struct.calcsize("3i")
    _pid, user_id, _group_id = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, option, size))
    return user_id in user_ids


# --- the supervisor's side --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A listening socket and its files."""

    listener: socket.socket
    address: Path
    pointer: Path
    lock: int
    """Descriptor of ``pointer``. While it is open, the lock tells clients that this supervisor is alive."""

    def forget(self) -> None:
        """Let go of it in a forked process: it belongs to the parent, and must not seem to live when that is dead."""
        os.close(self.lock)
        self.listener.close()

    def unpublish(self) -> None:
        """Remove the files and drop the lock. The listener stays open: the event loop has to let go of it first."""
        _published.discard(self)
        # The pointer goes first, so that no client finds an address that is about to vanish.
        for path in (self.pointer, self.address):
            with suppress(OSError):
                path.unlink()
        os.close(self.lock)


def publish(state_dir: Path, folder_name: str = FOLDER) -> Endpoint:
    """Listen on a new socket and write the pointer to it. Blocks on the file system.

    Raises ``ControlError`` if no folder can hold the socket: it is not writable, a link, or another user's.
    """
    if sys.platform == "win32":
        raise NotImplementedError
    folder = state_dir / folder_name
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(folder)
    except OSError as error:
        raise ControlError(
            f"cannot create the control folder {folder} ({error.strerror or error}): make it writable, or use another "
            "state_dir"
        ) from error
    name = f"{os.getpid()}-{secrets.token_hex(4)}"
    listener, address = _listen_somewhere(folder, f"{name}.sock")
    lock = -1
    try:
        pointer = folder / f"{name}.lock"
        unfinished = folder / f".{name}.lock"
        lock = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks: the socket works, but its files outlive a crash
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, os.fsencode(socket.gethostname()) + b"\n" + os.fsencode(address))
        unfinished.rename(pointer)
    except OSError as error:
        listener.close()
        for path in (address, unfinished):
            path.unlink(missing_ok=True)
        if lock >= 0:
            os.close(lock)
        raise ControlError(
            f"cannot write {pointer} ({error.strerror or error}): make its folder writable, or use another state_dir"
        ) from error
    endpoint = Endpoint(listener, address, pointer, lock)
    _published.add(endpoint)
    return endpoint


_published: set[Endpoint] = set()


def _forget_in_child() -> None:
    while _published:
        _published.pop().forget()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_forget_in_child)


def _listen_somewhere(folder: Path, name: str) -> tuple[socket.socket, Path]:
    """Listen in the first folder that can hold a socket. ``folder`` is preferred, if its path is short enough."""
    reasons = []
    for candidate in (folder, *_short_folders()):
        address = candidate / name
        if len(os.fsencode(address)) + 1 > ADDRESS_BYTES_MAX:
            reasons.append(f"{candidate}: the path is too long for a socket")
            continue
        try:
            _make_private(candidate)
            return _listen(address), address
        except (OSError, ControlError) as error:
            reasons.append(f"{candidate}: {error}")
    raise ControlError(
        f"no folder can hold the control socket: use a shorter or writable state_dir ({'; '.join(reasons)})"
    )


def _short_folders() -> list[Path]:
    if sys.platform == "win32":
        return []
    own = f"hermes-pool-{os.geteuid()}"
    folders = [Path(tempfile.gettempdir()) / own, Path("/tmp") / own]  # noqa: S108 - made private before use
    # Last, because the system removes it when the user's last session ends, and a supervisor may outlive that.
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        folders.append(Path(runtime) / "hermes-pool")
    return [folder for folder in folders if folder.is_absolute()]


def _make_private(folder: Path) -> None:
    """Create a folder that only this user may enter, or verify that an existing one is (and close it to others)."""
    if sys.platform == "win32":
        return
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ControlError(
            f"{folder} is not a real folder (perhaps a symbolic link): remove it, or use another state_dir"
        )
    if found.st_uid != os.geteuid():
        raise ControlError(f"{folder} belongs to another user (uid {found.st_uid}): use another state_dir")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _listen(address: Path) -> socket.socket:
    """Return a socket that listens on ``address``. The name appears once nobody else can open it."""
    unfinished = address.with_name(f".{address.name}")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # On Linux the file takes over the socket's mode, so it is never open to others. Changing the umask would do the
        # same, but it belongs to the whole process, and other threads create files too.
        with suppress(OSError):
            os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(unfinished))
        unfinished.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        unfinished.rename(address)
    except BaseException:
        listener.close()
        unfinished.unlink(missing_ok=True)
        raise
    return listener


# --- the client's side ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a pointer file says: which process listens, on which host, and where."""

    supervisor_pid: int
    host: str
    address: Path


def find_supervisors(state_dir: Path) -> list[Pointer]:
    """Return a pointer for each supervisor of ``state_dir``, and remove the files of dead ones. Creates nothing.

    Raises ``ControlError`` if the folder cannot be read or belongs to another user.
    """
    if sys.platform == "win32":
        return []
    folder = state_dir / FOLDER
    try:
        found = folder.lstat()
        files = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ControlError(
            f"cannot read {folder} ({error.strerror}): run this as the user that runs the supervisor"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or os.geteuid() not in (found.st_uid, 0):
        raise ControlError(
            f"{folder} is not a folder of yours, so its content is not trusted: run this as the user that runs the "
            "supervisor"
        )
    pointers = []
    for file in files:
        pid, _, rest = file.name.partition("-")
        if pid.isdecimal() and rest.endswith(".lock"):
            # Root may look into every user's folder, but must not delete what another user's file names.
            pointer = _read_pointer(file, int(pid), may_remove=found.st_uid == os.geteuid())
            if pointer is not None:
                pointers.append(pointer)
    return pointers


def _read_pointer(file: Path, supervisor_pid: int, *, may_remove: bool) -> Pointer | None:
    """Return what a pointer file says. ``None`` if its supervisor is dead; with ``may_remove`` its files go as well."""
    if sys.platform == "win32":
        return None
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        host, _, address = os.read(descriptor, 8192).partition(b"\n")
        pointer = Pointer(supervisor_pid, os.fsdecode(host), Path(os.fsdecode(address)))
        # The owner locked the file before it got this name, so if the lock is free, the owner is dead.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return pointer
    finally:
        os.close(descriptor)
    if may_remove:
        with suppress(OSError):
            if stat.S_ISSOCK(pointer.address.lstat().st_mode):
                pointer.address.unlink()
        with suppress(OSError):
            file.unlink()
    return None

"""The client's side of the control socket: send a request to every supervisor of a ``state_dir``."""

import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hermes_pool.control.messages import Request, Response
from hermes_pool.control.socket_folder import Pointer, find_supervisors, is_peer_allowed, unix_sockets_available
from hermes_pool_worker import wire

QUERY_TIMEOUT_S: Final = 1.5
"""Default time limit of ``query``, for all supervisors together."""
_RECONNECT_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class QueryResult:
    """What one supervisor answered: either ``response``, or ``problem``, which says why there is none.

    ``problem`` completes a sentence that begins with "supervisor 123".
    """

    supervisor_pid: int
    response: Response | None = None
    problem: str | None = None


def query(state_dir: Path, request: Request, timeout_s: float = QUERY_TIMEOUT_S) -> list[QueryResult]:
    """Send ``request`` to every supervisor of ``state_dir`` at once. Return one result for each, sorted by pid.

    Blocks for ``timeout_s`` seconds at most, in whatever state the supervisors are. Creates nothing; removes the files
    that dead supervisors left behind. Raises ``ControlError`` if the folder cannot be read or is another user's.
    """
    if not unix_sockets_available():
        return []
    frame = wire.encode(request)
    deadline = time.monotonic() + timeout_s
    results: list[QueryResult] = []

    def ask(pointer: Pointer) -> None:
        result = _ask(pointer, frame, deadline)
        if result is not None:
            results.append(result)

    threads = [threading.Thread(target=ask, args=(pointer,), daemon=True) for pointer in find_supervisors(state_dir)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(results, key=lambda result: result.supervisor_pid)


def _ask(pointer: Pointer, frame: bytearray, deadline: float) -> QueryResult | None:
    """Return one supervisor's result. ``None`` if it runs on another host, which shares the folder with this one."""
    pid = pointer.supervisor_pid
    problem = "is not responding"
    try:
        return QueryResult(pid, response=_exchange(pointer.address, frame, deadline))
    except TimeoutError:
        pass
    except wire.WireError as error:
        problem = f"sent an unreadable response (perhaps its hermes-pool has another version): {error}"
    except (FileNotFoundError, ConnectionRefusedError) as error:
        if pointer.host != socket.gethostname():
            return None
        problem = f"is not responding: its socket {pointer.address} does not work ({error.strerror})"
    except OSError as error:
        problem = f"is not responding ({error.strerror or error})"
    return QueryResult(pid, problem=problem)


def _exchange(address: Path, frame: bytearray, deadline: float) -> Response:
    decoder: wire.FrameDecoder[Response] = wire.FrameDecoder(Response)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        _connect(connection, address, deadline)
        if not is_peer_allowed(connection, {os.geteuid(), 0, address.lstat().st_uid}):
            raise PermissionError(None, "another user's process listens on its socket")
        connection.settimeout(_remaining_s(deadline))
        connection.sendall(frame)
        while True:
            connection.settimeout(_remaining_s(deadline))
            data = connection.recv(256 * 1024)
            if not data:
                raise ConnectionError(None, "it closed the connection")
            for response in decoder.feed(data):
                return response
            if decoder.failed is not None:
                raise decoder.failed


def _connect(connection: socket.socket, address: Path, deadline: float) -> None:
    while True:
        connection.settimeout(_remaining_s(deadline))
        try:
            connection.connect(os.fspath(address))
        except BlockingIOError:
            # The backlog is full. A Unix socket fails at once then, whatever its timeout.
            time.sleep(min(_RECONNECT_S, _remaining_s(deadline)))
        else:
            return


def _remaining_s(deadline: float) -> float:
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError
    return remaining_s

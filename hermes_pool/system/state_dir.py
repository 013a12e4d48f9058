"""Creates the folder for the pool's own files, and checks that it can be written, before anything is started."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Final

from hermes_pool.errors import StateDirError

WORKSPACE: Final = "workspace"
"""The subfolder in which workers start if there is no ``worker_cwd``."""
LOCKS: Final = "locks"
"""The subfolder of the files that workers lock, where several supervisors share the store."""


def prepare_state_dir(state_dir: Path, *, workspace: bool, locks: bool = False) -> None:
    """Create the folder, for this user only, and its subfolders if wanted; then try to write a file. Blocks.

    Raises ``StateDirError`` if the pool cannot keep its files there.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if workspace:
            (state_dir / WORKSPACE).mkdir(exist_ok=True)
        if locks:
            (state_dir / LOCKS).mkdir(exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=state_dir):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise _unusable(state_dir, f"{error.filename or state_dir} is not a folder, or lies below a file") from error
    except OSError as error:
        raise _unusable(state_dir, f"{error.filename or state_dir}: {error.strerror or error}") from error
    except ValueError as error:  # the name contains a NUL
        raise _unusable(state_dir, str(error)) from error


def lock_file_of(state_dir: Path, conversation_id: str, user_id: str | None) -> Path:
    """Return the file that the worker of a conversation locks."""
    name = json.dumps([conversation_id, user_id]).encode()
    return state_dir.absolute() / LOCKS / hashlib.sha256(name).hexdigest()


def _unusable(state_dir: Path, reason: str) -> StateDirError:
    return StateDirError(
        f"state_dir={str(state_dir)!r}: the pool cannot keep its files there ({reason}). Name a folder that this user "
        "can write (state_dir, HERMES_POOL_STATE_DIR), or remove what is in the way"
    )

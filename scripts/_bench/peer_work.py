"""The functions that run in the workers of the process pools."""

import os
import time

WAIT = "/wait"


def answer(text: str) -> str:
    """Echo, or wait to be killed."""
    if text == WAIT:
        time.sleep(3600)
    return text


def pid() -> int:
    """Return the worker's pid."""
    return os.getpid()

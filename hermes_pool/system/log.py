"""The library's logger: structlog events that go wherever the host sends its logs, and nowhere by default.

If the host has configured structlog, events go through its processors. Otherwise they go to the standard library's
logger ``hermes_pool``, which has only a null handler.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

_standard = logging.getLogger("hermes_pool")
_standard.addHandler(logging.NullHandler())


def logger(**bound: Any) -> Any:
    """Return a logger that adds the ``bound`` values to each event."""
    import structlog  # noqa: PLC0415 - slow to import, and often not needed

    if structlog.is_configured():
        return structlog.get_logger("hermes_pool", **bound)
    return structlog.wrap_logger(
        _standard,
        processors=[structlog.stdlib.filter_by_level, structlog.stdlib.add_log_level, _as_text],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
        **bound,
    )


def _as_text(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
    event.pop("level", None)
    name = event.pop("event")
    return " ".join([str(name), *(f"{key}={value!r}" for key, value in event.items())])


def is_enabled_for(level: int) -> bool:
    """Return whether an event of this level would reach a log.

    Ask once per start of a worker rather than once per turn, where it would cost too much.
    """
    structlog = sys.modules.get("structlog")  # a host that has configured it has also imported it
    return (structlog is not None and structlog.is_configured()) or _standard.isEnabledFor(level)

"""The library's logger: structlog events that go where the host sends its logs, and nowhere by default.

A host that has configured structlog gets them through its own processors; any other through the standard library's
logger ``hermes_pool``, which has no handler but the null one.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

_standard = logging.getLogger("hermes_pool")
_standard.addHandler(logging.NullHandler())


def logger(**bound: Any) -> Any:
    """Return a logger with these values on each line."""
    import structlog  # noqa: PLC0415 - it takes long to import, and not everybody who imports this makes a logger

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


def wants(level: int) -> bool:
    """Whether anybody would see a line of this level. It is asked at each start of a worker, and not in each turn."""
    structlog = sys.modules.get("structlog")  # a host that has configured it has imported it
    return (structlog is not None and structlog.is_configured()) or _standard.isEnabledFor(level)

"""The JSON schema of all public values, as ``to_dict`` and ``to_json`` return them.

``python -m hermes_pool.schema`` prints it; ``docs/reference/schema.json`` has that text.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

from hermes_pool import account, crash_report, errors, snapshot
from hermes_pool.conversation import events, reply
from hermes_pool.process import death, launcher
from hermes_pool.scheduling import pool_state
from hermes_pool_worker import wire
from hermes_pool_worker.plain import Plain, schema_of_class

_FROM_THE_WIRE = (*get_args(wire.TurnEvent), wire.BackgroundFinished, wire.PastTurn)
_MODULES = (account, crash_report, errors, snapshot, reply, events, death, launcher, pool_state)
"""Where the other values are defined."""


def json_schema() -> dict[str, Any]:
    """Return the schema of any public value. Each class has its own under ``$defs``, by its name."""
    kinds = sorted(public_kinds(), key=lambda kind: kind.__name__)
    defined = {kind.__name__: schema_of_class(kind, _reference) for kind in kinds}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "hermes-pool",
        "description": "Events, replies, errors and snapshots. New fields may be added to any of them.",
        "anyOf": [_reference(kind) for kind in kinds],
        "$defs": defined,
    }


def public_kinds() -> Iterator[type[Plain]]:
    """Yield each class whose values a web client may see."""
    yield from _FROM_THE_WIRE
    for module in _MODULES:
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, Plain) and kind.__module__ == module.__name__:
                yield kind


def _reference(kind: type[Plain]) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{kind.__name__}"}


def text() -> str:
    """Return the schema as JSON text for people."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())

"""The process of one subject: it takes one measurement, prints the result, and ends.

It imports only what it measures, because a process from which others are forked should be small.
"""

import asyncio
import importlib
import json
from typing import Any

from _bench.fleet import NotSupportedError
from _bench.metrics import SUBJECTS

RESULT = "bench-result "
"""Prefix of the line that carries the result."""


def run_subject(metric: str, subject: str, options: dict[str, Any]) -> int:
    """Measure one subject, and print the result or why there is none."""
    try:
        found: dict[str, Any] = {"values": asyncio.run(_take(metric, subject, options))}
    except ImportError as error:
        found = {"lacking": f"not installed ({error})"}
    except NotSupportedError as error:
        found = {"lacking": str(error)}
    print(RESULT + json.dumps(found), flush=True)
    return 0


async def _take(metric: str, subject: str, options: dict[str, Any]) -> dict[str, float]:
    if subject.startswith("hermes "):
        from _bench import hermes  # noqa: PLC0415 - each process loads only what it measures

        return await hermes.take(metric, subject, options)
    from _bench import measure  # noqa: PLC0415

    module, _, name = SUBJECTS[subject].partition(":")
    return await measure.take(metric, getattr(importlib.import_module(f"_bench.{module}"), name), options)

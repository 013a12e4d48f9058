"""Why a call of the model failed, in Hermes' own words, and when to try again.

Hermes classifies each failed call, but reports the class of some failures only. So its classifier is wrapped once, in
the module that calls it, and the last result is kept.
"""

import contextlib
import email.utils
import time
from typing import Any

import msgspec

FINAL_STATUSES = {
    400: "bad_request", 401: "auth", 402: "billing", 403: "forbidden", 404: "model_not_found", 413: "payload_too_large",
    422: "bad_request",
}  # fmt: skip
"""What a status of the provider means where Hermes has no word for it, or one that does not fit."""
TELLING = frozenset(
    {
        "billing", "content_policy_blocked", "context_overflow", "image_too_large", "long_context_tier",
        "model_not_found", "overloaded", "payload_too_large", "provider_policy_blocked", "rate_limit",
        "upstream_rate_limit",
    }
)  # fmt: skip
"""The reasons of Hermes that say more than the status does."""


class Failure(msgspec.Struct, frozen=True):
    """A failed call of the model."""

    reason: str
    retry_after_s: float | None = None
    """When to try again, where the provider says so, in seconds."""


class LastFailure:
    """The last failed call of the model in this process."""

    def __init__(self) -> None:
        self.failure: Failure | None = None

    def watch(self) -> None:
        """Begin to look at the failures that Hermes classifies."""
        from agent import conversation_loop  # noqa: PLC0415 - Hermes is imported late

        classify = conversation_loop.classify_api_error

        def watched(error: Any, *arguments: Any, **named: Any) -> Any:
            classified = classify(error, *arguments, **named)
            with contextlib.suppress(Exception):
                self.failure = failure_of(error, classified.reason.value, classified.status_code)
            return classified

        conversation_loop.classify_api_error = watched

    def forget(self) -> None:
        """Forget it: another turn begins."""
        self.failure = None


def failure_of(error: Any, reason: str, status: int | None) -> Failure:
    """Return what is known about a failed call, from Hermes' ``reason`` and the provider's ``status``."""
    status = status or getattr(error, "status_code", None)
    if reason not in TELLING:
        reason = FINAL_STATUSES.get(status or 0, reason)
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return Failure(reason, retry_after_s(headers.get("retry-after")))


def retry_after_s(value: str | None) -> float | None:
    """Return the seconds that a ``Retry-After`` header names: a number, or a date. ``None`` if it names none."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return None
    return max(0.0, seconds) if seconds == seconds and seconds < 86400 * 365 else None  # noqa: PLR0124 - NaN is not

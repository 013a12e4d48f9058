import email.utils
import time
from types import SimpleNamespace

import pytest

from hermes_pool.policy.failures import is_retryable
from hermes_pool_worker.hermes_failures import Failure, failure_of, retry_after_s


@pytest.mark.parametrize(
    ("hermes", "status", "reason", "retryable"),
    [
        ("format_error", 400, "bad_request", False),
        ("invalid_encrypted_content", 400, "bad_request", False),
        ("auth", 401, "auth", False),
        ("billing", 402, "billing", False),
        ("rate_limit", 402, "rate_limit", True),
        ("auth", 403, "forbidden", False),
        ("billing", 403, "billing", False),
        ("unknown", 404, "model_not_found", False),
        ("context_overflow", 400, "context_overflow", False),
        ("content_policy_blocked", 400, "content_policy_blocked", False),
        ("model_not_found", 400, "model_not_found", False),
        ("payload_too_large", 413, "payload_too_large", False),
        ("format_error", 422, "bad_request", False),
        ("rate_limit", 429, "rate_limit", True),
        ("billing", 429, "billing", False),
        ("server_error", 500, "server_error", True),
        ("overloaded", 503, "overloaded", True),
        ("timeout", None, "timeout", True),
    ],
)
def test_each_failure_has_a_reason_that_says_whether_another_try_can_mend_it(
    hermes: str, status: int | None, reason: str, retryable: bool
) -> None:
    assert failure_of(Exception(), hermes, status) == Failure(reason)
    assert is_retryable(reason) == retryable


def test_what_the_exception_knows_is_used() -> None:
    response = SimpleNamespace(headers={"retry-after": "7"})
    error = SimpleNamespace(status_code=403, response=response)
    assert failure_of(error, "unknown", None) == Failure("forbidden", 7.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("1.5", 1.5), ("-3", 0.0), ("nan", None), ("inf", None), ("soon", None)],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value) == seconds


def test_retry_after_a_date() -> None:
    seconds = retry_after_s(email.utils.formatdate(time.time() + 60, usegmt=True))
    assert seconds is not None
    assert 50 < seconds <= 60

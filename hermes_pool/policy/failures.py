"""Which failures of an agent another try can mend: a pure table, by the reason that the agent gives."""

FINAL = frozenset(
    {
        # The key, the account, the right to use the model.
        "auth", "auth_permanent", "billing", "forbidden", "permission_denied",
        "ssl_cert_verification",
        # The model, the address, the request.
        "bad_request", "format_error", "invalid_request", "model_not_found", "not_found", "provider_policy_blocked",
        # The message or the history itself.
        "content_policy", "content_policy_blocked", "context_overflow", "image_too_large", "payload_too_large",
        "frame_too_large", "long_context_tier",
    }
)  # fmt: skip
"""The reasons for which the same message fails again until a person has mended something, or reworded it."""


def is_retryable(reason: str) -> bool:
    """Return whether the same message may succeed later. A reason that is not known here may be anything: it may."""
    return reason not in FINAL

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_pool.storage.record import SessionRecord


def test_the_users_four_keys_have_the_users_names() -> None:
    record = SessionRecord(session_id="s", last_used_at="2026-01-02T03:04:05Z", restart_count=1, status="healthy")
    stored = {name: value for name, value in record.to_json().items() if value is not None}
    assert stored == {
        "session_id": "s",
        "last_used_at": "2026-01-02T03:04:05Z",
        "restart_count": 1,
        "status": "healthy",
        "incarnation": 0,
        "turns": 0,
        "schema": 1,
    }


@given(
    st.builds(
        SessionRecord,
        session_id=st.none() | st.text(),
        restart_count=st.integers(),
        status=st.sampled_from(["healthy", "dormant", "failed"]),
        pid=st.none() | st.integers(),
        create_time=st.none() | st.floats(),
        last_error=st.none() | st.text(),
    )
)
def test_a_record_is_read_as_it_was_stored_but_for_what_no_database_takes(record: SessionRecord) -> None:
    stored = record.to_json()
    again = SessionRecord.from_json(stored)
    assert again.to_json() == stored
    if record.create_time is not None:
        assert again.create_time == (record.create_time if math.isfinite(record.create_time) else None)


def test_what_no_database_takes_is_replaced() -> None:
    record = SessionRecord(session_id="a\0b", last_error="\ud83d and \udc97 but 😀 and \\u0000", create_time=math.nan)
    assert record.to_json()["session_id"] == "a\ufffdb"
    assert record.to_json()["last_error"] == "\ufffd and \ufffd but 😀 and \\u0000"
    assert record.to_json()["create_time"] is None


@pytest.mark.parametrize("wrong", [[], {}, True, None, "x", 1, 1.5, math.inf, 10**400])
def test_a_member_of_a_wrong_type_counts_as_absent(wrong: Any) -> None:
    names = list(SessionRecord().to_json())
    record = SessionRecord.from_json(dict.fromkeys(names, wrong) | {"unknown": wrong})
    default = SessionRecord()
    for name in names:
        value = getattr(record, name)
        assert value == getattr(default, name) or (value == wrong and type(wrong) in (int, float, str))
        assert not isinstance(value, bool | list | dict)
    assert record.status == "dormant"
    assert record.create_time is None or math.isfinite(record.create_time)


def test_an_absent_member_has_its_default() -> None:
    assert SessionRecord.from_json({}) == SessionRecord()
    assert SessionRecord.from_json({"create_time": 5}).create_time == 5.0

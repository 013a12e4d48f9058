from hermes_pool.control import messages
from hermes_pool.control.messages import PsReply
from hermes_pool_worker import wire
from tests.support import known


def test_a_supervisor_that_is_older_than_the_latest_fields_is_understood() -> None:
    row = {"conversation_id": "c-1", "state": "idle"}
    pool = {"state": "open", "workers": 1, "workers_max": 64}
    old = {"sessions": [row], "supervisor_pid": 1, "version": "0", "started_at": "", "pool": pool}
    decoder: wire.FrameDecoder[messages.Response] = wire.FrameDecoder(messages.Response)
    (reply,) = decoder.feed(wire.encode({"type": "PsReply", **old}))
    assert isinstance(reply, PsReply)
    (session,) = reply.sessions
    assert (session.restart_breaker, session.retry_after_s, session.quarantined, session.last_death) == (
        "closed",
        None,
        (),
        None,
    )
    assert known(reply.pool).starts is None

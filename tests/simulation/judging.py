"""What each caller was told, against what its workers did: judged when the caller has its answer."""

from hermes_pool import (
    AgentFailedError,
    ConversationBusyError,
    HermesPoolError,
    MessageQuarantinedError,
    NoCapacityError,
    PoolClosedError,
    PoolDrainingError,
    PoolFullError,
    PoolPausedError,
    PoolUnavailableError,
    Reply,
    RestartBackoffError,
    StoreError,
    TurnCancelledError,
    TurnError,
    TurnInterruptedError,
    TurnTimeoutError,
    WorkerCrashedError,
    WorkerStartError,
    WorkerStartTimeoutError,
    WorkerUnusableError,
)
from hermes_pool_worker import wire
from tests.simulation.histories import CONVERSATIONS
from tests.simulation.world import (
    OBEYS_S,
    PROGRESS_TIMEOUT_S,
    START_TIMEOUT_S,
    TURN_TIMEOUT_S,
    WAIT_TIMEOUT_S,
    Call,
    HandOver,
    World,
)

SLACK_S = 2.0
"""For the rungs of a stop, and looks on the way."""
BEGUN_S = 4 * WAIT_TIMEOUT_S + 2 * START_TIMEOUT_S + SLACK_S
"""Within this, a turn has begun, or its caller has an error."""


def judge(world: World, call: Call) -> None:
    """Complain of all that does not fit in what a caller was told."""
    hand_overs = world.of_turn[call.turn_id] if call.turn_id is not None else []
    if call.turn is not None and call.turn.turn_id in world.of_turn:
        hand_overs = world.of_turn[call.turn.turn_id]
    who = f"call {call.number} ({call.text})"
    if call.is_open:
        world.complain(f"{who} waits for ever")
        return
    if call.turn is not None:
        _judge_events(world, who, call, hand_overs)
        if hand_overs:
            world.check(call.turn.outcome is not None, f"the turn of {who} has no end")
    _judge_answers(world, who, call, hand_overs)
    match call.outcome:
        case Reply():
            _judge_reply(world, who, call, call.outcome, hand_overs)
        case HermesPoolError():
            why_not = _unjustified(world, call, call.outcome, hand_overs)
            world.check(why_not is None, f"{who} got {call.outcome!r}: {why_not}")
            _judge_conversation(world, who, call, call.outcome)
        case None:
            world.check(call.touched, f"{who} got nothing")
        case _:
            world.check(call.touched, f"{who} got {call.outcome!r}, and nobody had cancelled it")
    begun_s = (hand_overs[0].at if hand_overs else call.ended_at or 0.0) - call.began_at
    world.check(begun_s <= BEGUN_S, f"{who} waited for {begun_s:g} s")
    if hand_overs and call.say.manner != "streams_slowly" and call.ended_at is not None:
        took_s = call.ended_at - hand_overs[0].at
        world.check(took_s <= TURN_TIMEOUT_S + START_TIMEOUT_S + SLACK_S, f"{who} took {took_s:g} s")


def _judge_conversation(world: World, who: str, call: Call, error: HermesPoolError) -> None:
    named = error.conversation_id
    world.check(named in (call.conversation, None), f"{who} got an error of {named}")


def _judge_reply(world: World, who: str, call: Call, reply: Reply, hand_overs: list[HandOver]) -> None:
    world.check(reply.conversation_id == call.conversation, f"{who} got a reply of {reply.conversation_id}")
    if reply.outcome == "interrupted":
        world.check(call.touched, f"{who} was interrupted, and nobody had wanted that")
    else:
        world.check(reply.text == f"re:{call.text}", f"{who} got {reply.text!r}")
        world.check(hand_overs, f"{who} got a reply, and no worker got the message")
    if hand_overs:
        last = hand_overs[-1]
        world.check(reply.turn_id == last.turn.turn_id, f"{who} got a reply of {reply.turn_id}")
        recovered = last.done is None and last.connection.died_at is not None
        world.check(
            reply.outcome == "interrupted" or recovered or (last.done and last.done.outcome == reply.outcome),
            f"{who} got {reply.outcome}, and its worker had said {last.done}",
        )
        died = sum(each.died for each in hand_overs)
        world.check(
            died <= reply.restarts or reply.outcome == "interrupted",
            f"{who} is told of {reply.restarts} restarts, and {died} workers died",
        )


def _judge_events(world: World, who: str, call: Call, hand_overs: list[HandOver]) -> None:
    """A caller sees what the workers of its turn sent, attempt by attempt, in order; of the last one all."""
    attempts = [event.attempt for event in call.events]
    world.check(attempts == sorted(attempts), f"{who} saw attempts {attempts}")
    for hand_over in hand_overs:
        attempt = hand_over.turn.attempt
        seen = [event for event in call.events if event.attempt == attempt and not isinstance(event, wire.Status)]
        sent = hand_over.sent
        world.check(seen == sent[: len(seen)], f"{who} saw {seen} of {sent}")
        if call.read_to_the_end and hand_over is hand_overs[-1] and hand_over.done is not None and not call.touched:
            world.check(len(seen) == len(sent), f"{who} saw only {seen} of {sent}")
    if call.say.manner == "streams":
        heard_at = [at for hand_over in hand_overs for at in hand_over.heard_at]
        mine = [at for at, event in zip(call.events_at, call.events, strict=True) if not isinstance(event, wire.Status)]
        late = [at for at, heard in zip(mine, heard_at, strict=False) if at > heard + 0.001]
        world.check(not late, f"{who} saw at {late} what the pool had at {heard_at}")
    known = {hand_over.turn.attempt for hand_over in hand_overs}
    world.check(set(attempts) <= known, f"{who} saw events of attempts {set(attempts)} of {known}")


def _judge_answers(world: World, who: str, call: Call, hand_overs: list[HandOver]) -> None:
    """An answer that comes in time reaches the worker that has asked."""
    for question_id, at in call.answers:
        soon = at + 3 * world.rules.latency_s + 0.01
        for hand_over in hand_overs:
            worker = hand_over.connection
            asked = any(isinstance(each, wire.Question) and each.question_id == question_id for each in hand_over.sent)
            ended_at = min(worker.exited_at, worker.frozen_at, hand_over.done_at or soon)
            in_time = asked and soon < hand_over.asked_until.get(question_id, 0.0)
            if in_time and ended_at >= soon and not call.touched and not worker.wanted:
                world.check(question_id in hand_over.answered, f"{who}: the answer to {question_id} was lost")


def _unjustified(world: World, call: Call, error: HermesPoolError, hand_overs: list[HandOver]) -> str | None:
    """Return why a caller should not have got this error; ``None`` where it is in order."""
    rules, happened = world.rules, world.happened
    assert call.ended_at is not None
    took_s = call.ended_at - call.began_at
    tools = [tool for each in hand_overs for tool in each.tools]
    died = any(each.died for each in hand_overs)
    waited_too_long = isinstance(error, PoolPausedError | PoolFullError) and took_s >= WAIT_TIMEOUT_S - 0.001
    if call.must_be_refused and not isinstance(error, PoolClosedError) and not waited_too_long:
        return "it stood in line when the pool was closed"
    if hand_overs and isinstance(error, PoolFullError | PoolPausedError):
        return "its turn had begun, and keeps its slot"
    if tools and not isinstance(error, TurnError):
        return f"it had started {tools}"
    fine = True
    match error:
        case MessageQuarantinedError():
            fine = 0 < rules.quarantine_after <= error.deaths
        case PoolDrainingError():
            fine = "drain" in happened
        case PoolClosedError():
            fine = call.ended_at >= world.closed_at
        case PoolPausedError():
            fine = "pause" in happened
        case ConversationBusyError() if rules.busy == "reject":
            fine = call.rivals
        case ConversationBusyError():
            fine = took_s >= WAIT_TIMEOUT_S - 0.001 or call.rivals
        case PoolFullError():
            fine = min(world.limits) < CONVERSATIONS or "pause" in happened
        case RestartBackoffError():
            fine = f"{call.conversation} backs off" in happened
        case PoolUnavailableError():
            fine = bool(happened & {"WorkerStartError", "WorkerUnusableError", "WorkerStartTimeoutError"})
        case WorkerUnusableError() | NoCapacityError() | WorkerStartTimeoutError():
            fine = type(error).__name__ in happened
        case WorkerStartError():
            fine = True  # it may have been ready, and died before it had a turn
        case AgentFailedError():
            fine = any(each.failed for each in hand_overs)
        case TurnInterruptedError():
            if not died and not any(each.connection.wanted for each in hand_overs):
                return "no worker died in it"
            if rules.replay == "always":
                return "it is always replayed"
            return None if [tool.name for tool in error.tools] == tools and tools else f"its tools are {tools}"
        case WorkerCrashedError():
            if tools and rules.replay != "always":
                return f"it had started {tools}"
            fine = any(not each.connection.alive for each in hand_overs)
        case TurnTimeoutError():
            done_at = hand_overs[-1].done_at if hand_overs else None
            reads = call.say.manner in ("sends", "streams", "only_replies")
            if reads and done_at is not None and done_at < call.ended_at - OBEYS_S:
                return "its worker had answered long before"
            fine = took_s >= min(PROGRESS_TIMEOUT_S, TURN_TIMEOUT_S)
        case TurnCancelledError():
            if tools and error.retryable:
                return f"it had started {tools}, and must not be sent again unseen"
            fine = call.touched
        case StoreError():
            fine = "fails" in happened
    return None if fine else "for no reason"

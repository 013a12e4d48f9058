"""Faults of the pool that the simulation has found and that are not mended yet, each as narrow as it can be told.

Where one of these says yes, the simulation does not complain. Whoever mends one deletes its function here, and its
uses; from then on the simulation insists. The history that shows each is in ``past_faults``, where it stays.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fakes import FakeConnection
    from world import Call, World

ADMISSION_LOOKS_EVERY_S = 0.01


def cancel_of_a_turn_refused_in_line(call: "Call") -> bool:
    """``Turn.cancel`` waits for ever where ``begin`` raises in line: such a turn is never settled.

    ``wait_timeout_s`` strikes while another task waits in ``turn.cancel()``, say.
    """
    return not call.is_open and call.turn is not None and call.turn.outcome is None and call.turn_id is None


def stop_meets_a_stop(worker: "FakeConnection") -> bool:
    """``stop`` and ``close`` return while a hibernation, or another stop, is still stopping the worker, which lives on.

    A ``close`` even cancels that stop halfway. A worker that does not obey ``Close`` is then never signalled, and the
    caller of its turn waits for ever.
    """
    return worker.is_being_stopped or worker.stop_was_cancelled


def start_is_cancelled_twice(worker: "FakeConnection") -> bool:
    """A start whose worker is just being killed gives up waiting for that when it is cancelled (once more).

    ``stop`` and ``close`` return, and the slot is free, while the process still lives for a moment. It is the
    connection's own doing (``_step``), which ``FakeConnection`` does alike: to be mended in both.
    """
    return worker.kill_is_on_its_own


def recall_overtakes_a_save(world: "World", conversation: str) -> bool:
    """A worker is opened with an older mark: ``recall`` reads the record that a save in flight is about to replace."""
    return conversation in world.loaded_while_saved


def refused_by_a_hibernation(world: "World", call: "Call") -> bool:
    """With ``busy="reject"`` a message that meets a worker which goes dormant is refused, though nobody talks."""
    ours = [each for each in world.connections if each.conversation == call.conversation]
    leaves = any(
        each.wanted and each.ready and (each.died_at or call.began_at) >= call.began_at - 0.01 for each in ours
    )
    stored_at = world.went_dormant_at.get(call.conversation, 0.0)
    return world.rules.busy == "reject" and (leaves or stored_at >= call.began_at - 0.01)


def alarm_about_a_slot_that_is_about_to_be_freed(world: "World", conversation: str) -> bool:
    """The sweep logs ``slot_lost`` in the 10 ms in which the slot of a turn that crashed waits for its next look."""
    died_at = [each.died_at for each in world.connections if each.conversation == conversation]
    return any(at is not None and at >= world.now() - 2 * ADMISSION_LOOKS_EVERY_S for at in died_at)


def resumed_just_too_late(world: "World", call: "Call") -> bool:
    """A message that a paused pool holds is told "the pool is closed" if its wait ends just as the pool is resumed."""
    return "pause" in world.happened and any(abs(at - (call.ended_at or 0.0)) <= 0.001 for at in world.resumed_at)


def came_as_the_lock_was_handed_on(world: "World", call: "Call") -> bool:
    """A message waits in line with no limit, and is not counted, if it comes when a lock is free and yet promised.

    ``begin`` asks ``locked()``, which is false from the release to the moment when the next in line has woken up.
    """
    others = [each for each in world.calls if each.conversation == call.conversation and each is not call]
    ends = [each.ended_at for each in others]
    ends += [each.told_at for each in world.hand_overs if each.call in others]
    return any(end is not None and abs(end - call.began_at) <= 0.001 for end in ends)


def twin_of_a_killer_was_in_line(world: "World", call: "Call") -> bool:
    """A message that waited in line while the very same one killed is begun: the worker is there, so nobody checks."""
    return call.began_at <= world.killed_at.get(call.text, 0.0)

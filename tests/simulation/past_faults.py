"""Histories that have shown a fault of the pool, each as small as it can be. They stay when the fault is mended."""

from tests.simulation.histories import (
    Birth,
    History,
    NextBirth,
    Operate,
    OperatePool,
    Pass,
    Rules,
    Say,
    SetStore,
    Step,
    ToCaller,
    ToWorker,
)

_NEXT_SWEEP_S = (1.0, 3.0)
"""A worker that has had its turn right at the beginning is found idle by the sweep after these."""


def _of(*steps: Step, rules: Rules | None = None) -> History:
    return History(rules or Rules(), steps)


PAST_FAULTS: dict[str, History] = {
    "a tool starts after the pool has begun to close": _of(
        NextBirth(Birth(on_cancel="obeys_late")),
        Say(0, (("breath", "breath", "tool", "hang"),)),
        Pass(0.015),
        OperatePool("close"),
    ),
    "a turn that is refused in line is cancelled": _of(
        Say(0, (("hang",),)),
        OperatePool("pause"),
        Say(0, manner="streams"),
        Pass(2.5),
        ToCaller(0, "turn_is_cancelled"),
    ),
    "a stop meets a hibernation": _of(Say(2), *map(Pass, _NEXT_SWEEP_S), Pass(0.001), Operate(2, "stop")),
    "a close meets a hibernation": _of(Say(2), *map(Pass, _NEXT_SWEEP_S), Pass(0.001), OperatePool("close")),
    "a close meets the stop of a worker that does not obey": _of(
        Say(1, (("ask",),)), Pass(0.3), ToWorker(1, "freezes"), OperatePool("drain_now"), OperatePool("close")
    ),
    "a start is stopped twice": _of(
        Say(0), SetStore("slow"), Pass(0.05), OperatePool("drain_now"), OperatePool("close")
    ),
    "a start is stopped when its time is over": _of(
        NextBirth(Birth("hangs_before_opened")), Say(2), Pass(1.0), Operate(2, "stop")
    ),
    "a record is read while it is replaced": _of(
        Pass(0.8),
        Say(2, (("breath", "breath", "breath"),)),  # what is stored first is without it
        Pass(0.1),
        Say(2, (("dies",), ("dies",))),
        Pass(0.05),
        SetStore("slow"),
        Pass(0.06),  # the sweep has begun to save it
        SetStore("works"),
        Say(2),
    ),
    "a message meets a hibernation and does not want to wait": _of(
        Say(0), *map(Pass, _NEXT_SWEEP_S), Pass(0.0), Say(0), rules=Rules(busy="reject")
    ),
    "a sweep meets the end of a turn that has crashed": _of(
        Say(1, (("breath",),)), Pass(0.5), Pass(0.495), Say(0, (("dies",), ("dies",)))
    ),
    "a message waits while its twin kills": _of(
        Say(2, (("tool", "breath", "dies"),)), Say(2, manner="streams", again=True), rules=Rules(quarantine_after=1)
    ),
    "a message comes just when the lock is handed on": _of(
        SetStore("slow"),
        Say(0),
        Say(0, (("ask_long", "hang"),)),
        Pass(0.01),
        ToCaller(1, "task_is_cancelled"),
        Say(0),
    ),
    "a pool is resumed just when a message has waited too long": _of(
        OperatePool("pause"), Pass(0.01), Say(1), Pass(3.0), OperatePool("resume")
    ),
}

import signal

import pytest

from hermes_pool.process.death import Death
from hermes_pool.process.launcher import Exit


@pytest.mark.parametrize(
    ("death", "words"),
    [
        (Death(Exit(0), ()), "exited with status 0"),
        (Death(Exit(3), ()), "exited with status 3"),
        (Death(Exit(-signal.SIGSEGV), ()), "was killed by SIGSEGV (signal 11)"),
        (Death(Exit(-9), ()), "was killed by SIGKILL (signal 9), possibly because the machine is out of memory"),
        (Death(Exit(-9), (), wanted=True), "was killed by SIGKILL (signal 9)"),
        (Death(Exit(-9), (), "broke the protocol (x)"), "broke the protocol (x) and was killed by SIGKILL (signal 9)"),
        (Death(Exit(-64), ()), "was killed by SIGRTMAX (signal 64)"),
        (Death(Exit(None), ()), "ended with an unknown status (something else in the host process collected it)"),
    ],
)
def test_a_death_in_words(death: Death, words: str) -> None:
    assert str(death) == words

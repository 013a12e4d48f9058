"""Signal handling of a worker and a zygote."""

import signal
import sys


def reset() -> None:
    """Undo what a host may have passed on to its children, such as an ignored SIGCHLD or the SIGHUP of ``nohup``.

    SIGINT does nothing: no terminal reaches a worker in its own session, and a stray one must not cut a turn short. It
    gets a function instead of SIG_IGN, because the agent's tools would inherit SIG_IGN.
    """
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: None)

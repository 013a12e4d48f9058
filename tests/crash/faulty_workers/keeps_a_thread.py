import signal
import threading

from hermes_pool_worker.echo import EchoAgent


class Agent(EchoAgent):
    def __init__(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Thread(target=threading.Event().wait).start()
        super().__init__()

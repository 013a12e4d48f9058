"""A host that is one of several on a store: for ``test_cluster``. It does what the lines on its stdin say.

Each line is a JSON object with ``do``, its arguments, and a number; the answer is a line with the same number.
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

from hermes_pool import HermesPoolError, HermesSessionManager, PoolSettings, Turn
from hermes_pool.settings import Timeouts


async def main(values: dict[str, Any]) -> None:
    timeouts = Timeouts(**values.pop("timeouts", {}))
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    reader = asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with HermesSessionManager(PoolSettings(cluster="machine", timeouts=timeouts, **values)) as pool:
        print(json.dumps({"ready": os.getpid()}), flush=True)
        running = set()

        async def do(order: dict[str, Any]) -> None:
            number, verb = order.pop("number"), order.pop("do")
            try:
                answer: Any = await getattr(pool, verb)(**order)
                if isinstance(answer, Turn):
                    answer = answer.turn_id
                answer = answer.to_dict() if hasattr(answer, "to_dict") else answer
                told = {"number": number, "answer": answer}
            except HermesPoolError as error:
                told = {"number": number, "error": error.to_dict()}
            print(json.dumps(told), flush=True)

        async def read() -> None:
            while line := await reader.readline():
                task = asyncio.create_task(do(json.loads(line)))
                running.add(task)
                task.add_done_callback(running.discard)
            ended.set()

        reading = asyncio.create_task(read())
        await ended.wait()
        await pool.close(drain_s=20)
        while running:
            await asyncio.wait(running)
        reading.cancel()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

"""`/metrics` while the engine computes a step."""

import asyncio
from types import SimpleNamespace
from typing import Any

from fleetfoot.server.app import StateEndpoints


class Engine:
    """Answers a call when `running` is set, with that value."""

    def __init__(self) -> None:
        self.num_unfinished = 0
        self.running: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def call(self, method: str) -> Any:
        return {"gauges": {"num_requests_running": await asyncio.shield(self.running)}}


def test_values_of_a_moment_ago_while_a_step_takes_long() -> None:
    async def run() -> None:
        engine = Engine()
        service: Any = SimpleNamespace(engine=engine, model_name="m", liveness=SimpleNamespace(problem=""))
        state = StateEndpoints(service)

        async def running() -> str:
            lines = bytes((await state.metrics(None)).body).decode().splitlines()  # type: ignore[arg-type]
            return next(line for line in lines if line.startswith("fleetfoot:num_requests_running"))[-3:]

        first = asyncio.ensure_future(running())
        await asyncio.sleep(0)
        assert not first.done()  # there are none yet
        engine.running.set_result(3)
        assert await first == "3.0"
        engine.running, engine.num_unfinished = asyncio.get_running_loop().create_future(), 1
        assert await running() == "3.0"
        engine.num_unfinished = 0  # an answer does not take long
        last = asyncio.ensure_future(running())
        await asyncio.sleep(0)
        engine.running.set_result(4)
        assert await last == "4.0"

    asyncio.run(run())

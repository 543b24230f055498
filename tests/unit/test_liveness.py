"""When an engine counts as stuck: a client whose engine the test plays, and a clock that the test sets."""

import asyncio
import os
import signal
import subprocess

import msgspec
import pytest
from tests.helpers.streams import async_test
from tests.unit.test_engine_group import FACTS, PARAMS, PlayedEngine

from fleetfoot.engine.client import EngineClient
from fleetfoot.engine.wire import Call, Held, Reply
from fleetfoot.engine.wire import Outputs as Step
from fleetfoot.records.step import EngineOutput
from fleetfoot.server.liveness import HEALTH_S, HOLD_S, LONG_STEP_S, Liveness, cpu_use


class Watched:
    """A client, its engine, and what watches it. The time is that of the test."""

    def __init__(self, *, computes_on_cpu: bool = False) -> None:
        self.now, self.cpu, self.is_stopped = 100.0, 0.0, False
        self.engine = PlayedEngine(msgspec.structs.replace(FACTS, computes_on_cpu=computes_on_cpu))
        self.client = EngineClient(self.engine.address, clock=lambda: self.now)
        self.liveness = Liveness(self.client, lambda: self.now, lambda pid: (self.cpu, self.is_stopped))

    async def __aenter__(self) -> "Watched":
        self.messages = asyncio.ensure_future(self.engine.next())  # answers the greeting
        await self.client.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.messages.cancel()
        self.client.close()
        self.engine.close()

    def pass_time(self, seconds: int, used: float = 0.0) -> None:
        """Second by second, as `Liveness.run` does. ``used``: CPU time in each of them."""
        for _ in range(seconds):
            self.now += 1
            self.cpu += used
            self.liveness.tick()

    async def next(self) -> object:
        message, self.messages = await self.messages, asyncio.ensure_future(self.engine.next())
        return message

    async def arrives(self) -> None:
        """Wait until the client has taken what the engine has sent."""
        before = self.client.last_message_ts
        while self.client.last_message_ts == before:
            await asyncio.sleep(0)


@async_test
async def test_without_a_step_for_ten_seconds() -> None:
    async with Watched() as watched:
        await watched.client.submit([5, 6], PARAMS, "r", 0)
        request = await watched.next()
        watched.pass_time(int(HEALTH_S) - 1)
        assert watched.liveness.problem == ""
        watched.pass_time(1)
        assert watched.liveness.problem.startswith("the engine has taken no step for 10 s")
        assert "1 requests of this server wait" in watched.liveness.problem
        watched.engine.send(Step(0.0, [EngineOutput(request.number, [7])]))  # type: ignore[attr-defined]
        await watched.arrives()
        assert watched.liveness.problem == ""


@async_test
async def test_an_engine_without_work_answers() -> None:
    async with Watched() as watched:
        for _ in range(3):
            watched.pass_time(9)
            ping = await watched.next()
            assert isinstance(ping, Call) and ping.method == "ping"
            watched.engine.send(Reply(ping.number))
            await watched.liveness._ping
            assert watched.liveness.problem == ""
        watched.pass_time(10)  # it does not answer, and other servers' requests may wait
        assert "0 requests of this server wait" in watched.liveness.problem


@async_test
async def test_a_call_between_steps_may_take_longer() -> None:
    async with Watched() as watched:
        watched.now += 1
        watched.engine.send(Held(True))
        await watched.arrives()
        watched.pass_time(int(HOLD_S) - 1)
        assert watched.liveness.problem == ""
        watched.pass_time(1)
        assert "a call holds the engine for more than 1800 s" in watched.liveness.problem
        watched.is_stopped = True
        watched.pass_time(1)
        assert watched.liveness.problem.startswith("the engine has taken no step for")
        watched.engine.send(Held(False))
        await watched.arrives()
        assert watched.liveness.problem == ""


@pytest.mark.parametrize(("computes_on_cpu", "is_stopped"), [(True, False), (True, True), (False, False)])
@async_test
async def test_a_long_step_on_a_cpu(computes_on_cpu: bool, is_stopped: bool) -> None:
    """Processes that work count as progress on a CPU, unless one of them is stopped, and for at most ten minutes."""
    async with Watched(computes_on_cpu=computes_on_cpu) as watched:
        watched.is_stopped = is_stopped
        watched.pass_time(300, used=0.9)
        assert (watched.liveness.problem == "") == (computes_on_cpu and not is_stopped)
        if watched.liveness.problem == "":
            watched.pass_time(10)  # they stand still
            assert watched.liveness.problem.startswith("the engine has taken no step for 10 s")
            watched.pass_time(int(LONG_STEP_S) - 310, used=0.9)
            assert watched.liveness.problem.startswith("the engine has taken no step for 600 s")


@async_test
async def test_an_api_server_that_was_held_up_itself() -> None:
    async with Watched() as watched:
        watched.pass_time(1)
        watched.now += 60  # its event loop did not run, and messages may wait
        watched.liveness.tick()
        assert watched.liveness.problem == ""
        watched.pass_time(10)
        assert watched.liveness.problem != ""


def test_the_cpu_time_of_a_stopped_child() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert cpu_use(os.getpid())[0] > 0
        assert not cpu_use(os.getpid())[1]
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert cpu_use(os.getpid())[1]
        os.kill(child.pid, signal.SIGCONT)
    assert cpu_use(child.pid) == (0.0, False)

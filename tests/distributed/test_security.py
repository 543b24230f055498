"""Every mode listens on the sockets that `docs/security.md` lists, and on no others."""

from __future__ import annotations

import json
import os
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import SMALL, running
from tests.distributed.test_faults import second_node
from tests.helpers.listening import descendants, listening
from tests.helpers.processes import running_child
from tests.helpers.server import RunningServer

from fleetfoot.utils import get_open_port

DOCS = Path(__file__).parents[2] / "docs" / "security.md"
SIDE_CHANNEL = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"backend": "tcp"}
}  # fmt: skip
LOOPBACK = "127.0.0.1"


def rows_of(mode: str) -> dict[str, list[str]]:
    """Row of the table -> patterns of its sockets."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 5 and mode in cells[1].split(", "):
            rows[cells[0]] = [address.strip() for address in re.split(r",|\(or", cells[2]) if "--uds" not in address]
    return rows


def matches(address: str, found: str, ports: dict[str, str]) -> bool:
    """Whether a socket is one of an address in the table. ``ports``: of settings, all on loopback here."""
    if address.startswith("Unix") or ("`" in address and "TCP" not in address):
        pattern = address.removeprefix("Unix").strip().strip("`")
        return found.startswith("unix ") and fnmatch(found.removeprefix("unix "), f"*/{pattern}")
    setting = address.rpartition(":")[2].strip("`")
    port = r"\d+" if setting in ("any", "side_channel_port") else ports[setting]
    return re.fullmatch(rf"tcp {re.escape(LOOPBACK)}:{port}", found) is not None


def check(mode: str, found: set[str], ports: dict[str, str] | None = None) -> None:
    rows = rows_of(mode)
    of_rows = {
        name: {socket for socket in found if any(matches(address, socket, ports or {}) for address in addresses)}
        for name, addresses in rows.items()
    }
    assert not {name for name, sockets in of_rows.items() if not sockets}, (of_rows, found)
    assert found == set().union(*of_rows.values())


def of_process(pid: int) -> set[str]:
    return listening(descendants(pid))


def test_engines_in_this_process() -> None:
    before = of_process(os.getpid())
    with running():
        assert of_process(os.getpid()) == before
    with running(tensor_parallel_size=2):
        check("ranks", of_process(os.getpid()) - before)


def test_kv_events(port: int) -> None:
    before = of_process(os.getpid())
    first, second = str(port), str(get_open_port())
    addresses = {"endpoint": f"tcp://127.0.0.1:{first}", "replay_endpoint": f"tcp://127.0.0.1:{second}"}
    with running(kv_events_config={"enable_kv_cache_events": True, **addresses}):
        ports = {"endpoint": first, "replay_endpoint": second}
        check("events", of_process(os.getpid()) - before, ports)


def test_nodes(port: int) -> None:
    size: dict[str, Any] = {"tensor_parallel_size": 2}
    before = of_process(os.getpid())
    with second_node(port, **size), running(**size, nnodes=2, master_port=port):
        check("nodes", of_process(os.getpid()) - before, {"--master-port": str(port)})


@pytest.mark.parametrize(("mode", "number"), [("serve", 1), ("serve-many", 2)])
def test_servers(mode: str, number: int) -> None:
    with RunningServer("--device", "cpu", "--api-server-count", str(number)) as server:
        check(mode, of_process(server.process.pid), {"--port": server.url.rpartition(":")[2]})


def test_an_engine_and_its_proxy() -> None:
    flags = ("--device", "cpu", "--model", str(SMALL["model"]), "--kv-transfer-config", json.dumps(SIDE_CHANNEL))
    with running_child(sys.executable, "-m", "fleetfoot.cli.main", "engine", *flags) as engine:
        assert engine.stdout is not None
        address = str(json.loads(engine.stdout.readline())["address"])
        check("engine", of_process(engine.pid), {"--port": address.rpartition(":")[2]})
        with RunningServer("--decode", address, command="proxy") as proxy:
            check("proxy", of_process(proxy.process.pid), {"--port": proxy.url.rpartition(":")[2]})

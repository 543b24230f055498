"""Connector settings are validated when an engine is planned, with the same errors as at start, and without effects."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from fleetfoot import LLM
from fleetfoot.cli.main import main
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import KVConnector, TransferContext
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.kv_transfer.blockstore.connector import SharedStorageConnector

Streams = pytest.CaptureFixture[str]
SHARED, OFFLOAD, NIXL, MULTI = "SharedStorageConnector", "OffloadingConnector", "NixlConnector", "MultiConnector"
FILES = {"shared_storage_path": "no/such/folder/yet"}
SMALL = {"device": "cpu", "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 40}


def transfer(connector: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": extra}


def own(name: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_module_path": __name__}


def plan(*flags: str) -> int:
    return main(["plan", "--device", "cpu", *flags])


class ChecksNothing(SharedStorageConnector):
    """Has no check of its own."""

    check_settings = KVConnector.check_settings


PART = {"kv_connector": SHARED, "kv_connector_extra_config": {**FILES, "num_thread": 4}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (transfer(SHARED), "shared_storage_path is None; it must be the folder"),
    (transfer(SHARED, shared_storage_path=5), "shared_storage_path is 5"),
    (transfer(SHARED, shared_storage_path=""), "shared_storage_path is ''"),
    (transfer(SHARED, shared_storage_path=__file__), "must be a folder, or a path at which one can be made"),
    (transfer(SHARED, shared_storage_path=f"{__file__}/x"), f"{__file__} is a file"),
    (transfer(SHARED, shared_storage_path="a\0b"), "paths have no null characters"),
    (transfer(SHARED, shared_storage_path="~no-such-user/x"), "shared_storage_path is '~no-such-user/x'"),
    (transfer(SHARED, shared_storage_path="x" * 5000), "File name too long"),
    (transfer(SHARED, **FILES, num_threads=0), "num_threads is 0"),
    (transfer(SHARED, **FILES, num_threads="4"), "num_threads is '4'; it must be an integer"),
    (transfer(SHARED, **FILES, num_threads=10**6), "num_threads is 1000000; it must be at most 1024"),
    (transfer(SHARED, shared_storage_pth="x"), "'shared_storage_pth'; did you mean 'shared_storage_path'"),
    (transfer(OFFLOAD), "cpu_bytes_to_use is None and num_cpu_blocks is None; give one of them"),
    (transfer(OFFLOAD, cpu_bytes_to_use=1, num_cpu_blocks=1), "give one of them"),
    (transfer(OFFLOAD, num_cpu_blocks=0), "num_cpu_blocks is 0; it must be an integer of at least 1"),
    (transfer(OFFLOAD, cpu_bytes_to_use=1.5), r"cpu_bytes_to_use is 1\.5"),
    (transfer(OFFLOAD, cpu_bytes_to_use="32GiB"), "cpu_bytes_to_use is '32GiB'"),
    (transfer(OFFLOAD, cpu_bytes_to_use=10), "10 bytes of host memory .* single block of 32,768"),
    (transfer(OFFLOAD, cpu_bytes=1), "unknown keyword 'cpu_bytes'; did you mean 'cpu_bytes_to_use'"),
    (transfer(NIXL, backend="ucx"), "backend is 'ucx'; it must be nixl or tcp"),
    (transfer(NIXL, abort_timeout=0), "abort_timeout is 0"),
    (transfer(NIXL, abort_timeout=0.5), "abort_timeout is 0.5; it must be an integer of at least 1"),
    (transfer(NIXL, side_channel_host="0.0.0.0"), r"host is '0\.0\.0\.0'; it must be an address of this machine"),
    (transfer(NIXL, side_channel_host="::1"), "a name or an IPv4 address; the port is side_channel_port"),
    (transfer(NIXL, side_channel_host="10.0.0.1:5600"), "the port is side_channel_port"),
    (transfer(NIXL, side_channel_port=65536), "side_channel_port is 65536; .* at most 65535"),
    (transfer(NIXL, side_chanel_port=3), "unknown keyword 'side_chanel_port'"),
    (transfer(MULTI, connectors=[PART]), f"of {SHARED} got an unknown keyword 'num_thread'; did you mean"),
    (transfer(MULTI, connectors=[transfer(MULTI, connectors=[PART])]), "unknown keyword 'num_thread'"),
    (own("FILES"), "is no connector; it must be a class derived from"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_invalid_settings_are_refused_everywhere(
    settings: dict[str, Any], message: str, capsys: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan and by the start, in the same words, and by both sides; nothing is created."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fleetfoot.engine.engine.start_executor", None)
    error = TypeError if "keyword" in message or "did you mean" in message else ValueError
    with pytest.raises(error, match=message) as refused:
        LLM(kv_transfer_config=settings, **SMALL)
    assert plan("--kv-transfer-config", json.dumps(settings)) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"fleetfoot plan: error: {refused.value}\n")
    config = KVTransferConfig.parse(settings)
    context = TransferContext(config, 16, "", "me", bytes_per_block=32768)
    connector = find_connector(config) if settings.get("kv_connector_module_path") is None else None
    sides = [connector.check_settings, connector.worker_side, connector.scheduler_side] if connector else []
    for side in sides[: 2 if config.kv_connector == NIXL else 3]:  # its scheduler side has no settings
        with pytest.raises(error, match=message):
            side(context)
    assert list(tmp_path.iterdir()) == []


def test_names_of_settings_are_strings() -> None:
    with pytest.raises(TypeError, match="has the key 5, a int; keys must be strings"):
        LLM(kv_transfer_config={**transfer(SHARED), "kv_connector_extra_config": {**FILES, 5: 6}}, **SMALL)


def test_each_rank_needs_a_port(capsys: Streams) -> None:
    config = json.dumps(transfer(NIXL, side_channel_port=65535))
    assert plan("--kv-transfer-config", config) == 0
    assert plan("--kv-transfer-config", config, "--pipeline-parallel-size", "2") == 2
    assert "it must be at most 65534: rank r of 2 takes this plus r" in capsys.readouterr().err


def test_memory_for_less_than_a_block(capsys: Streams) -> None:
    files = ["--kv-transfer-config", json.dumps(transfer(SHARED, **FILES))]
    drafts = ["--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}']  # its layer is in a block
    for flags, size in (([], "32,768"), (files, "32,768"), (drafts, "36,864")):
        assert plan("--kv-offloading-size", "1e-7", *flags) == 2
        message = f"(kv_offloading_size or cpu_bytes_to_use) do not hold a single block of {size} bytes"
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (transfer(OFFLOAD, num_cpu_blocks=10**20), "memory on the host .* lower kv_offloading_size, cpu_bytes_to_use"),
        (transfer(NIXL, backend="tcp", buffer_bytes=10**15), "on cpu for 4 concurrent loads .* lower buffer_bytes"),
    ],
)
def test_more_memory_than_there_is_names_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(kv_transfer_config=settings, **SMALL)


NOT_THERE = {"kv_connector": "Stranger", "kv_role": "kv_both", "kv_connector_module_path": "no.such.module"}
ACCEPTED: dict[str, dict[str, Any]] = {
    "files": transfer(SHARED, **FILES, max_bytes_in_flight=1e6),
    "memory": transfer(OFFLOAD, num_cpu_blocks=3),
    "nixl": transfer(NIXL, "kv_producer", backend="tcp", side_channel_host="a.host", side_channel_port=5600),
    "several": transfer(MULTI, connectors=[transfer(SHARED, **FILES), transfer(OFFLOAD, num_cpu_blocks=3)]),
    "not-there": NOT_THERE,
    "part-not-there": transfer(MULTI, connectors=[own("FILES"), transfer(SHARED, **FILES), NOT_THERE]),
    "checks-nothing": {**own("ChecksNothing"), "kv_connector_extra_config": {"anything": [1]}},
    "not-active": {**transfer(SHARED), "kv_role": None},
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_plan_makes_nothing(case: str, capsys: Streams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    is_there = not case.endswith("not-there")
    assert plan("--json", "--kv-transfer-config", json.dumps(ACCEPTED[case])) == (0 if is_there else 1)
    report = json.loads(capsys.readouterr().out)
    assert report["runnable"] == is_there
    problems = [text for text in report["problems"] if "cannot be imported from no.such.module" in text]
    assert bool(problems) != report["runnable"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("role", "lacks"), [("kv_producer", "loads"), ("kv_consumer", "saves")])
def test_a_warning_about_host_memory_that_is_not_used(capsys: Streams, role: str, lacks: str) -> None:
    assert plan("--kv-transfer-config", json.dumps(transfer(OFFLOAD, role, num_cpu_blocks=3))) == 0
    assert f"kv_role of {OFFLOAD} is '{role}': it never {lacks}" in capsys.readouterr().err


def test_a_short_run_logs_a_disk_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "kv"
    with LLM(kv_transfer_config=transfer(SHARED, shared_storage_path=folder), **SMALL) as llm:
        folder.write_text("a file, by now")
        llm.generate({"prompt_token_ids": list(range(5, 40))}, use_tqdm=False)
    assert "a KV block could not be saved; further failures" in caplog.text

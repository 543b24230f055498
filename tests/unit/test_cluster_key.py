"""The secret that the processes of a deployment share."""

import logging
import os

import pytest

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.utils.cluster_key import ClusterKey, create_cluster_key, find_cluster_key, read_cluster_key
from fleetfoot.utils.validation import is_loopback

KEY = ClusterKey(b"0123456789abcdef")


def test_a_signature_is_of_its_purpose_and_parts():
    signature = KEY.sign("join", b"ab", b"c")
    assert KEY.verify(signature, "join", b"ab", b"c")
    assert not KEY.verify(signature, "join", b"a", b"bc")
    assert not KEY.verify(signature, "offer", b"ab", b"c")
    assert not ClusterKey(b"another secret..").verify(signature, "join", b"ab", b"c")


def test_the_secret_is_in_no_repr():
    assert "0123456789abcdef" not in repr(KEY)


def test_a_new_key_is_its_owners_alone(tmp_path):
    path = tmp_path / "key"
    key = create_cluster_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_cluster_key(path) == key
    with pytest.raises(FileExistsError):
        create_cluster_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    create_cluster_key(path)
    path.chmod(mode)
    with pytest.raises(ValueError, match="cluster_key_file"):
        read_cluster_key(path)


def test_a_fifo_or_a_file_of_another_user_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ValueError, match="no plain file"):
        read_cluster_key(tmp_path / "fifo")
    create_cluster_key(path := tmp_path / "key")
    found = os.stat(path)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((*found[:4], 4321, *found[5:])))
    with pytest.raises(ValueError, match="belongs to user 4321"):
        read_cluster_key(path)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_key_of_the_wrong_length_is_refused(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="must have 16 to 4096"):
        read_cluster_key(path)


def test_the_file_comes_before_the_variable(tmp_path):
    path = tmp_path / "key"
    key = create_cluster_key(path)
    own = tmp_path / "own"
    assert find_cluster_key(str(path), KEY.secret.decode(), ["10.0.0.1"], own) == key
    assert find_cluster_key(None, f"{KEY.secret.decode()}\n", ["10.0.0.1"], own) == KEY
    assert not own.exists()


def test_on_loopback_one_file_is_made_for_all(tmp_path, caplog):
    own = tmp_path / "new" / "cluster_key"
    with caplog.at_level(logging.WARNING, "fleetfoot"):
        key = find_cluster_key(None, None, ["127.0.0.1", "::1"], own)
    assert str(own) in caplog.text
    assert own.stat().st_mode & 0o777 == 0o600
    assert own.parent.stat().st_mode & 0o077 == 0
    assert list(own.parent.iterdir()) == [own]
    assert find_cluster_key(None, None, ["localhost"], own) == key
    own.chmod(0o644)
    with pytest.raises(ValueError, match="cluster_key_file"):
        find_cluster_key(None, None, ["localhost"], own)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "example.org", "127.0.0.1.example.org"])
def test_elsewhere_a_key_is_required(tmp_path, host):
    with pytest.raises(ValueError, match=f"cluster_key_file is not set, and {host} "):
        find_cluster_key(None, None, ["127.0.0.1", host], tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_where_no_file_can_be_made_the_setting_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cluster_key_file is not set, and no file can be made"):
        find_cluster_key(None, None, ["127.0.0.1"], tmp_path / "file" / "key")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"])
def test_loopback(host):
    assert is_loopback(host)


def test_the_settings(monkeypatch):
    monkeypatch.setenv("FLEETFOOT_CLUSTER_KEY", "")
    assert env.cluster_key() is None
    monkeypatch.setenv("FLEETFOOT_CLUSTER_KEY", "secret")
    assert env.cluster_key() == "secret"
    assert EngineConfig(cluster_key_file="/a/key").cluster_key_file == "/a/key"
    with pytest.raises(ValueError, match="cluster_key_file"):
        EngineConfig(cluster_key_file="")

"""The secret that the processes of a deployment share."""

import pytest

from fleetfoot.utils.cluster_key import ClusterKey, create_cluster_key, read_cluster_key

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


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 5000])
def test_a_key_of_the_wrong_length_is_refused(tmp_path, content):
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="must have 16 to 4096"):
        read_cluster_key(path)

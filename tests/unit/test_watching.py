"""Looking for a change of a word in shared memory."""

import numpy as np
import pytest

from fleetfoot.config import env
from fleetfoot.native.loading import watch
from fleetfoot.utils.shared_words import SharedWords


@pytest.mark.parametrize("native", ["1", "0"])
def test_a_word_is_watched(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.USE_NATIVE_KERNELS, native)
    words = np.array([7, 5], dtype=np.int32)
    is_changed = watch(words.ctypes.data + 4)
    assert is_changed(7, 0) and is_changed(-5, 10**12) and not is_changed(5, 1000)
    words[1] = -1
    assert is_changed(5, 10**12) and not is_changed(-1, 0)


def test_words_are_shared_by_descriptor() -> None:
    words = SharedWords(1000)
    if words.descriptor < 0:
        pytest.skip("this platform has no files of memory")
    other = SharedWords(descriptor=words.descriptor)
    words.words[999] = -3
    other.words[0] = 4
    assert len(other.words) == 1000 and other.words[999] == -3 and words.words[0] == 4

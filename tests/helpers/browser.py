"""A headless Chromium, driven by its own protocol over pipes: no library is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Page:
    """One tab. What it writes to its console, and what it refuses for its policy, is in `problems`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = count(1)
        self._left = b""
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']['message']}")
                result: dict[str, Any] = found["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._left += data
        text, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        if found.get("method") == "Runtime.exceptionThrown":
            details = found["params"]["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif found.get("method") == "Log.entryAdded" and found["params"]["entry"]["level"] == "error":
            self.problems.append(found["params"]["entry"]["text"])
        elif "method" in found:
            self._events.append(found)
        return found

    def open(self, url: str) -> None:
        """Load a page, and wait until it has loaded."""
        self._events.clear()
        self._call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def run(self, code: str) -> Any:
        """The value of an expression, a promise's when it is settled."""
        result = self._call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"].get("exception", {}).get("description", code))
        return result["result"].get("value")

    def until(self, condition: str) -> Any:
        """Wait for a condition, looked at with each frame. Returns its value; AssertionError after a minute."""
        return self.run(
            "new Promise((resolve, reject) => { const end = performance.now() + 60000; const look = () => { "
            f"const value = ({condition}); if (value) resolve(value); else if (performance.now() > end) "
            f"reject(new Error({json.dumps(condition)} + ' stays false')); else setTimeout(look, 20); }}; look(); }})"
        )

    def press(self, key: str, modifiers: int = 0) -> None:
        """``modifiers``: 1 is Alt, 2 Control, 8 Shift."""
        texts = {"Enter": "\r"}
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39, "ArrowLeft": 37}
        fields = {
            "key": key,
            "code": key,
            "modifiers": modifiers,
            "windowsVirtualKeyCode": codes.get(key, ord(key[0].upper())),
        }
        self._call("Input.dispatchKeyEvent", type="keyDown", **fields, **({"text": texts[key]} if key in texts else {}))
        self._call("Input.dispatchKeyEvent", type="keyUp", **fields)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, scheme: str = "light") -> None:
        """The window, and the colours that the system prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def accessibility(self) -> list[dict[str, Any]]:
        """The nodes that a screen reader is told."""
        nodes: list[dict[str, Any]] = self._call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node.get("ignored")]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with a profile in ``folder``."""
    assert CHROMIUM is not None
    (commands, to_browser), (from_browser, answers) = os.pipe(), os.pipe()

    def pipes() -> None:
        # the protocol is on descriptors 3 and 4; others may have these numbers first
        os.dup2(commands, 100)
        os.dup2(answers, 101)
        os.dup2(100, 3)
        os.dup2(101, 4)

    words = [
        *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--remote-debugging-pipe", f"--user-data-dir={folder}", "--disable-background-networking", "about:blank"),
    ]
    process = subprocess.Popen(
        words,
        preexec_fn=pipes,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)

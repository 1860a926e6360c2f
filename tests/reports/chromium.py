"""A headless Chromium for tests of pages, driven through its debugging pipe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars "
    "--remote-debugging-pipe"
)
_PATIENCE = 60.0  # seconds


class Browser:
    """One page in a browser of its own.

    Args:
        profile: an empty folder for the files of the browser.
    """

    def __init__(self, profile: Path) -> None:
        from_us, self._requests = os.pipe()
        self._answers, to_us = os.pipe()
        # Chromium reads requests from file 3 and writes answers to file 4.
        command = f"exec {CHROMIUM} {_FLAGS} --user-data-dir='{profile}' 3<&{from_us} 4>&{to_us}"
        self._process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL
        )
        os.close(from_us)
        os.close(to_us)
        os.set_blocking(self._answers, False)
        self._number, self._received, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        page = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the Chrome DevTools protocol and return its result."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, *, width: int = 1280, dark: bool = False, media: str = "") -> None:
        """Open a file in a window of this width, and forget earlier events."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events = []
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, which may be a promise."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point_at(self, selector: str, number: int = 0) -> None:
        """Move the mouse over the middle of an element, and scroll it into view first."""
        chosen = f"document.querySelectorAll({selector!r})[{number}]"
        self.run(f"{chosen}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        middle = "({x, y, width, height}) => [x + width / 2, y + height / 2]"
        x, y = self.run(f"({middle})({chosen}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        # Events that scrolling caused come with the next frame.
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 1, y=y)

    @property
    def problems(self) -> list[dict[str, Any]]:
        """Errors of scripts, and messages in the console, such as violations of the security policy."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in kinds]

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(_PATIENCE)
        os.close(self._requests)
        os.close(self._answers)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._received:
            try:
                self._received += os.read(self._answers, 1 << 16)
            except BlockingIOError:
                assert time.monotonic() < until, "the browser does not answer"
                time.sleep(0.005)
        message, self._received = self._received.split(b"\0", 1)
        parsed: dict[str, Any] = json.loads(message)
        return parsed

"""Opens pages in a headless Chromium that has no network, and tells what they complained of and
what they asked for.

The browser is driven over its DevTools protocol: messages of JSON, each ended by a zero byte,
through a pair of pipes.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
ANSWER_SECONDS = 120  # of a browser that starts on a busy machine
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
COMPLAINTS = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}


class Browser:
    """One browser, and the page it shows."""

    def __init__(self, folder: Path):
        """``folder``: for all that the browser writes."""
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        high = [
            fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)
        ]  # the shell below makes them 3 and 4
        command = [
            "bash",
            "-c",
            'exec "${@:3}" 3<&"$1" 4>&"$2"',
            "browser",
            *map(str, high),
            BINARY,
            *FLAGS,
        ]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            pass_fds=high,
            start_new_session=True,
            env={**os.environ, "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self._read, self._number, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self._call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def open(self, page: Path, *, width: int = 1200, dark: bool = False) -> None:
        """Shows ``page`` in a window of ``width``, and returns when all of it is loaded."""
        self._events.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """Returns the value of ``expression`` in the page, which is of JSON's kinds."""
        found = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Writes all of the page as a PNG file."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    @property
    def complaints(self) -> list[tuple[str, dict[str, Any]]]:
        """What has been on the console since the page was asked for: words of its own, errors, and
        what the browser says of it."""
        self.evaluate("0")  # behind which nothing of the loading comes
        return [
            (event["method"], event["params"])
            for event in self._events
            if event["method"] in COMPLAINTS
        ]

    @property
    def requests(self) -> list[str]:
        """The addresses that were asked for, the page's own first."""
        return [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        """Ends the browser, and whatever it has started."""
        try:
            self._session = ""
            self._call("Browser.close")
            self._process.wait(timeout=ANSWER_SECONDS)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            os.close(self._in)
            os.close(self._out)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message; events are kept."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._read:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"{BINARY} has said nothing for {ANSWER_SECONDS} s")
            if not (part := os.read(self._in, 1 << 20)):
                raise RuntimeError(f"{BINARY} has ended, with status {self._process.wait()}")
            self._read += part
        line, _, self._read = self._read.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self._events.append(message)
        return message


@contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Has a browser inside the block."""
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()

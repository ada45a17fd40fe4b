"""Drive Chromium without a window from tests, through two pipes.

`SCHEDLANG_BROWSER` names its program; without it the usual names are tried.  Only the browser is
needed: its DevTools protocol runs over file descriptors 3 and 4, and a zero byte ends a message.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
    "--force-color-profile=srgb",
)
TIMEOUT = 60.0  # seconds for one answer


def find_browser() -> str | None:
    """The path of an installed browser, or None."""
    configured = os.environ.get("SCHEDLANG_BROWSER")
    return configured or next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Browser:
    """A browser with one page; `events` are the events of the open page."""

    reads: int
    writes: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    rest: bytes = b""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; keep events before it."""
        self.number += 1
        request: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.writes, json.dumps(request).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self.number:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {TIMEOUT:g} s"
            chunk = os.read(self.reads, 1 << 16)
            assert chunk, "the browser has ended"
            self.rest += chunk
        text, _, self.rest = self.rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, file: Path, *, dark: bool, width: int = 1280) -> None:
        """Open a file in a window of this width, in a light or dark colour scheme."""
        shade = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[shade])
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.events.clear()
        self.ask("Page.navigate", url=file.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())
        self.tell("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")

    def tell(self, script: str) -> Any:
        """Evaluate an expression, await promises, and return its value."""
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """The page's errors, warnings and exceptions."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [
            json.dumps(event["params"]) for event in self.events if event.get("method") in kinds
        ]

    def requests(self) -> list[str]:
        """The URLs that the page requested, without its own."""
        events = (
            event for event in self.events if event.get("method") == "Network.requestWillBeSent"
        )
        urls = [event["params"]["request"]["url"] for event in events]
        return [url for url in urls[1:] if not url.startswith(("data:", "blob:"))]


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """Start a browser with its profile in `folder`; it ends with the block."""
    browser_input, write_end = os.pipe()
    read_end, browser_output = os.pipe()
    executable = find_browser()
    assert executable is not None
    line = f'exec "$0" "$@" 3<&{browser_input} 4>&{browser_output}'
    command = ["bash", "-c", line, executable, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    env = {**os.environ, "HOME": str(folder)}
    no_streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(
        command,
        pass_fds=(browser_input, browser_output),
        env=env,
        stderr=subprocess.DEVNULL,
        **no_streams,
    )
    os.close(browser_input)
    os.close(browser_output)
    try:
        client = Browser(read_end, write_end)
        target = client.ask("Target.createTarget", url="about:blank")["targetId"]
        client.session = client.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime", "Log"):
            client.ask(f"{domain}.enable")
        yield client
        client.session = ""
        client.ask("Browser.close")
        process.wait(TIMEOUT)
    finally:
        process.kill()
        process.wait()
        os.close(write_end)
        os.close(read_end)

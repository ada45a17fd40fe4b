"""A real browser for tests: Chromium without a window, spoken to over two pipes.

`SCHEDLANG_BROWSER` names its program, else one of the usual names is looked for.  Nothing but the
browser is needed: its DevTools protocol runs over file descriptors 3 and 4, a message ending in
a zero byte.
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
WORDS = (
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
PATIENCE = 60.0  # seconds for one answer


def program() -> str | None:
    """The browser's program, if one is installed."""
    named = os.environ.get("SCHEDLANG_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Browser:
    """One browser with one page; `events` are those of the page that is open."""

    reads: int
    writes: int
    session: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    rest: bytes = b""

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and give its result; events in between are kept."""
        self.number += 1
        asked: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        os.write(self.writes, json.dumps(asked).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, (method, found["error"])
                result: dict[str, Any] = found["result"]
                return result
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.reads], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"the browser did not answer within {PATIENCE:g} s"
            more = os.read(self.reads, 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        text, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, file: Path, *, dark: bool, width: int = 1280) -> None:
        """Show a file as a window of this width does, in the light or in the dark."""
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
        while not any(one.get("method") == "Page.loadEventFired" for one in self.events):
            self.events.append(self._next())
        self.tell("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")

    def tell(self, script: str) -> Any:
        """The value of an expression, promises awaited."""
        found = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """What the page wrote as an error or a warning, or threw."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(one["params"]) for one in self.events if one.get("method") in kinds]

    def requests(self) -> list[str]:
        """The addresses that the page asked for, itself apart."""
        asked = (one for one in self.events if one.get("method") == "Network.requestWillBeSent")
        urls = [one["params"]["request"]["url"] for one in asked]
        return [url for url in urls[1:] if not url.startswith(("data:", "blob:"))]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its own files in `folder`, and ends with the block."""
    to_it, mine = os.pipe()
    its, from_it = os.pipe()
    named = program()
    assert named is not None
    line = f'exec "$0" "$@" 3<&{to_it} 4>&{from_it}'
    words = ["bash", "-c", line, named, *WORDS, f"--user-data-dir={folder}", "about:blank"]
    env = {**os.environ, "HOME": str(folder)}
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(
        words, pass_fds=(to_it, from_it), env=env, stderr=subprocess.DEVNULL, **quiet
    )
    os.close(to_it)
    os.close(from_it)
    try:
        one = Browser(its, mine)
        target = one.ask("Target.createTarget", url="about:blank")["targetId"]
        one.session = one.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            one.ask(f"{domain}.enable")
        yield one
        one.session = ""
        one.ask("Browser.close")
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
        os.close(mine)
        os.close(its)

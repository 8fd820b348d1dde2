"""Chromium without a window, spoken to over two pipes: no driver, no port, no library."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PATIENCE_S = 300.0
_AXE = """axe.run().then(found => JSON.stringify(found.violations.map(
    each => [each.id, each.impact, each.nodes.map(node => node.html.slice(0, 200))])))"""
AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"
"""axe-core, which CI fetches: ``npm install --no-save axe-core``."""


class Browser:
    """A browser with one page."""

    def __init__(self, profile: Path, gpu: str = "--disable-gpu") -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = f"--headless --no-sandbox {gpu} --remote-debugging-pipe --no-first-run"
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" {flags} "$@" 3<&{theirs_in} 4>&{theirs_out}', CHROMIUM,
             f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        for end in (theirs_in, theirs_out):
            os.close(end)
        self._in, self._out, self._buffer = ours_in, ours_out, b""
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()
        for end in (self._in, self._out):
            os.close(end)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of Chrome's DevTools protocol."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            assert time.monotonic() < until, "the browser does not answer"
            if select.select([self._in], [], [], 1.0)[0]:
                piece = os.read(self._in, 2**16)
                assert piece, "the browser has ended"
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def open(self, page: Path) -> None:
        """Load a file, and wait until it is loaded."""
        self.go(page.as_uri())

    def go(self, address: str) -> None:
        """Load what lies at an address, and wait until it is loaded.

        Nothing that the page before it says, or its server as that ends, is among the events.
        """
        self._load("about:blank")
        self.events.clear()
        self._load(address)

    def _load(self, address: str) -> None:
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> Any:
        """The value of an expression, once it is one that counts as true."""
        until = time.monotonic() + PATIENCE_S
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"it never came to {script}"
            time.sleep(0.1)
        return value

    def axe(self, script: str) -> list[str]:
        """The serious violations of the rules of accessibility that axe-core finds in the page."""
        self.run(f"{script};0")
        answer = self.call(
            "Runtime.evaluate", expression=_AXE, awaitPromise=True, returnByValue=True
        )
        violations = json.loads(answer["result"]["value"])
        return [str(each) for each in violations if each[1] in ("serious", "critical")]

    def complaints(self) -> list[dict[str, Any]]:
        """What the page wrote to its console, and what went wrong in it."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [event for event in self.events if event.get("method") in names]

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

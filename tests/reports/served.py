"""The page of runs as a user starts it: a process, and the address that it prints."""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import penstock


class Served:
    """A dashboard that is served."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address
        self.port = urlsplit(address).port or 0

    def ask(self, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
        """The status and the body of an answer, whatever the headers say."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host="Host" in given)
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body.decode(errors="replace")

    def interrupt(self) -> tuple[int, str]:
        """The exit code and the standard error after a Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        _, error = self.process.communicate(timeout=300)
        return self.process.returncode, error


def command(*words: object) -> list[str]:
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from penstock.cli import entry; sys.argv[0] = 'penstock'; entry()"
    return [sys.executable, "-c", code, "dashboard", *map(str, words)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(penstock.__file__).parent.parent)}


@contextmanager
def served(*words: object) -> Iterator[Served]:
    process = subprocess.Popen(
        command(*words, "--port", 0), env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line.startswith("http://localhost:"), line + process.stderr.read()
        yield Served(process, line.split()[0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()

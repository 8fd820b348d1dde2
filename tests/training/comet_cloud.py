"""A stand-in for Comet's cloud behind an HTTPS proxy on loopback, as many a cluster has one.

It is asked for the host that Comet's client would have asked; nothing of Comet's is set. What it is
sent is kept, by path, and it notes each host that somebody wanted to reach.
"""

import gzip
import json
import ssl
import subprocess
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HOST = "www.comet.com"


class Cloud(ThreadingHTTPServer):
    daemon_threads = False  # joined at the end, when their clients have left

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.certificate = folder / "certificate.pem"
        key = folder / "key.pem"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        command += ["-keyout", str(key), "-out", str(self.certificate), "-subj", f"/CN={HOST}"]
        command += ["-addext", f"subjectAltName=DNS:{HOST}"]
        subprocess.run(command, check=True, capture_output=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(self.certificate, key)
        self.begin_anew()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def begin_anew(self) -> None:
        """Forget what was heard, and answer."""
        self.asked: list[str] = []
        """Hosts that were asked for, with their ports."""
        self.heard: list[tuple[str, Any]] = []
        """Paths that were posted to, and what was."""
        self.away = False
        """Whether the network behind the proxy is gone."""

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def environment(self) -> dict[str, str]:
        """What a cluster's users have: a proxy, and a certificate that their site has signed."""
        proxy = f"http://127.0.0.1:{self.server_address[1]}"
        return {"HTTPS_PROXY": proxy, "REQUESTS_CA_BUNDLE": str(self.certificate)}

    def posted(self, path: str) -> list[Any]:
        return [body for where, body in self.heard if where.split("?")[0].endswith(path)]

    def metrics(self) -> dict[str, list[tuple[int, float]]]:
        """Of each metric its steps and values, as they were told."""
        points_of: dict[str, list[tuple[int, float]]] = {}
        for batch in self.posted("batch/logger/experiment/metric"):
            for value in batch["values"]:
                point = value["step"], value["metricValue"]
                points_of.setdefault(value["metricName"], []).append(point)
        return {name: sorted(points) for name, points in points_of.items()}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: Cloud

    def log_message(self, *_: Any) -> None: ...

    def do_CONNECT(self) -> None:
        self.server.asked.append(self.path)
        if self.server.away:
            self.send_error(503, "the network is gone")
            return
        self.send_response(200)
        self.end_headers()
        try:
            self.connection = self.server.context.wrap_socket(self.connection, server_side=True)
        except OSError:  # it does not trust us, or has left
            return
        self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb", 0)
        self.close_connection = False

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # which is no longer the socket that was accepted

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        answer: dict[str, Any] = {}
        if "isAlive/ver" in self.path:
            answer = {"msg": "5.0.0", "version": "5.0.0"}
        elif "experiment/metadata" in self.path and (made := self.server.posted("add/run")):
            key = made[0]["experimentKey"]
            answer = {"experimentKey": key, "projectName": "p", "workspaceName": "w"}
        self._answer(json.dumps(answer).encode())

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        for decode in (gzip.decompress, zlib.decompress, bytes):
            try:
                body = json.loads(decode(data))
                break
            except (OSError, ValueError, zlib.error):
                body = None
        self.server.heard.append((self.path, body))
        answer: dict[str, Any] = {"msg": "", "code": 200}
        if self.path.endswith("status-report/update"):
            answer |= {"is_alive_beat_duration_millis": 10000, "gpu_monitor_interval_millis": 60000}
        if self.path.endswith(("add/run", "get/run")):
            answer |= {"runId": "r1", "project_id": "p1", "lastOffset": 0, "name": "n", "msg": None}
        self._answer(json.dumps(answer).encode())

    def _answer(self, body: bytes) -> None:
        if self.server.away:
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

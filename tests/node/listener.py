# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server on loopback that keeps what it is sent, as a process of its own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Listener:
    """Where it listens, and what it has received."""

    def __init__(self, directory: Path, port: int) -> None:
        self._directory = directory
        self.url = f"http://127.0.0.1:{port}"

    @property
    def received(self) -> list[dict[str, Any]]:
        path = self._directory / "received"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]


@contextmanager
def listening(directory: Path) -> Iterator[Listener]:
    """Start one; it ends with the block."""
    directory.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, __file__, str(directory)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield Listener(directory, int(server.stdout.readline()))
        finally:
            server.terminate()


def main(directory: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            with (directory / "received").open("a") as file:
                file.write(json.dumps({"path": self.path, "body": body}) + "\n")
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

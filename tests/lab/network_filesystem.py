# SPDX-License-Identifier: Apache-2.0
"""A real network filesystem for a lab: GlusterFS, with a client, and its caches, on every node.

The server and its clients are told what to be by files, so no management daemon is needed.
"""

from pathlib import Path

from . import daemons, kernel
from .layout import CONTROLLER_ADDRESS, LabSpec

_PORT = 24007
_CACHES = ("write-behind", "read-ahead", "io-cache", "quick-read", "open-behind", "md-cache")


def server_volfile(brick: Path) -> str:
    """What the server serves, and how."""
    return _volfile(
        ("brick", "storage/posix", {"directory": str(brick)}),
        ("locks", "features/locks", {}),
        ("threads", "performance/io-threads", {}),
        (
            "server",
            "protocol/server",
            {
                "transport-type": "tcp",
                "transport.socket.listen-port": str(_PORT),
                "auth.addr.threads.allow": "*",
            },
        ),
    )


def client_volfile() -> str:
    """How a client reaches it, and what it keeps to itself for a while."""
    remote = {
        "transport-type": "tcp",
        "remote-host": CONTROLLER_ADDRESS,
        "remote-port": str(_PORT),
        "remote-subvolume": "threads",
    }
    caches = ((name, f"performance/{name}", dict[str, str]()) for name in _CACHES)
    return _volfile(("client", "protocol/client", remote), *caches)


def _volfile(*layers: tuple[str, str, dict[str, str]]) -> str:
    """Stack layers, each on the one before it."""
    text, below = "", ""
    for name, kind, options in layers:
        text += f"volume {name}\n  type {kind}\n"
        text += "".join(f"  option {key} {value}\n" for key, value in options.items())
        text += f"  subvolumes {below}\nend-volume\n" if below else "end-volume\n"
        below = name
    return text


def serve(spec: LabSpec) -> None:
    """Start the server, on a disk of its own in memory."""
    brick = spec.paths.root / "brick"
    brick.mkdir()
    kernel.mount_fresh("tmpfs", brick, f"mode=0755,size={spec.network_filesystem_mb}m")
    spec.paths.shared.mkdir(exist_ok=True)
    (spec.paths.etc / "server.vol").write_text(server_volfile(brick))
    (spec.paths.etc / "client.vol").write_text(client_volfile())
    _glusterfs(spec, "server", "glusterfsd")
    daemons.await_answer((CONTROLLER_ADDRESS, _PORT), "glusterfsd")


def mount(spec: LabSpec, node: str) -> None:
    """Mount it in the namespaces of the calling process."""
    _glusterfs(spec, "client", "glusterfs", node, str(spec.paths.shared))


def _glusterfs(spec: LabSpec, volfile: str, program: str, name: str = "", *where: str) -> None:
    log = spec.paths.log / f"{program}{name}.log"
    volume = f"--volfile={spec.paths.etc}/{volfile}.vol"
    daemons.run([program, volume, f"--log-file={log}", *where])

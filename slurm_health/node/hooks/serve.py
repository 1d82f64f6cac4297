# SPDX-License-Identifier: Apache-2.0
"""`healthcheck --serve`: tells launchers that ask, before their workers meet, how the node is.

gRPC takes the questions in threads of its own. The main thread has them answered by another
`slurm-health healthcheck`, which reads the site's file anew and can be killed. One is at work at a
time; it answers all who had asked when it began, and those who ask within seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.hooks.doorman import Doorman
from slurm_health.node.hooks.log import Log
from slurm_health.node.hooks.nvhcd import CALL, SERVICE, HealthAnswer, answer, response
from slurm_health.node.rules.finding import CheckResult
from slurm_health.records.decoding import from_json
from slurm_health.records.errors import ExitCode, UsageError
from slurm_health.records.text import one_line
from slurm_health.system.processes import run
from slurm_health.system.signals import exit_text, leaving_on

# The client of NVIDIA's resiliency extension waits 60 s.
RUN_LIMIT_S = 50.0
# A run that is ended ends its own children within milliseconds.
_GRACE_S = 2.0
# For so long an answer is given again: whoever may connect may ask as often as they like.
_FRESH_S = 5.0
# How long a signal may go unheard that comes when nobody asks.
_IDLE_S = 1.0
_LOOK_S = 0.5
# Each has a thread while it lasts, one that only holds the line too; these cost little until then.
_MOST_WAITING = 1024
# gRPC's server refuses a call of a connection beyond these although its client keeps to them, as it
# counts calls that have ended until Python lets go of them. So these are more than launchers ask.
_MOST_OF_CONNECTION = 32
# A launcher that waits for longer than it does for an answer is told to connect again.
_CONNECTION_S = 60
_LEAVES_WITHIN_S = 5
_CLAIMED_WITHIN_S, _CLAIM_LOOK_S = 2.0, 0.05
_MOST_BYTES = 1 << 16
# sockaddr_un has room for 107 (unix(7)); the name that a socket is made with is longer.
_PATH_BYTES = 95
# Jobs of all users ask. Whom a site wants to keep out, it does by the directory's permissions.
_SOCKET_MODE = 0o666
_RAN = (ExitCode.HEALTHY, ExitCode.BAD_NODES, ExitCode.INCONCLUSIVE)


class NotRun(Exception):
    """The checks have no result. Its text says why."""


@dataclass(frozen=True)
class _Desk:
    """Where questions wait; `closed` once nobody answers them any more."""

    questions: queue.SimpleQueue[Future[HealthAnswer]] = field(default_factory=queue.SimpleQueue)
    closed: threading.Event = field(default_factory=threading.Event)


def serve(path: Path, *, check: Sequence[str], node: str, environ: Mapping[str, str]) -> None:
    """Answer until SIGTERM; the socket is removed then, and where SIGINT ends this.

    Args:
        path: the socket.
        check: the command that runs the checks and prints their results as JSON.
        node: this node's name.
        environ: for the checks.

    Raises:
        UsageError: grpcio is missing, or there can be no socket at this path.
    """
    grpc = _grpc()
    desk, log = _Desk(), Log("serve", node)
    with (
        contextlib.suppress(SystemExit),
        leaving_on(signal.SIGTERM),
        ThreadPoolExecutor(_MOST_WAITING) as threads,
        _listening(_server(grpc, threads, desk), path),
    ):
        try:
            log.info(f"answers at {path}")
            _answer_all(desk, lambda: answer(_results(check, environ), node=node), log)
        finally:
            desk.closed.set()


def _grpc() -> Any:
    try:
        import grpc
    except ImportError as err:
        raise UsageError(
            f"--serve needs grpcio, which {sys.executable} does not have ({err}):"
            " pip install 'slurm-health[serve]'"
        ) from err
    return grpc


def _server(grpc: Any, threads: ThreadPoolExecutor, desk: _Desk) -> Any:
    def ask(_request: bytes, call: Any) -> bytes:
        question: Future[HealthAnswer] = Future()
        desk.questions.put(question)
        while call.is_active() and not desk.closed.is_set():
            try:
                return _encoded(question.result(_LOOK_S))
            except TimeoutError:
                continue
            except NotRun as err:
                # Not an answer: the client takes its node for well, as it does without a service.
                call.abort(grpc.StatusCode.UNAVAILABLE, str(err))
        call.abort(grpc.StatusCode.UNAVAILABLE, "slurm-health is being stopped")
        raise AssertionError("abort raises")

    calls = {CALL: grpc.unary_unary_rpc_method_handler(ask)}
    return grpc.server(
        threads,
        handlers=[grpc.method_handlers_generic_handler(SERVICE, calls)],
        options=[
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_concurrent_streams", _MOST_OF_CONNECTION),
            ("grpc.max_connection_age_ms", _CONNECTION_S * 1000),
            ("grpc.max_connection_age_grace_ms", _LEAVES_WITHIN_S * 1000),
        ],
        maximum_concurrent_rpcs=_MOST_WAITING,
    )


def _encoded(found: HealthAnswer) -> bytes:
    return response(
        success=found.healthy,
        exit_code=int(found.exit_code),
        output=msgspec.json.encode(found).decode(),
        error="; ".join(found.failed_checks),
    )


def _answer_all(desk: _Desk, look: Callable[[], HealthAnswer], log: Log) -> None:
    """Answer questions for ever."""
    found: HealthAnswer | NotRun | None = None
    began_s = 0.0
    while True:
        waiting = [_next_question(desk)]
        while not desk.questions.empty():
            waiting.append(desk.questions.get())
        if found is None or time.monotonic() - began_s >= _FRESH_S:
            began_s = time.monotonic()
            found = _looked(look, log)
        for each in waiting:
            if isinstance(found, NotRun):
                each.set_exception(found)
            else:
                each.set_result(found)


def _looked(look: Callable[[], HealthAnswer], log: Log) -> HealthAnswer | NotRun:
    try:
        found = look()
    except NotRun as err:
        log.warning(f"no answer: {err}")
        return err
    _say(found, log)
    return found


def _next_question(desk: _Desk) -> Future[HealthAnswer]:
    while True:
        # A signal that comes just before Python waits is handled when that returns.
        with contextlib.suppress(queue.Empty):
            return desk.questions.get(timeout=_IDLE_S)


def _say(found: HealthAnswer, log: Log) -> None:
    if found.failed_checks:
        log.error(f"answered unhealthy: {'; '.join(found.failed_checks)}")
    if found.inconclusive:
        log.warning(f"not measured: {'; '.join(found.inconclusive)}")


def _results(check: Sequence[str], environ: Mapping[str, str]) -> list[CheckResult]:
    """Run the checks.

    Raises:
        NotRun: they did not end in time, or with no result.
    """
    try:
        ended = run(check, environ=environ, deadline_s=RUN_LIMIT_S, grace_s=_GRACE_S)
    except TimeoutError:
        raise NotRun(f"the checks did not end within {RUN_LIMIT_S:g} s") from None
    except OSError as err:
        raise NotRun(f"the checks cannot be started: {err}") from err
    with contextlib.suppress(msgspec.DecodeError):
        if ended.returncode in _RAN:
            return from_json(ended.stdout, list[CheckResult])
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    why = one_line(said[-1]).removeprefix("slurm-health: ") if said else exit_text(ended.returncode)
    raise NotRun(f"nothing was checked: {why}")


@contextlib.contextmanager
def _listening(server: Any, path: Path) -> Iterator[None]:
    """Have a server answer at a path, where no other does; afterwards nothing is there.

    The socket is made beside the path and renamed when it can be used: who finds it can connect,
    and what a killed server left is replaced.

    Raises:
        UsageError: there can be no socket at this path.
    """
    made = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        own = tempfile.TemporaryDirectory(prefix="slurm-health-")  # closed to other users
    except OSError as err:
        raise _refused(path, f"no temporary directory can be made: {err}") from err
    with own as place:
        doorman = Doorman(Path(place, "socket"))
        try:
            mine = _publish(server, doorman, made, path)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    if path.stat().st_ino == mine:
                        path.unlink()
        finally:
            doorman.close()
            server.stop(None).wait()
            made.unlink(missing_ok=True)


def _publish(server: Any, doorman: Doorman, made: Path, path: Path) -> int:
    """Start a server behind a door that is made as `made` and found at `path`; return its inode."""
    try:
        with _claim(path):
            server.add_insecure_port(f"unix:{doorman.inner}")
            server.start()
            doorman.open_at(made)
            made.chmod(_SOCKET_MODE)
            inode = made.stat().st_ino
            made.rename(path)
            return inode
    except OSError as err:
        raise _refused(path, err.strerror or str(err)) from err
    except RuntimeError as err:  # what gRPC raises where it cannot bind
        raise _refused(path, f"no socket can be made in {doorman.inner.parent}") from err


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[None]:
    """Keep other servers from this path while it is found free and taken.

    Raises:
        UsageError: another server answers there, or something that is no socket is there.
        OSError: its directory cannot be used.
    """
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise _refused(path, f"it is longer than {_PATH_BYTES} bytes; choose a shorter one")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(directory)
        if path.exists() and not path.is_socket():
            raise _refused(path, "something else is there; remove it, or choose another path")
        if _is_answered(path):
            raise _refused(
                path, "another server answers there; end it first, or choose another path"
            )
        yield
    finally:
        os.close(directory)


def _lock(directory: int) -> None:
    """Hold back a server that starts in the same moment.

    Whoever may read the directory can lock it for ever, so it is not waited for longer than such a
    start takes.
    """
    until_s = time.monotonic() + _CLAIMED_WITHIN_S
    while time.monotonic() < until_s:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_CLAIM_LOOK_S)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # who fills a server's queue would keep this one waiting
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except BlockingIOError:
            return True
    return True


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(f"cannot serve at {path}: {why}")

# SPDX-License-Identifier: Apache-2.0
"""`healthcheck --serve`: tells launchers that ask, before their workers meet, how the node is.

gRPC takes the questions in threads of its own. The main thread has them answered by another
`slurm-health healthcheck`, which reads the site's file anew and can be killed. One is at work at a
time; it answers all who had asked when it began, and those who ask within seconds.

They ask as NVIDIA's resiliency extension does, by the service HealthCheckService of the package
nvhcd, which has one call, RunHealthCheck:

    request    args = 1 (repeated string)
    response   success = 1 (bool), exit_code = 2 (int32), output = 3 (string), error = 4 (string)

Four plain fields need no compiler and no library: they are written here as Protocol Buffers encode
them (https://protobuf.dev/programming-guides/encoding/). The arguments are those of a program that
a site may have behind the service, and are not read.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.hooks.doorman import listening
from slurm_health.node.hooks.log import Log
from slurm_health.node.rules.finding import CheckResult, Status, node_faults
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
_MOST_BYTES = 1 << 16
SERVICE, CALL = "nvhcd.HealthCheckService", "RunHealthCheck"
_VARINT, _BYTES = 0, 2  # wire types
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
        listening(_server(grpc, threads, desk), path),
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


# --- what they are told -------------------------------------------------------------------------


class HealthAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's checks found, as a launcher asks for it.

    `fail_count` and `failed_checks` are the names that NVIDIA's resiliency extension reads.
    """

    node: str
    fail_count: int
    failed_checks: list[str]
    inconclusive: list[str]
    checks: int

    @property
    def healthy(self) -> bool:
        """Whether the node has no proven fault."""
        return not self.failed_checks

    @property
    def exit_code(self) -> ExitCode:
        """The code with which `slurm-health healthcheck` would end."""
        if self.failed_checks:
            return ExitCode.BAD_NODES
        return ExitCode.INCONCLUSIVE if self.inconclusive else ExitCode.HEALTHY


def answer(results: Sequence[CheckResult], *, node: str) -> HealthAnswer:
    """Return what to say of a node whose checks found this."""
    faults = [_told(each) for each in node_faults(results)]
    return HealthAnswer(
        node=node,
        fail_count=len(faults),
        failed_checks=faults,
        inconclusive=[_told(each) for each in results if each.status is Status.INCONCLUSIVE],
        checks=len(results),
    )


def _told(result: CheckResult) -> str:
    return f"{result.name}: {result.finding.text}"


def response(*, success: bool, exit_code: int, output: str, error: str = "") -> bytes:
    """Return a response; `exit_code` is not negative, as exit codes are."""
    numbers = ((1, int(success)), (2, exit_code))
    texts = ((3, output), (4, error))
    # A field that has its default value, nought or empty, is left out.
    parts = [_varint(place << 3 | _VARINT) + _varint(value) for place, value in numbers if value]
    for place, text in texts:
        data = text.encode(errors="replace")
        if data:
            parts.append(_varint(place << 3 | _BYTES) + _varint(len(data)) + data)
    return b"".join(parts)


def _varint(value: int) -> bytes:
    """Return a whole number in groups of seven bits, the lowest first."""
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)

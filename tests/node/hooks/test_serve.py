# SPDX-License-Identifier: Apache-2.0
"""`healthcheck --serve`, asked over a real Unix socket by a client made from the public schema."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from slurm_health.node.hooks import serve
from slurm_health.node.rules.finding import CheckResult, Finding, Status
from tests.support.command_line import finish, slurm_health, start
from tests.support.fake_scontrol import FakeScontrol
from tests.support.sites import write_site

DEADLINE_S = 60.0
NOBODY = 65534
Response = Any  # protobuf makes the class when the schema is read


def _message(name: str, *fields: tuple[str, int, int]) -> descriptor_pb2.DescriptorProto:
    repeated = {"args"}
    return descriptor_pb2.DescriptorProto(
        name=name,
        field=[
            descriptor_pb2.FieldDescriptorProto(
                name=field, number=number, type=kind, label=3 if field in repeated else 1
            )
            for field, number, kind in fields
        ],
    )


def _schema() -> tuple[Any, Any]:
    text, flag, whole = 9, 8, 5  # descriptor.proto's numbers of string, bool and int32
    file = descriptor_pb2.FileDescriptorProto(
        name="nvhcd.proto",
        package="nvhcd",
        syntax="proto3",
        message_type=[
            _message("HealthCheckRequest", ("args", 1, text)),
            _message(
                "HealthCheckResponse",
                ("success", 1, flag),
                ("exit_code", 2, whole),
                ("output", 3, text),
                ("error", 4, text),
            ),
        ],
    )
    found = message_factory.GetMessages([file], pool=descriptor_pool.DescriptorPool())
    return found["nvhcd.HealthCheckRequest"], found["nvhcd.HealthCheckResponse"]


REQUEST, RESPONSE = _schema()


def _frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 (RFC 9113, 4.1)."""
    head = struct.pack(">I", len(body))[1:] + bytes((kind, flags)) + struct.pack(">I", stream)
    return head + body


def _literal(name: str, value: str) -> bytes:
    """Return a header that is in no table (RFC 7541, 6.2.2)."""
    return b"\x00" + b"".join(bytes((len(each),)) + each.encode() for each in (name, value))


_HEADERS = b"".join(
    _literal(name, value)
    for name, value in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", f"/{serve.SERVICE}/{serve.CALL}"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    )
)
_SETTINGS, _HEADERS_FRAME, _END_HEADERS, _PING = 4, 1, 4, 6
_PING_SEEN = b"\x00\x00\x08\x06\x01"
CALLS_THAT_NEVER_END = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"".join(
    (
        _frame(_SETTINGS, 0, 0),
        *(_frame(_HEADERS_FRAME, _END_HEADERS, 2 * each + 1, _HEADERS) for each in range(32)),
        _frame(_PING, 0, 0, bytes(8)),  # its answer says that all before it was read
    )
)


# A connection of its own for each channel of this process.
_OWN = [("grpc.use_local_subchannel_pool", 1)]


class Service:
    """A server of this node's health, and what its checks look for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.socket = directory / "health.sock"
        self.broken = directory / "broken"
        self.environ: dict[str, str] = {}
        self.config("")

    def config(self, more: str) -> None:
        table = f"[checks.scratch]\ncheck='file'\npath='{self.broken}'\nexists=false\n"
        self.file = write_site(self.directory / "etc", table + more)

    def words(self, *more: str) -> list[str]:
        config = f"--config={self.file}"
        return ["healthcheck", config, "--serve", str(self.socket), *more]

    @contextlib.contextmanager
    def running(self, *more: str) -> Iterator[subprocess.Popen[str]]:
        process = start(*self.words(*more), environ=self.environ)
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert "answers at" in said, said + process.stderr.read()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            finish(process)

    def ask(self, *arguments: str) -> Response:
        with grpc.insecure_channel(f"unix://{self.socket}") as channel:
            call = channel.unary_unary(
                f"/{serve.SERVICE}/{serve.CALL}",
                request_serializer=REQUEST.SerializeToString,
                response_deserializer=RESPONSE.FromString,
            )
            return call(REQUEST(args=arguments), timeout=DEADLINE_S)

    def refused(self) -> str:
        """Ask where there is no answer; why."""
        with pytest.raises(grpc.RpcError) as caught:
            self.ask()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return str(caught.value.details())


@pytest.fixture
def service(tmp_path: Path) -> Service:
    # A path that pytest makes can be longer than a socket's may be.
    return Service(tmp_path)


def test_a_node_without_a_proven_fault_is_told_to_be_well(service: Service) -> None:
    with service.running():
        told = service.ask("--no-slurm", "--group", "prolog")
    assert (told.success, told.exit_code, told.error) == (True, 0, "")
    output = json.loads(told.output)
    assert (output["fail_count"], output["failed_checks"]) == (0, [])
    assert output["checks"] == 1


def test_a_proven_fault_is_told_with_its_check_and_reason(service: Service) -> None:
    service.broken.touch()
    with service.running() as process:
        told = service.ask()
    assert (told.success, told.exit_code) == (False, 1)
    output = json.loads(told.output)
    assert output["fail_count"] == 1
    assert output["failed_checks"] == [f"scratch: {service.broken} exists"]
    assert told.error == f"scratch: {service.broken} exists"
    assert process.returncode == 0


def test_a_check_that_cannot_be_measured_is_no_failure(service: Service) -> None:
    service.config("[checks.gone]\ncheck='command'\nargv=['/nowhere']\n")
    with service.running():
        told = service.ask()
    assert (told.success, told.exit_code) == (True, 3)
    output = json.loads(told.output)
    assert output["fail_count"] == 0
    assert output["inconclusive"][0].startswith("gone: ")


def test_a_check_in_shadow_keeps_no_node_out(service: Service) -> None:
    table = service.file.read_text()
    service.file.write_text(f"{table}shadow = true\n")
    service.broken.touch()
    with service.running():
        assert service.ask().success


def test_an_answer_is_some_seconds_old_at_most(service: Service) -> None:
    with service.running():
        assert service.ask().success
        service.broken.touch()
        began_s = time.monotonic()
        while service.ask().success:
            assert time.monotonic() - began_s < DEADLINE_S
            time.sleep(0.1)


def test_who_asks_in_a_loop_has_the_node_checked_every_few_seconds(service: Service) -> None:
    ran = service.directory / "ran"
    argv = f"argv=['sh', '-c', 'echo ran >> {ran}']"
    service.config(f"[checks.counted]\ncheck='command'\n{argv}\n")
    with service.running():
        began_s, asked = time.monotonic(), 0
        while asked < 10 or time.monotonic() - began_s < 3:
            assert service.ask().success
            asked += 1
        elapsed_s = time.monotonic() - began_s
    assert len(ran.read_text().splitlines()) <= 1 + elapsed_s / 5


def test_eighty_who_wait_keep_nobody_from_an_answer(service: Service) -> None:
    go_on = service.directory / "go-on"
    argv = f"argv=['sh', '-c', 'while [ ! -e {go_on} ]; do sleep 0.1; done']"
    service.config(f"[checks.slow]\ncheck='command'\ntime_limit_s=60\n{argv}\n")
    with service.running(), contextlib.ExitStack() as stack:
        held = []
        for _ in range(80):
            channel = stack.enter_context(
                grpc.insecure_channel(f"unix://{service.socket}", options=_OWN)
            )
            grpc.channel_ready_future(channel).result(DEADLINE_S)
            call = channel.unary_unary(f"/{serve.SERVICE}/{serve.CALL}")
            held.append(call.future(b"", timeout=DEADLINE_S))
        with ThreadPoolExecutor(1) as another:
            told = another.submit(service.ask)
            go_on.touch()
            assert told.result(DEADLINE_S).success
        assert all(RESPONSE.FromString(each.result(DEADLINE_S)).success for each in held)


@pytest.mark.root
def test_however_much_one_user_holds_others_are_answered() -> None:
    with tempfile.TemporaryDirectory(prefix="s") as place, contextlib.ExitStack() as stack:
        Path(place).chmod(0o755)  # others do not reach what pytest makes
        service = Service(Path(place))
        go_on = service.directory / "go-on"
        argv = f"argv=['sh', '-c', 'while [ ! -e {go_on} ]; do sleep 0.1; done']"
        service.config(f"[checks.slow]\ncheck='command'\ntime_limit_s=60\n{argv}\n")
        with service.running():
            for _ in range(80):
                held = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                os.seteuid(NOBODY)
                try:
                    held.connect(str(service.socket))
                    with contextlib.suppress(OSError):  # it was sent away
                        held.sendall(CALLS_THAT_NEVER_END)
                        heard = b""
                        while _PING_SEEN not in heard and (piece := held.recv(4096)):
                            heard += piece
                finally:
                    os.seteuid(0)
            with ThreadPoolExecutor(1) as another:
                told = another.submit(service.ask)
                go_on.touch()
                assert told.result(DEADLINE_S).success


def test_many_who_ask_at_once_are_all_answered_by_few_runs(service: Service) -> None:
    ran = service.directory / "ran"
    argv = f"argv=['sh', '-c', 'echo ran >> {ran}']"
    service.config(f"[checks.counted]\ncheck='command'\n{argv}\n")
    with service.running():
        for _ in range(10):  # with eight calls of a connection, gRPC refused one in a hundred
            with grpc.insecure_channel(f"unix://{service.socket}", options=_OWN) as channel:
                call = channel.unary_unary(f"/{serve.SERVICE}/{serve.CALL}")
                asked = [call.future(b"", timeout=DEADLINE_S) for _ in range(30)]
                told = [RESPONSE.FromString(each.result(DEADLINE_S)) for each in asked]
            assert all(each.success for each in told)
    assert len(ran.read_text().splitlines()) < 150


def test_a_mistake_in_the_sites_file_is_no_answer_and_said(service: Service) -> None:
    with service.running() as process:
        service.config("[checks.bad]\ncheck='memory'\nmin_free=1\n")
        why = service.refused()
        assert "config.toml:7: min_free" in why
        process.send_signal(signal.SIGTERM)
        assert "no answer: " in finish(process).stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_server_that_is_ended_leaves_nothing(
    service: Service, number: signal.Signals, code: int
) -> None:
    with service.running() as process:
        process.send_signal(number)
        done = finish(process)
    assert (done.code, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    assert [each.name for each in service.directory.iterdir()] == ["etc"]


def test_a_server_that_is_ended_while_it_checks_lets_go_of_who_waits(service: Service) -> None:
    began = service.directory / "began"
    argv = f"argv=['sh', '-c', 'touch {began}; sleep 30']"
    service.config(f"[checks.slow]\ncheck='command'\n{argv}\ntime_limit_s=20\n")
    with service.running() as process, ThreadPoolExecutor(1) as client:
        refused = client.submit(service.refused)
        while not began.exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        refused.result(DEADLINE_S)
    assert done.code == 0
    assert not service.socket.exists()


def test_without_grpcio_the_extra_is_named(service: Service, tmp_path: Path) -> None:
    # Stands before the installed one and cannot be loaded, as one that is not there.
    (tmp_path / "grpc.py").write_text("raise ImportError('no grpc here')\n")
    done = slurm_health(*service.words(), environ={"PYTHONPATH": str(tmp_path)})
    assert done.code == 2
    assert "pip install 'slurm-health[serve]'" in done.stderr


@pytest.mark.parametrize("act", [False, True])
def test_the_node_is_drained_only_where_the_server_was_told_to_act(
    service: Service, slurm: FakeScontrol, shared: Path, act: bool
) -> None:
    hooks = f"[hooks]\ndrain = true\nstate = '{service.directory}/state'\nslurm_limit_s = 2\n"
    service.config(f"{hooks}[breaker]\ndirectory = '{shared}'\nspread_s = 0\n")
    service.broken.touch()
    service.environ = {"PATH": slurm.path, "SLURMD_NODENAME": "n3"}
    with service.running(*["--act"] * act):
        assert json.loads(service.ask().output)["fail_count"] == 1
    state, reason = slurm.nodes()["n3"]
    assert state == ("IDLE+DRAIN" if act else "IDLE")
    assert ("scratch" in reason) == act


def result(name: str, status: Status, *, shadow: bool = False) -> CheckResult:
    return CheckResult(name=name, finding=Finding(status=status, text="why"), shadow=shadow)


@pytest.mark.parametrize("status", Status)
def test_only_a_proven_fault_of_the_node_is_a_failure(status: Status) -> None:
    told = serve.answer([result("a", Status.PASS), result("b", status)], node="n1")
    assert told.healthy == (status is not Status.NODE_FAULT)
    assert told.fail_count == len(told.failed_checks) == (status is Status.NODE_FAULT)
    assert told.inconclusive == (["b: why"] if status is Status.INCONCLUSIVE else [])
    assert told.exit_code == {Status.NODE_FAULT: 1, Status.INCONCLUSIVE: 3}.get(status, 0)


@given(
    success=st.booleans(),
    exit_code=st.integers(min_value=0, max_value=2**31 - 1),
    output=st.text(),
    error=st.text(),
)
def test_a_response_is_what_protobuf_reads(
    success: bool, exit_code: int, output: str, error: str
) -> None:
    data = serve.response(success=success, exit_code=exit_code, output=output, error=error)
    read = RESPONSE.FromString(data)
    assert (read.success, read.exit_code) == (success, exit_code)
    assert read.output == output
    assert read.error == error
    assert read.SerializeToString() == data

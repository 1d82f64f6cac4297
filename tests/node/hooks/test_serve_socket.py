# SPDX-License-Identifier: Apache-2.0
"""The socket that serving binds: whose it is, who can use it, and when it is refused."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from tests.node.hooks.test_serve import Service
from tests.support.command_line import Done, finish, slurm_health


@pytest.fixture
def service(tmp_path: Path) -> Service:
    # A path that pytest makes can be longer than a socket's may be.
    return Service(tmp_path)


def test_the_socket_can_be_used_by_every_user_from_the_moment_it_is_there(
    service: Service,
) -> None:
    with service.running():
        assert stat.S_IMODE(service.socket.stat().st_mode) == 0o666


def test_a_second_server_on_the_same_socket_is_refused_and_the_first_goes_on(
    service: Service,
) -> None:
    with service.running():
        done = slurm_health(*service.words())
        assert done.code == 2
        assert f"cannot serve at {service.socket}: another server answers there" in done.stderr
        assert service.ask().success


def test_a_socket_that_a_killed_server_left_is_taken_over(service: Service) -> None:
    with service.running() as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert service.socket.is_socket()
    with service.running():
        assert service.ask().success


def test_a_server_does_not_remove_the_socket_of_another(service: Service) -> None:
    with service.running() as process:
        service.socket.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(service.socket))
        process.send_signal(signal.SIGTERM)
        assert finish(process).code == 0
    assert service.socket.is_socket()
    other.close()


def test_who_locks_the_sockets_directory_keeps_no_server_from_its_start(service: Service) -> None:
    directory = os.open(service.directory, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with service.running():
        assert service.ask().success
    os.close(directory)


def test_a_server_whose_queue_is_full_answers_at_its_socket(service: Service) -> None:
    with socket.socket(socket.AF_UNIX) as other, contextlib.ExitStack() as waiting:
        other.bind(str(service.socket))
        other.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                caller = waiting.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(service.socket))
        assert "another server answers there" in _refusal(service)


def _refusal(service: Service, *more: str) -> str:
    done: Done = slurm_health(*service.words(*more))
    assert done.code == 2
    assert len(done.stderr.splitlines()) == 1
    return done.stderr


def test_a_file_in_the_place_of_the_socket_is_left_alone(service: Service) -> None:
    service.socket.write_text("a file of somebody's")
    assert "something else is there" in _refusal(service)
    assert service.socket.read_text() == "a file of somebody's"


def test_a_directory_that_is_not_there_is_said(service: Service) -> None:
    service.socket = service.directory / "no" / "s"  # short: the test's directory may be deep
    assert "No such file or directory" in _refusal(service)


def test_a_path_that_is_too_long_for_a_socket_is_said(service: Service) -> None:
    service.socket = service.directory / ("s" * 100)
    assert "longer than 95 bytes" in _refusal(service)


def test_what_serving_does_not_print_is_refused(service: Service) -> None:
    assert "leave out" in _refusal(service, "--json")
    assert "leave out" in _refusal(service, "--explain")


def test_a_mistake_in_the_sites_file_is_told_when_the_server_starts(service: Service) -> None:
    service.config("[checks.bad]\ncheck='memory'\nmin_free=1\n")
    assert "min_free" in _refusal(service)

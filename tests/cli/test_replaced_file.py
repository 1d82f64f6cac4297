# SPDX-License-Identifier: Apache-2.0
"""A file that a person has named for a page: whole at any time, and never through others' links."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from slurm_health.cli.replaced_file import write_named


def test_who_has_the_old_page_open_keeps_it_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_bytes(b"the old page")
    page.chmod(0o640)

    with page.open("rb") as reader:
        write_named(page, b"the new one")
        assert reader.read() == b"the old page"

    assert page.read_bytes() == b"the new one"
    assert stat.S_IMODE(page.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [page]


def test_a_link_of_ones_own_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to("pages/12.html")

    for text in (b"first", b"second"):
        write_named(link, text)
        assert (tmp_path / "pages" / "12.html").read_bytes() == text
    assert link.is_symlink()


@pytest.mark.root
def test_a_link_that_another_has_laid_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    link = tmp_path / "page.html"
    link.symlink_to(precious)
    os.chown(link, 1, 1, follow_symlinks=False)

    write_named(link, b"page")

    assert precious.read_bytes() == b"precious"
    assert link.read_bytes() == b"page"
    assert not link.is_symlink()


@pytest.mark.root
def test_a_pipe_that_another_has_laid_is_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page.html")
    os.chown(tmp_path / "page.html", 1, 1)

    with pytest.raises(PermissionError, match="it is of user 1"):
        write_named(tmp_path / "page.html", b"page")


def test_a_pipe_is_written_to_as_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()

    write_named(pipe, b"page")

    reader.join()
    assert read == [b"page"]
    assert pipe.is_fifo()

# SPDX-License-Identifier: Apache-2.0
"""Accounting for a lab: a MariaDB of its own that only this machine reaches, and slurmdbd."""

import shutil
import subprocess
from pathlib import Path

from . import daemons
from .layout import CONTROLLER, CONTROLLER_ADDRESS, LabSpec

# Where slurmdbd looks for a database on its own host.
_SOCKET = Path("/run/mysqld/mysqld.sock")
_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
_PORT = 6819


def slurmdbd_conf(spec: LabSpec) -> str:
    """The lab's slurmdbd.conf."""
    return f"""\
AuthType=auth/munge
DbdHost={CONTROLLER}
DbdPort={_PORT}
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageUser=root
StorageLoc=slurm_acct_db
LogFile={spec.paths.log}/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
"""


def start(spec: LabSpec) -> None:
    """Start both in the namespaces of the calling process; slurmdbd answers when this returns."""
    conf = spec.paths.etc / "slurm/slurmdbd.conf"
    conf.write_text(slurmdbd_conf(spec))
    conf.chmod(0o600)
    shutil.chown(conf, "slurm")
    _start_database(spec.paths.root / "database", spec.paths.log / "mariadb.log")
    daemons.run(["slurmdbd"])
    daemons.await_answer((CONTROLLER_ADDRESS, _PORT), "slurmdbd")
    daemons.run(["sacctmgr", "--immediate", "add", "cluster", "lab"])


def _start_database(data: Path, log: Path) -> None:
    data.mkdir()
    shutil.chown(data, "slurm")
    _SOCKET.parent.mkdir()
    shutil.chown(_SOCKET.parent, "slurm")
    options = ["--no-defaults", f"--datadir={data}", "--user=slurm", "--skip-grant-tables"]
    options += ["--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M"]
    # What mariadb-install-db does, which needs the client's package too.
    tables = "create database mysql;\nuse mysql;\n" + _TABLES.read_text()
    daemons.run(["mariadbd", *options, "--bootstrap"], stdin=tables)
    argv = ["mariadbd", *options, f"--socket={_SOCKET}", "--skip-networking"]
    with log.open("wb") as file:
        subprocess.Popen(
            argv,
            env=daemons.ENVIRONMENT,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    daemons.await_answer(str(_SOCKET), "MariaDB")

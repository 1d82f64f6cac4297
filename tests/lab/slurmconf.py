# SPDX-License-Identifier: Apache-2.0
"""The texts of a lab's configuration files; pure."""

from .layout import (
    CONTROLLER,
    CONTROLLER_ADDRESS,
    SLURMCTLD_PORT,
    SLURMD_PORT,
    SRUN_PORTS,
    USERS,
    LabSpec,
)

_CAN_DISABLE_CGROUPS = (23, 2)


def _settings(spec: LabSpec) -> dict[str, str]:
    root = spec.paths.root
    return {
        "ClusterName": "lab",
        "SlurmctldHost": f"{CONTROLLER}({CONTROLLER_ADDRESS})",
        "SlurmUser": "slurm",
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": str(SLURMD_PORT),
        "SrunPortRange": f"{SRUN_PORTS[0]}-{SRUN_PORTS[1]}",
        "AuthType": "auth/munge",
        "MpiDefault": "none",
        # Neither needs cgroups, whose version and layout differ between machines.
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        # Nodes may claim more than the machine has.
        "SlurmdParameters": "config_overrides",
        "ReturnToService": "2",
        "JobRequeue": "1",
        "InactiveLimit": "0",
        "KillWait": "5",
        "MinJobAge": "300",
        "SlurmctldTimeout": "60",
        "SlurmdTimeout": "300",  # Slurm's own; a slow machine takes no node away in less
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,"
        "bf_interval=1",
        "MailProg": "/bin/true",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool/%n",
        "SlurmctldPidFile": "/run/slurm/slurmctld.pid",
        "SlurmdPidFile": "/run/slurm/slurmd-%n.pid",
        "SlurmctldLogFile": f"{root}/log/slurmctld.log",
        "SlurmdLogFile": f"{root}/log/%n.log",
    }


def slurm_conf(spec: LabSpec) -> str:
    """The lab's slurm.conf.

    A line of `slurm_conf_extra` replaces the lab's own setting of that name; others are put
    before the node lines, so that `NodeName=DEFAULT Feature=x` works.
    """
    settings = _settings(spec)
    if spec.accounting:
        settings["AccountingStorageType"] = "accounting_storage/slurmdbd"
        settings["AccountingStorageHost"] = CONTROLLER
    if spec.gpus:
        settings["GresTypes"] = "gpu"
    if spec.topology_conf:
        settings["TopologyPlugin"] = "topology/tree"
    by_lower_name = {name.lower(): name for name in settings}
    added = []
    for line in spec.slurm_conf_extra.splitlines():
        name, _, value = line.strip().partition("=")
        own_name = by_lower_name.get(name.strip().lower())
        if own_name is None:
            added.append(line.strip())
        else:
            settings[own_name] = value.strip()
    lines = [f"{name}={value}" for name, value in settings.items()] + added
    has = f"CPUs={spec.cpus} RealMemory={spec.memory_mb}"
    has += f" Gres=gpu:{spec.gpus}" if spec.gpus else ""
    # One line: every command of Slurm reads all, and a thousand take it 90 ms.
    span = f"[1-{len(spec.nodes)}]" if spec.nodes[1:] else "1"
    lines.append(f"NodeName=n{span} NodeAddr=10.77.1.{span} {has} State=UNKNOWN")
    lines.append("PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def gres_conf(spec: LabSpec) -> str:
    """The lab's gres.conf: what was asked for, or a file for each played GPU; empty for neither."""
    if spec.gpus:
        return f"Name=gpu File=/dev/nvidia[0-{spec.gpus - 1}]\n"
    return spec.gres_conf


def cgroup_conf(version: tuple[int, int]) -> str:
    """The lab's cgroup.conf: Slurm must find nothing to do with cgroups.

    Older releases cannot be told so; version 1 named outright at least keeps them from looking
    for systemd on machines with version 2.
    """
    plugin = "disabled" if version >= _CAN_DISABLE_CGROUPS else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def hosts(spec: LabSpec) -> str:
    lines = ["127.0.0.1 localhost", f"{CONTROLLER_ADDRESS} {CONTROLLER}"]
    lines += [f"{spec.address(node)} {node}" for node in spec.nodes]
    return "\n".join(lines) + "\n"


def passwd(spec: LabSpec, machine_passwd: str) -> str:
    """The machine's users and the lab's; root gets a home that disappears with the lab."""
    kept = []
    for line in machine_passwd.splitlines():
        fields = line.split(":")
        if fields[0] in USERS or len(fields) != 7:
            continue
        if fields[0] == "root":
            fields[5] = str(spec.paths.home("root"))
        kept.append(":".join(fields))
    kept += [
        f"{user}:x:{uid}:{uid}:{user}:{spec.paths.home(user)}:/bin/bash"
        for user, uid in USERS.items()
    ]
    return "\n".join(kept) + "\n"


def group(machine_group: str) -> str:
    """The machine's groups, and one for each user of the lab."""
    kept = [line for line in machine_group.splitlines() if line.split(":")[0] not in USERS]
    kept += [f"{user}:x:{uid}:" for user, uid in USERS.items()]
    return "\n".join(kept) + "\n"

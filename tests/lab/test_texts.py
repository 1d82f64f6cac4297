# SPDX-License-Identifier: Apache-2.0
"""What the lab writes and reads as text; needs neither root nor Slurm."""

import re

import pytest

from . import network
from .cgroups import CpuController, find_cpu_controller
from .errors import LabError
from .layout import LabSpec
from .network_faults import drop_rules
from .records import parse_record
from .slurmconf import hosts, passwd, slurm_conf
from .watcher import is_agent, is_worker

SPEC = LabSpec(name="x", nodes=("n1", "n2"))


def test_extra_line_replaces_the_labs_own_setting() -> None:
    conf = slurm_conf(LabSpec(name="x", nodes=("n1",), slurm_conf_extra="killwait = 9\n"))
    assert re.findall(r"(?im)^killwait=.*$", conf) == ["KillWait=9"]


def test_a_second_controller_is_the_backup() -> None:
    conf = slurm_conf(
        LabSpec(name="x", nodes=("n1",), slurm_conf_extra="SlurmctldHost=n1(10.77.1.1)")
    )
    found = re.findall(r"(?m)^SlurmctldHost=(.*)$", conf)
    assert found == ["ctl(10.77.0.1)", "n1(10.77.1.1)"]


def test_other_extra_lines_precede_the_nodes() -> None:
    extra = "NodeName=DEFAULT Feature=fast"
    conf = slurm_conf(LabSpec(name="x", nodes=("n1",), slurm_conf_extra=extra))
    assert conf.index(extra) < conf.index("NodeName=n1 ")


def test_every_node_has_an_address_of_its_own() -> None:
    spec = LabSpec(name="x", nodes=tuple(f"n{i}" for i in range(1000)))
    addresses = [line.split()[0] for line in hosts(spec).splitlines()]
    assert len(addresses) == len(set(addresses)) == 1002


def test_nodes_that_follow_one_another_share_a_line() -> None:
    many = slurm_conf(LabSpec(name="x", nodes=tuple(f"n{i + 1}" for i in range(301))))
    found = re.findall(r"(?m)^NodeName=(\S+) NodeAddr=(\S+)", many)
    assert found == [("n[1-250]", "10.77.1.[1-250]"), ("n[251-301]", "10.77.2.[1-51]")]

    odd = slurm_conf(LabSpec(name="x", nodes=("n1", "gpu", "n2", "n4")))
    found = re.findall(r"(?m)^NodeName=(\S+) NodeAddr=(\S+)", odd)
    assert found == [
        ("n1", "10.77.1.1"),
        ("gpu", "10.77.1.2"),
        ("n2", "10.77.1.3"),
        ("n4", "10.77.1.4"),
    ]


def test_a_large_lab_needs_no_room_in_the_machines_table_of_neighbours() -> None:
    spec = LabSpec(name="x", nodes=tuple(f"n{i}" for i in range(1000)))
    ports = [network.port(spec, node, holder=7) for node in spec.nodes]
    known = [words[2:5:2] for lines in ports for words in map(str.split, lines) if "neigh" in words]
    macs = [lines[0].split()[9] for lines in ports]

    assert known == [list(pair) for pair in zip(map(spec.address, spec.nodes), macs, strict=True)]
    assert len(set(macs)) == 1000
    link = network.link(spec, "n7")
    assert f"addr add {spec.address('n7')}/32 dev eth0" in link
    (controller,) = [line for line in link if line.startswith("neigh")]
    assert controller.endswith("permanent")
    assert controller.split()[4] in network.bridge(spec)[1]


def test_nodes_of_a_small_lab_reach_one_another_by_themselves() -> None:
    lines = [*network.bridge(SPEC), *network.port(SPEC, "n1", holder=7), *network.link(SPEC, "n1")]
    assert not [line for line in lines if "neigh" in line or "route" in line]


def test_lab_users_replace_machine_users_of_that_name() -> None:
    machine = "root:x:0:0:root:/root:/bin/sh\nalice:x:7:7::/elsewhere:/bin/sh\n"
    lines = passwd(SPEC, machine).splitlines()
    assert lines[0] == "root:x:0:0:root:/var/lib/slurm-health-lab/x/home/root:/bin/sh"
    assert [line for line in lines if line.startswith("alice:")] == [
        "alice:x:4242:4242:alice:/var/lib/slurm-health-lab/x/home/alice:/bin/bash"
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "../etc", "nodes": ("n1",)},
        {"name": "x", "nodes": ()},
        {"name": "x", "nodes": ("n1", "n1")},
        {"name": "x", "nodes": ("n1 ",)},
    ],
)
def test_impossible_lab_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(LabError):
        LabSpec(**fields)  # type: ignore[arg-type]


def test_record_keeps_values_with_spaces_and_our_reasons_whole() -> None:
    line = "NodeName=n1 OS=Linux 6.1 #1 SMP State=IDLE+DRAIN Reason=slurm-health: check=a [root@x]"
    assert parse_record(line) == {
        "NodeName": "n1",
        "OS": "Linux 6.1 #1 SMP",
        "State": "IDLE+DRAIN",
        "Reason": "slurm-health: check=a [root@x]",
    }


@pytest.mark.parametrize(
    ("line", "agent"),
    [
        ("/usr/bin/python3 -P -m slurm_health agent --journal /x", True),
        ("python /opt/bin/slurm-health agent", True),
        ("srun -n2 python3 -m slurm_health agent", False),
        ("bash -c exec python3 -m slurm_health agent", False),
        ("python3 -m slurm_health report agent.json", False),
        ("python3 agent -m slurm_health", False),
    ],
)
def test_agent_is_told_from_what_starts_it(line: str, agent: bool) -> None:
    assert is_agent(line.split()) is agent


@pytest.mark.parametrize(
    ("line", "worker"),
    [
        ("python3 -m slurm_health.preflight.probes.worker", True),
        ("/x/python3.11 -u /x/slurm_health/preflight/probes/worker.py --rank 0", True),
        ("srun python3 -m slurm_health.preflight.probes.worker", False),
        ("python3 -m slurm_health agent", False),
    ],
)
def test_worker_is_recognised(line: str, worker: bool) -> None:
    assert is_worker(line.split()) is worker


def test_drop_spares_slurm_unless_told_otherwise() -> None:
    assert "RETURN" in drop_rules(1.0, everything=False)
    assert "RETURN" not in drop_rules(1.0, everything=True)
    assert "--probability 0.25" in drop_rules(0.25, everything=False)


def test_version_1_cpu_controller_is_preferred_where_both_exist() -> None:
    mounts = (
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    )
    found = find_cpu_controller(mounts)
    assert isinstance(found, CpuController)
    assert (str(found.mount), found.unified) == ("/sys/fs/cgroup/cpu,cpuacct", False)

# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the parts about the cluster: its release of Slurm, and its size.

Which release brought what is from Slurm's own CHANGELOG and slurm.conf(5).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from slurm_health.node.doctor.advice import Advice, fine, look
from slurm_health.records.text import whole_number

Release = tuple[int, int]

# Slurm's default for AuthInfo=cred_expire, which is how long a requeued job waits.
CRED_EXPIRE_S = 120
# And for HealthCheckTimeout, which earlier releases always keep to.
HEALTH_CHECK_LIMIT_S = 60
# And for SlurmdTimeout, of which a third lies between two pings of a node.
_SLURMD_TIMEOUT_S = 300
_PINGS = 20
REQUEUE_DELAY: Release = (25, 11)
_HEALTH_CHECK_TIMEOUT: Release = (26, 5)
_REQUEUE_DELAY_S = 5
_EXPIRE = re.compile(r"\bcred_expire=(\d{1,9})")
_DELAY = re.compile(r"(?:^|,)requeue_delay=(\d{1,9})")
_VERSION = re.compile(r"(\d{1,3})\.(\d{1,2})")
# What an upgrade would give, by the release that brought it.
_GAINS: dict[Release, str] = {
    (23, 2): "PrologFlags=ForceRequeueOnFail: jobs with --no-requeue also leave a bad node",
    (25, 5): "PrologTimeout and EpilogTimeout: a limit for each",
    REQUEUE_DELAY: "SchedulerParameters=requeue_delay: a job whose prolog fails starts elsewhere"
    " within seconds; and sbatch --requeue=expedite",
    _HEALTH_CHECK_TIMEOUT: "HealthCheckTimeout: health checks that may take more than a minute",
}
# From slurm.conf(5): the square root of the number of nodes is best for the width of the tree, and
# for more nodes than this the cube root, with which a message arrives in three hops.
_SQUARE_ROOT_NODES = 2500
_MOST_HOPS = 3
# A check launches its agents once, twice more where nodes are lost, and each restart of a script
# comes with a check.
_FEW_STEPS = 1000
# Seen of srun (22.05): 24 nodes with 58 open files, and not 16 with 40. The rest is for those that
# it inherits.
_FILES_PER_NODE, _MORE_FILES = 2, 64


def release_of(config: Mapping[str, str]) -> Release | None:
    """Return the release of Slurm, (25, 11) for 25.11.2; None where it does not tell."""
    found = _VERSION.match(config.get("SLURM_VERSION", ""))
    return (int(found[1]), int(found[2])) if found else None


def cred_expire_s(config: Mapping[str, str]) -> int | None:
    """Return how long a job's credential is good for, None where the site leaves it to Slurm."""
    found = _EXPIRE.search(config.get("AuthInfo", ""))
    return int(found[1]) if found else None


def requeue_wait_s(config: Mapping[str, str]) -> int:
    """Return how long Slurm lets a requeued job wait before it may start again."""
    expire_s = cred_expire_s(config)
    wait_s = CRED_EXPIRE_S if expire_s is None else expire_s
    delay = _DELAY.search(config.get("SchedulerParameters", ""))
    release = release_of(config)
    if delay and release is not None and release >= REQUEUE_DELAY:
        return int(delay[1])
    return wait_s


def wait(config: Mapping[str, str]) -> list[Advice]:
    """Return what is to be said of how long a job waits whose prolog has failed.

    Args:
        config: the fields of `scontrol show config`.
    """
    wait_s, release = requeue_wait_s(config), release_of(config)
    parameters = [each for each in config.get("SchedulerParameters", "").split(",") if each]
    delay = _DELAY.search(config.get("SchedulerParameters", ""))
    has_delay = release is not None and release >= REQUEUE_DELAY
    said = f"a job whose prolog fails starts elsewhere, after {wait_s} s"
    if delay and not has_delay:
        what = "this release of Slurm" if release is None else f"Slurm {_name(release)}"
        text = f"SchedulerParameters has requeue_delay={delay[1]}, which {what} does not know"
        return [look(f"{text}: {said}", "nothing; from 25.11 on it counts")]
    if has_delay and not delay:
        wanted = ",".join([*parameters, f"requeue_delay={_REQUEUE_DELAY_S}"])
        return [look(f"{said}: requeue_delay is not set", f"SchedulerParameters={wanted}")]
    if wait_s > CRED_EXPIRE_S:
        mend = "a shorter one, longer than any prolog takes"
        name = "requeue_delay" if delay else "AuthInfo has cred_expire"
        return [look(f"{name}={wait_s}: a job whose prolog fails waits so many seconds", mend)]
    return [fine(said)]


def failover(config: Mapping[str, str]) -> list[Advice]:
    """Return what becomes of a job whose prolog ends while no slurmctld answers; nothing of one.

    By the source of 22.05 and of 26.05: slurmd tells it again for one and a half SlurmctldTimeout,
    and takes the refusal of a backup that has not taken over yet for an answer. Slurm looks for
    batch jobs that have not started when a node registers, at every twentieth ping at the latest.
    """
    hosts = [name for name in config if name.startswith("SlurmctldHost")]
    if len(hosts) < 2 or "deferbatch" not in config.get("PrologFlags", "").lower():
        return []
    number = re.match(r"\d{1,9}", config.get("SlurmdTimeout", ""))
    timeout_s = (whole_number(number[0]) if number else None) or _SLURMD_TIMEOUT_S
    text = (
        f"{len(hosts)} SlurmctldHost: a job whose prolog ends while none has taken over stands"
        f" RUNNING without having started, for up to {_PINGS * timeout_s // 3 // 60} min"
    )
    # slurmctld shows a batch step from the allocation on: only the node knows.
    ask = "sstat -ai -j JOBID.batch"
    mend = f"after a failover: scontrol requeue of those of which {ask} shows no process"
    return [look(text, mend)]


def advise_on_release(config: Mapping[str, str]) -> list[Advice]:
    """Return what an upgrade of Slurm would give; nothing where its release is not known."""
    release = release_of(config)
    if release is None:
        return []
    newer = [f"{_name(since)} {what}" for since, what in _GAINS.items() if since > release]
    return [fine(f"Slurm {_name(release)}; newer ones bring: {'; '.join(newer)}")] if newer else []


def health_check_limit_s(config: Mapping[str, str]) -> int:
    """Return after how many seconds Slurm ends a health check."""
    number = re.match(r"\d{1,9}", config.get("HealthCheckTimeout", ""))
    return (whole_number(number[0]) if number else None) or HEALTH_CHECK_LIMIT_S


def _name(release: Release) -> str:
    return f"{release[0]}.{release[1]:02d}"


def advise_on_size(config: Mapping[str, str], nodes: int, open_files: float) -> list[Advice]:
    """Return what stands in the way of a step on all nodes of a cluster.

    Args:
        config: the fields of slurm.conf.
        nodes: how many there are.
        open_files: how many a process may have open here, at most.
    """
    found = [*_tree(config, nodes), *_steps(config), *_files(nodes, open_files)]
    return found or [fine(f"one step can run on all {nodes} nodes")]


def _tree(config: Mapping[str, str], nodes: int) -> Iterator[Advice]:
    width = whole_number(config.get("TreeWidth", ""))
    if not width or (hops := _hops(nodes, width)) <= _MOST_HOPS:
        return
    text = (
        f"TreeWidth={width}: a message to {nodes} nodes arrives after up to {hops} hops; a slurmd"
        " that hangs keeps it from all behind it, each time for MessageTimeout"
    )
    root = math.isqrt(nodes) if nodes <= _SQUARE_ROOT_NODES else round(nodes ** (1 / 3))
    yield look(text, f"TreeWidth={root + 1}")


def _hops(nodes: int, width: int) -> int:
    """Return in how many hops all are reached where each one passes it on to so many."""
    if width == 1:
        return nodes
    hops = reached = 0
    while reached < nodes:
        hops += 1
        reached += width**hops
    return hops


def _steps(config: Mapping[str, str]) -> Iterator[Advice]:
    limit = whole_number(config.get("MaxStepCount", ""))
    if limit is not None and limit < _FEW_STEPS:
        text = (
            f"MaxStepCount={limit}: a check takes up to three steps of its job, and each restart of"
            " a script another check, in addition to the script's own steps"
        )
        yield look(text, "MaxStepCount=40000, Slurm's default")


def _files(nodes: int, open_files: float) -> Iterator[Advice]:
    wanted = _FILES_PER_NODE * nodes + _MORE_FILES
    if open_files < wanted:
        text = (
            f"a process may have {open_files:.0f} files open on this machine: srun needs"
            f" {_FILES_PER_NODE} for each node of a step, and starts none on the nodes beyond"
        )
        yield look(text, f"LimitNOFILE={wanted} or more for slurmd, and as hard limit at login")

# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about releases of Slurm: what this one offers, and newer ones.

Which release brought what is from Slurm's own CHANGELOG and slurm.conf(5).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from slurm_health.node.doctor.advice import Advice, fine, look
from slurm_health.records.text import whole_number

Release = tuple[int, int]

# Slurm's default for AuthInfo=cred_expire, which is how long a requeued job waits.
CRED_EXPIRE_S = 120
# And for HealthCheckTimeout, which earlier releases always keep to.
HEALTH_CHECK_LIMIT_S = 60
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


def advise(config: Mapping[str, str]) -> list[Advice]:
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

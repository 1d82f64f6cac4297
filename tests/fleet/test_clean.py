# SPDX-License-Identifier: Apache-2.0

from slurm_health.fleet.clean import JobJournal, RunningJobs, choose
from tests.support.rows import rows

NOW_S = 1_700_000_000.0
DAY_S = 86400.0


@rows
def test_what_is_old_goes_unless_its_job_may_be_running(
    job: str, cluster: str, days_ago: float, older_than_days: float, why_it_stays: str | None
) -> None:
    own = [JobJournal(cluster, job, 10, NOW_S - days_ago * DAY_S)]

    go, stay = choose(
        own,
        RunningJobs("lab", frozenset({"7"})),
        local="local",
        now_s=NOW_S,
        older_than_s=older_than_days * DAY_S,
    )

    assert go == ([] if why_it_stays is not None else own)
    assert stay == ({why_it_stays: own} if why_it_stays else {})

# SPDX-License-Identifier: Apache-2.0
"""`slurm-health report` as it is printed for several jobs, and for jobs without a journal."""

import json
from pathlib import Path

from slurm_health.system import journal
from tests.support.command_line import Done, one_line, slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import write_healthy_run


def test_several_jobs_are_printed_one_after_the_other(tmp_path: Path) -> None:
    for job in ("4", "5"):
        write_healthy_run(tmp_path, job=job)

    both = slurm_health("report", "4", "5", f"--journal={tmp_path}")

    alone = [slurm_health("report", job, f"--journal={tmp_path}").stdout for job in ("4", "5")]
    assert (both.code, both.stderr) == (0, "")
    assert both.stdout == "\n".join(alone)
    assert [text.split()[:2] for text in alone] == [["Job", "4"], ["Job", "5"]]


def test_a_job_that_waits_is_no_error(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, [], state="PENDING", Reason="Resources")
    journal = f"--journal={tmp_path / 'journal'}"

    waits = slurm_health("report", "12", journal, environ=slurm.environ())
    unknown = slurm_health("report", "13", journal, environ=slurm.environ())
    programs = slurm_health("report", "12", "--json", journal, environ=slurm.environ())

    said = "Job 12: it is pending (Resources): its nodes are checked when it starts.\n"
    assert (waits.code, waits.stdout, waits.stderr) == (0, said, "")
    assert (unknown.code, unknown.stdout) == (4, "")
    assert "no journal of job 13" in unknown.stderr
    assert (programs.code, programs.stdout) == (4, "")


def test_a_job_of_another_cluster_than_the_named_one_is_not_shown(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, [], state="PENDING")
    write_healthy_run(tmp_path / "journal", cluster="alpha")

    def reported(cluster: str) -> Done:
        named = (f"--journal={tmp_path / 'journal'}", f"--cluster={cluster}")
        return slurm_health("report", "12", *named, environ=slurm.environ())

    other, here = reported("beta"), reported("lab")

    assert (other.code, other.stdout) == (4, "")
    assert "its cluster there is alpha, not beta: see --cluster=alpha." in one_line(other.stderr)
    assert "it is pending" in here.stdout
    assert reported("alpha").code == 0


def test_a_report_of_an_array_lists_tasks_without_a_journal_too(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13, array="12_1")
    directory = write_healthy_run(tmp_path, job=14, array="12_2").directory
    damaged = journal.path_of(directory, journal.MASTER)
    damaged.unlink()
    damaged.mkdir()
    (tmp_path / "lab" / "12_3").mkdir()
    write_healthy_run(tmp_path, job=15, array="12_4")
    asked = ("report", f"--journal={tmp_path}")

    text = slurm_health(*asked, "12").stdout.splitlines()
    listed = json.loads(slurm_health(*asked, "--json", "12").stdout)["jobs"]
    some = json.loads(slurm_health(*asked, "--json", "12_[4-9]").stdout)["jobs"]

    tasks = {task["job"]: task["found"] for task in listed}
    assert sorted(tasks) == ["12_1", "12_2", "12_3", "12_4"]
    assert "cannot be read: master.jsonl" in tasks["12_2"]
    assert tasks["12_3"] == "no journal"
    assert [task["job"] for task in some] == ["12_4", "12_[5-9]"]
    assert text[1].startswith("12_1 ")
    assert [line.split()[2:4] for line in text if line.startswith("12_3 ")] == [["no", "journal"]]


def test_without_a_job_the_latest_ones_are_listed(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13)
    environ = {"PATH": "/nonexistent"}

    listed = slurm_health("report", f"--journal={tmp_path}", environ=environ)
    exported = slurm_health("report", "--json", f"--journal={tmp_path}", environ=environ)

    assert (listed.code, exported.code) == (0, 0)
    missing = "obs that are pending may be missing: squeue not found"
    assert (missing in listed.stdout, listed.stderr) == (True, "")
    assert missing in one_line(exported.stderr)
    assert listed.stdout.splitlines()[1].startswith("13")
    assert [job["job"] for job in json.loads(exported.stdout)["jobs"]] == ["13"]


def test_without_jobs_it_says_where_it_looked(tmp_path: Path) -> None:
    slurm = FakeSlurm(tmp_path / "slurm").environ()
    for environ, more in (
        ({"PATH": "/nonexistent"}, "Slurm cannot be asked which are pending: squeue not found"),
        (slurm, "Slurm lists none that are pending"),
    ):
        root = tmp_path / "journal"
        done = slurm_health("report", "-n", "pretrain", f"--journal={root}", environ=environ)
        said = one_line(done.stdout)
        assert said.startswith(f"no jobs of yours called pretrain under {root}, and {more}")


def test_a_report_needs_no_place_to_write(tmp_path: Path) -> None:
    """As on a login node whose homes are mounted read-only."""
    home = tmp_path / "home"
    write_healthy_run(home / ".slurm-health" / "journal")
    before = sorted(home.rglob("*"))
    for path in (home, *home.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)

    environ = {"HOME": str(home), "SLURM_HEALTH_JOURNAL": "", "TMPDIR": "/nonexistent"}
    done = slurm_health("report", "12", environ=environ)

    assert (done.code, "healthy" in done.stdout) == (0, True), done
    assert sorted(home.rglob("*")) == before

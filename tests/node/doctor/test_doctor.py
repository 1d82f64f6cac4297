# SPDX-License-Identifier: Apache-2.0
"""What doctor says of a slurm.conf, of shims, of the site's file and of this machine."""

from __future__ import annotations

import compileall
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_health.cli import doctor
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.doctor import machine, mending, notices, slurm_conf
from slurm_health.node.doctor.advice import Advice, Report, Urgency, change, fine, look
from slurm_health.node.hooks.init_config import draft
from tests.node.checks.conftest import WELL
from tests.support.fake_scontrol import FakeScontrol
from tests.support.sites import load_site, tree, write_site
from tests.support.supervised import write_executable

GOOD = """\
HealthCheckInterval     = 300 sec
HealthCheckNodeState    = ANY
HealthCheckProgram      = {hook}
JobRequeue              = 1
Prolog                  = {hook}
Epilog                  = {hook}
PrologEpilogTimeout     = 65534
PrologFlags             = Alloc,DeferBatch
SchedulerParameters     = nohold_on_prolog_fail
"""
SHIM = """\
#!/bin/sh
python={python}
config={config}
slurm={slurm}
limit=50
PATH=$slurm:/usr/sbin
timeout "$limit" "$python" -I -m slurm_health.hooks prolog "$config"
"""


SIXTY = {"Prolog": 60, "Epilog": 60}


@pytest.fixture
def hook(tmp_path: Path) -> Path:
    """A shim, and an interpreter that finds its modules in one directory."""
    package = tmp_path / "opt/lib/slurm_health"
    package.mkdir(parents=True)
    (package / "hooks.py").write_text("")
    python = write_executable(tmp_path / "opt/python", f"#!/bin/sh\necho {tmp_path}/opt/lib\n")
    config = write_site(tmp_path / "etc", "[checks.memory]\n")
    slurm = FakeScontrol(tmp_path / "slurm").bin
    text = SHIM.format(python=python, config=config, slurm=slurm)
    return write_executable(tmp_path / "hook", text)


def levels(text: str) -> dict[str, list[str]]:
    return by_level(slurm_conf.advise(slurm_conf.read_config(text), None))


def by_level(advice: list[Advice]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {level.value: [] for level in Urgency}
    for each in advice:
        assert bool(each.do) == (each.level is not Urgency.FINE), each
        found[each.level.value].append(f"{each.text} | {each.do}")
    return found


def test_a_site_as_it_should_be_needs_nothing(hook: Path) -> None:
    found = levels(GOOD.format(hook=hook))
    assert found["change"] == found["look"] == []


@pytest.mark.parametrize(
    ("before", "after", "level", "said"),
    [
        ("Prolog                  = HOOK", "Prolog = /nowhere/p", "change", "is not there"),
        ("Prolog                  = HOOK", "Prolog = /zero\0byte", "change", "is not there"),
        ("Prolog                  = HOOK", "Prolog = (null)", "look", "Prolog is not set"),
        ("Prolog                  = HOOK", "Prolog = /bin/sh", "look", "no shim of slurm-health"),
        ("Epilog                  = HOOK", "Epilog[0] = /nowhere/*", "change", "matches nothing"),
        ("Epilog                  = HOOK", "Epilog = /etc/passwd", "change", "chmod 755"),
        ("Epilog                  = HOOK", "Epilog = /etc", "change", "is not a file"),
        ("HealthCheckProgram      = HOOK", "HealthCheckProgram = /x", "change", "is not there"),
        ("HealthCheckProgram      = HOOK", "HealthCheckProgram = /bin/sh", "look", "is no shim"),
        ("Alloc,DeferBatch", "Contain", "change", "| PrologFlags=Contain,Alloc,DeferBatch"),
        ("65534", "55", "change", "| PrologEpilogTimeout=60 or more"),
        ("JobRequeue              = 1", "JobRequeue = 0", "look", "not started elsewhere"),
        ("nohold_on_prolog_fail", "a=3", "look", "SchedulerParameters=a=3,nohold_on_prolog_fail"),
        ("300 sec", "0 sec", "look", "never runs"),
        ("= ANY", "= NONDRAINED_IDLE", "look", "never returned to service"),
        ("= ANY", "= ALLOC,MIXED", "look", "never returned to service"),
        ("= ANY", "= ALLOC,CYCLE", "look", "idle nodes are not checked"),
        ("= ANY", "= IDLE", "look", "what breaks under a job"),
        ("= ANY", "= START_ONLY", "look", "when slurmd starts, and then no more: a drained"),
        ("= ANY", "= REBOOT_ONLY", "look", "when the node has been rebooted, and then no more"),
        ("300 sec", "300 sec\nHealthCheckTimeout = 50 sec", "look", "| HealthCheckTimeout=60"),
        ("= ANY", "= CYCLE,ANY", "fine", "on nodes in state CYCLE,ANY"),
        ("JobRequeue", "AuthInfo = cred_expire=600\nJobRequeue", "look", "waits so many seconds"),
        ("JobRequeue", "AuthInfo = cred_expire=30\nJobRequeue", "look", "cred_expire=50 or more"),
    ],
)
def test_what_should_be_changed_is_said(
    hook: Path, before: str, after: str, level: str, said: str
) -> None:
    before = before.replace("HOOK", str(hook))
    good = GOOD.format(hook=hook)
    assert before in good
    assert any(said in text for text in levels(good.replace(before, after))[level])


def test_a_pattern_with_a_stray_file_is_found(tmp_path: Path, hook: Path) -> None:
    directory = tmp_path / "prolog.d"
    directory.mkdir()
    (directory / "README").write_text("")
    config = GOOD.format(hook=hook).replace(
        f"Prolog                  = {hook}", f"Prolog={directory}/*"
    )
    found = levels(config)
    assert any("README is not executable" in text for text in found["change"])
    assert any("is a pattern" in text for text in found["look"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("python=/nowhere/python", "python=/nowhere/python is not there: it checks nothing"),
        ("python=/zero\0byte", "byte is not there: it checks nothing"),
        ("config=/nowhere/config.toml", "config=/nowhere/config.toml is not there"),
        ("slurm=/nowhere/bin", "finds no scontrol in /nowhere/bin:/usr/sbin: its hook never"),
    ],
)
def test_a_shim_that_can_check_nothing_is_found(hook: Path, line: str, said: str) -> None:
    """Such a shim lets every job start, so nothing else would tell."""
    hook.write_text(f"{hook.read_text()}{line}\n")
    assert any(said in text for text in levels(GOOD.format(hook=hook))["change"])


def test_a_shim_whose_interpreter_has_no_slurm_health_is_found(hook: Path, tmp_path: Path) -> None:
    without = 'case "$*" in *import*slurm_health*) exit 1 ;; esac'
    write_executable(tmp_path / "opt/python", f"#!/bin/sh\n{without}\necho {tmp_path}/opt/lib\n")
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert f"python={tmp_path}/opt/python has no slurm_health: it checks nothing" in told


def test_a_shim_that_follows_another_file_than_doctor_reads_is_told(
    hook: Path, tmp_path: Path
) -> None:
    site = load_site(tmp_path / "other", "[checks.memory]\n")
    advice = slurm_conf.advise(slurm_conf.read_config(GOOD.format(hook=hook)), site)
    assert any(f"follows {tmp_path}/etc/config.toml" in text for text in by_level(advice)["look"])


@pytest.mark.parametrize(
    "path",
    ["hook", "opt", "opt/python", "opt/lib", "opt/lib/slurm_health/hooks.py", "slurm/bin"],
)
def test_what_root_runs_and_others_can_change_is_found(
    hook: Path, tmp_path: Path, path: str
) -> None:
    loose = tmp_path / path
    loose.chmod(0o775)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert "root runs" in told
    assert str(loose) in told
    loose.chmod(0o755)
    if os.getuid() == 0:
        os.chown(loose, 1000, 1000)
        assert str(loose) in levels(GOOD.format(hook=hook))["change"][0]


def test_an_interpreter_that_others_can_change_is_not_run(hook: Path, tmp_path: Path) -> None:
    """Doctor runs as root too."""
    python = tmp_path / "opt/python"
    write_executable(python, f"#!/bin/sh\ntouch {tmp_path}/ran\n").chmod(0o777)
    assert any(str(python) in told for told in levels(GOOD.format(hook=hook))["change"])
    assert not (tmp_path / "ran").exists()


def test_a_directory_like_tmp_is_as_good_as_its_entries(hook: Path, tmp_path: Path) -> None:
    (tmp_path / "opt").chmod(0o1777)
    assert levels(GOOD.format(hook=hook))["change"] == []


def test_where_a_link_leads_counts_too(hook: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    target = (tmp_path / "opt/python").rename(tmp_path / "open/python")
    (tmp_path / "opt/python").symlink_to(target)
    (tmp_path / "open").chmod(0o777)
    (told,) = levels(GOOD.format(hook=hook))["change"]
    assert f"can change {tmp_path}/open" in told


@pytest.mark.parametrize("first", ["", "Include more.conf\n"])
def test_settings_that_a_later_line_takes_away_are_named(
    hook: Path, tmp_path: Path, first: str
) -> None:
    """What becomes of a site's own where ours are added as lines of their own."""
    (tmp_path / "more.conf").write_text("prologflags = Contain,X11 # ours\n")
    (tmp_path / "slurm.conf").write_text(
        f"{first or 'PrologFlags=Contain,X11'}\nPrologFlags=Alloc,DeferBatch,Contain\n"
        "SchedulerParameters=a=1\n"
    )
    config = f"SLURM_CONF = {tmp_path}/slurm.conf\n{GOOD.format(hook=hook)}"
    (told,) = levels(config)["change"]
    assert "sets PrologFlags 2 times, and Slurm takes the last: X11 is lost" in told
    assert "| one line: PrologFlags=Contain,X11,Alloc,DeferBatch" in told


@pytest.mark.root
@pytest.mark.parametrize(
    ("owned", "level"), [(None, None), ("textfile", "look"), ("exporter", "change")]
)
def test_a_metrics_directory_that_another_account_can_change_is_named(
    tmp_path: Path, owned: str | None, level: str | None
) -> None:
    place = tmp_path / "exporter" / "textfile"
    place.mkdir(parents=True)
    if owned:
        os.chown(next(each for each in (place, place.parent) if each.name == owned), 65534, -1)
    site = load_site(tmp_path / "etc", f"[metrics]\ndirectory='{place}'\n[checks.memory]\n")
    told = by_level(machine.advise_machine(site, "lab", SIXTY, tree(tmp_path / "machine", {})))
    said = {each for each, texts in told.items() if any("metrics.directory" in t for t in texts)}
    assert said == ({level} if level else set())


@pytest.mark.parametrize("option", ["nolock,local_lock=all", "local_lock=flock", "localflock"])
def test_a_shared_directory_with_locks_of_each_node_is_refused(tmp_path: Path, option: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root tries the shared directory")
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    site = load_site(tmp_path / "etc", f"[breaker]\ndirectory='{shared}'\n[checks.memory]\n")
    for options, level in ((f"rw,{option}", "change"), ("rw,local_lock=none", "fine")):
        table = {"/proc/self/mounts": f"server:/x {shared} nfs {options} 0 0\n"}
        place = tree(tmp_path / "machine", table)
        told = by_level(machine.advise_machine(site, "lab", SIXTY, place))[level]
        assert any(str(shared) in each for each in told), told


@pytest.mark.parametrize(("kind", "told"), [("nfs4", True), ("xfs", False)])
def test_a_state_that_nodes_may_share_is_named(tmp_path: Path, kind: str, told: bool) -> None:
    state = tmp_path / "state"
    site = load_site(tmp_path / "etc", f"[hooks]\nstate='{state}'\n[checks.memory]\n")
    place = tree(tmp_path / "machine", {"/proc/self/mounts": f"x {tmp_path} {kind} rw 0 0\n"})
    said = by_level(machine.advise_machine(site, "lab", SIXTY, place))["look"]
    assert any(f"hooks.state = {state} is on {kind}" in each for each in said) == told, said


@pytest.mark.parametrize(
    ("text", "level", "said"),
    [
        ("", "change", "configures no check"),
        ("[checks.memory]\n[hooks]\ndrain=false\n", "look", "hooks.drain is false"),
        ("[checks.memory]\nshadow=true\n", "look", "every check is in shadow"),
        (
            "[checks.memory]\n[checks.swap]\nshadow=true\n",
            "fine",
            "checks: 2, of them in shadow: 1",
        ),
        ("[checks.memory]\ntime_limit_s=50\n", "look", "more than the 60 s of its shim"),
        ("[checks.memory]\n", "change", "breaker.directory is not set"),
        ("journal='/nowhere/j'\n", "change", "/nowhere/j cannot be used"),
        ("journal='/etc'\n", "change", "users cannot write in /etc"),
        ("[breaker]\ndirectory='/nowhere'\n", "change", "nothing is drained: /nowhere"),
    ],
)
def test_what_the_sites_file_lacks_is_said(
    tmp_path: Path, text: str, level: str, said: str
) -> None:
    if os.getuid() != 0 and "directory" in text:
        pytest.skip("only root tries the shared directory")
    site = load_site(tmp_path / "etc", text)
    found = by_level(machine.advise_machine(site, "lab", SIXTY))
    assert any(said in each for each in found[level]), found


def shipped_limits() -> dict[str, int]:
    root = Path(__file__).parents[3]
    found = {}
    for key in ("Prolog", "Epilog"):
        shim = slurm_conf.read_shim(root / key.lower() / "slurm-health")
        assert shim is not None
        found[key] = shim.limit_s
    return found


def test_the_shims_as_they_are_shipped_have_the_limits_that_doctor_takes_them_to_have() -> None:
    assert shipped_limits() == slurm_conf.SHIM_LIMITS_S


def test_a_drafted_site_with_the_shims_as_they_are_shipped_has_the_time_that_it_may_take(
    tmp_path: Path,
) -> None:
    place = tree(tmp_path / "machine", {**WELL, "/usr/bin/dcgmi": ""})
    text, _ = draft(place, node="n1", shared=str(tmp_path))
    assert "[checks.dcgm]" in text
    site = load_site(tmp_path / "etc", text)
    advice = by_level(machine.advise_machine(site, "lab", shipped_limits(), place))
    assert [each for each in advice["look"] if "when everything takes its time" in each] == []


def test_what_a_health_check_cannot_repeat_is_said(tmp_path: Path) -> None:
    site = load_site(tmp_path / "etc", "[checks.dcgm]\ntime_limit_s=300\n")
    told = by_level(machine.advise_machine(site, "lab", shipped_limits()))["look"]
    assert any("cannot repeat dcgm: a node that is drained for it waits" in each for each in told)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("[checks.dcgm]\n", "dcgmi"),
        ("[checks.nhc]\n", "/usr/sbin/nhc"),
        ("[checks.own]\ncheck='command'\nargv=['/opt/site/check']\n", "/opt/site/check"),
    ],
)
def test_a_program_that_a_check_runs_and_that_is_not_there_is_named(
    tmp_path: Path, text: str, program: str
) -> None:
    site = load_site(tmp_path / "etc", text)
    machine_without = CheckContext(root=tmp_path / "machine")

    found = by_level(machine.advise_machine(site, "lab", SIXTY, machine_without))["change"]
    assert any(f"runs {program}, which is not on this node" in each for each in found)

    name = "usr/bin/dcgmi" if program == "dcgmi" else program.lstrip("/")
    there = tmp_path / "machine" / name
    there.parent.mkdir(parents=True)
    write_executable(there, "#!/bin/sh\n")
    found = by_level(machine.advise_machine(site, "lab", SIXTY, machine_without))["change"]
    assert not any("is not on this node" in each for each in found)


def test_an_installation_that_users_cannot_enter_is_found(tmp_path: Path) -> None:
    """The hooks are root's and run; every command of a user ends with Permission denied."""
    closed = tmp_path / "machine" / Path(sys.executable).parent.relative_to("/")
    closed.mkdir(parents=True)
    place, site = CheckContext(root=tmp_path / "machine"), load_site(tmp_path / "etc", "")
    for mode, is_told in ((0o755, False), (0o700, True)):
        closed.chmod(mode)
        found = by_level(machine.advise_machine(site, "lab", SIXTY, place))["change"]
        said = f"users cannot enter {Path(sys.executable).parent}"
        assert any(said in each for each in found) is is_told


def test_an_installation_without_byte_code_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "uncompiled"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "agent.py").touch()
    monkeypatch.syspath_prepend(tmp_path)

    said = machine.byte_code_advice(["uncompiled.agent", "not_installed"])
    assert said.level is Urgency.LOOK
    assert said.do.endswith(f" -m compileall -q {package}")

    assert compileall.compile_dir(package, quiet=1)
    assert machine.byte_code_advice(["uncompiled.agent"]).level is Urgency.FINE


def test_root_is_asked_for_a_journal_that_all_share(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("of a user's own home, nothing is said")
    site = load_site(tmp_path / "etc", "journal='~/j'\n[checks.memory]\n")
    found = by_level(machine.advise_machine(site, "lab", SIXTY))["look"]
    assert any("| journal = a shared directory" in each for each in found)


@pytest.mark.parametrize(
    ("ledger", "said"),
    [
        ("{", "is damaged"),
        ('{"trips":{"gpu":{"time_s":1,"node":"n1","why":"x","nodes":"n1"}}}', "has tripped"),
    ],
)
def test_a_ledger_that_stops_all_drains_is_said(tmp_path: Path, ledger: str, said: str) -> None:
    (tmp_path / "ledger.json").write_text(ledger)
    tmp_path.chmod(0o755)
    site = load_site(tmp_path / "etc", f"[breaker]\ndirectory='{tmp_path}'\n")
    found = by_level(machine.advise_machine(site, "lab", SIXTY))
    assert any(said in each and "nodes reset" in each for each in found["change"]), found


@pytest.mark.root
def test_what_it_means_that_doctor_runs_as_root_is_said(tmp_path: Path) -> None:
    site = load_site(tmp_path / "etc", "[checks.memory]\n")
    found = by_level(machine.advise_machine(site, "lab", SIXTY))["fine"]
    assert any("what only root can see was looked at" in each for each in found)


def test_a_journal_on_a_local_disk_is_found(tmp_path: Path) -> None:
    """Where the test's own directory is on a disk, as it nearly always is."""
    (tmp_path / "lab").mkdir()
    for each in (tmp_path, tmp_path / "lab"):
        each.chmod(0o1777)
    site = load_site(tmp_path / "etc", f"journal='{tmp_path}'\n[checks.memory]\n")
    found = by_level(machine.advise_machine(site, "lab", SIXTY))
    told = [each for each in found["change"] if "this machine's own" in each]
    assert told or any(f"journals are in {tmp_path}" in each for each in found["fine"])


def test_a_node_without_a_system_log_is_told(tmp_path: Path) -> None:
    """There, nobody would ever learn what the hooks found."""
    place = CheckContext(root=tmp_path)
    assert machine.log_advice(place).level is Urgency.LOOK
    (tmp_path / "dev").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(str(tmp_path / "dev/log"))
        assert machine.log_advice(place).level is Urgency.FINE


def test_advice_fits_a_terminal_and_ends_with_a_count() -> None:
    text = Report(
        advice=(fine("all well"), look("a " * 60, "b " * 60), change("/a/path/" * 14, "mend it"))
    ).text(80)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80 and "/a/path" not in line] == []
    assert lines[0].startswith("change  ")
    assert lines[1].lstrip().startswith("/a/path") or "/a/path" in lines[0]
    assert "        do: mend it" in lines
    assert lines[-1] == "1 to change, 1 to look at, 1 fine"


def test_doctor_runs_nothing_of_the_directory_in_which_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may stand in the home of whoever called for help."""
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    python = write_executable(tmp_path / "python", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    monkeypatch.chdir(tmp_path)
    path = write_site(tmp_path / "etc", "[checks.memory]\n")
    words = ["--config", str(path), "--python", str(python)]
    said = CliRunner().invoke(doctor.doctor, words, standalone_mode=False).output
    assert "has no torch" in said
    assert not (tmp_path / "ran").exists()


def test_doctor_names_an_unusable_file_and_goes_on(tmp_path: Path) -> None:
    path = write_site(tmp_path / "etc", "[hook]\n")
    words = ["--config", str(path), "--python", "/nowhere", "--json"]
    result = CliRunner().invoke(doctor.doctor, words, standalone_mode=False)
    assert result.return_value == 1
    report = json.loads(result.output)
    assert report["counts"]["change"] >= 1
    assert any("did you mean hooks?" in each["text"] for each in report["advice"])


@pytest.mark.root
@pytest.mark.parametrize(
    ("target", "level", "said"),
    [
        ("command = ['/nowhere/ticket']", "change", "/nowhere/ticket cannot be run here"),
        ("command = ['/bin/cat']", "fine", "ops: notified of what happens to nodes"),
        ("url = 'https://chat/x'\nformat = 'slack'", "look", "users can read this file"),
        ("url = 'http://far/x'\nsecret_file = '{secret}'", "look", "crosses the network"),
        ("url_file = '{open}'", "change", "closed to others"),
        ("url_file = '/nowhere/url'", "change", "/nowhere/url cannot be read"),
    ],
)
def test_a_target_that_cannot_be_told_or_tells_too_much_is_named(
    tmp_path: Path, target: str, level: str, said: str
) -> None:
    for name, mode in (("secret", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text("https://chat/x\n")
        (tmp_path / name).chmod(mode)
    (tmp_path / "shared").mkdir(mode=0o755)
    text = target.format(secret=tmp_path / "secret", open=tmp_path / "open")
    site = load_site(
        tmp_path / "etc",
        f"[breaker]\ndirectory = '{tmp_path}/shared'\n[notify.targets.ops]\n{text}\n",
    )

    found = by_level(notices.advise(site))
    assert any(said in each for each in found[level]), found


def test_targets_without_a_shared_directory_are_told_nothing(tmp_path: Path) -> None:
    site = load_site(tmp_path, "[notify.targets.ops]\ncommand = ['/bin/cat']\n")

    assert "nodes have nowhere to queue events" in "".join(by_level(notices.advise(site))["change"])
    assert notices.advise(load_site(tmp_path, "")) == []


@pytest.mark.parametrize(
    ("settings", "config", "level", "said"),
    [
        ("steps = ['reboot']", {"A": "b"}, "change", "slurm.conf has no RebootProgram"),
        ("steps = ['reboot']", {"RebootProgram": "/sbin/reboot"}, "fine", "(dry run): reboot"),
        ("steps = ['reset']\nreset = ['/nowhere/smi']", {}, "change", "/nowhere/smi is not on"),
        ("steps = ['ticket']", {}, "look", "no one is notified"),
        ("", {}, "look", "mend.steps is empty"),
        (
            "steps = ['deep_test']\ndeep_test = ['/bin/true']",
            {"DisableRootJobs": "YES"},
            "change",
            "root's test cannot be submitted",
        ),
    ],
)
def test_what_keeps_a_step_from_being_taken_is_named(
    tmp_path: Path, settings: str, config: dict[str, str], level: str, said: str
) -> None:
    text = f"[breaker]\ndirectory = '{tmp_path}'\n[mend]\nenabled = true\n{settings}\n"

    found = by_level(mending.advise(load_site(tmp_path / "etc", text), config))
    assert any(said in each for each in found[level]), found
    assert mending.advise(load_site(tmp_path / "off", ""), config) == []

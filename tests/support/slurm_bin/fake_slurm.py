#!/usr/bin/env -S python3 -S
# SPDX-License-Identifier: Apache-2.0
"""scontrol, sbatch, squeue, sinfo and scancel, as the links beside this file, over some state.

For what a real Slurm cannot be made to do: refuse at will, lose what it has accepted, take long.
The rest they do in its words and with its exit codes, which tests/system/slurm/test_fake_slurm.py
holds against the lab's. Time does not pass by itself: each time a job is shown it comes one step
further, from COMPLETING to PENDING, and from PENDING and released to RUNNING.

State lies in $FAKE_SLURM_DIR: jobs.json, nodes.json, settings.json and calls (one call a line).
"""

import fcntl
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

Job = dict[str, Any]


class Refused(Exception):
    """What Slurm says, to standard error or where it says so to standard output."""

    def __init__(self, text: str, *, code: int = 1, to_stdout: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.to_stdout = to_stdout


def file(name: str) -> Path:
    return Path(os.environ["FAKE_SLURM_DIR"]) / name


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file(f"{name}.json").read_text())
    return found


def save(name: str, content: dict[str, Any]) -> None:
    # A test reads it beside us, without the lock: whole, or as it was.
    new = file(f"{name}.json.of-command")
    new.write_text(json.dumps(content, indent=1))
    new.replace(file(f"{name}.json"))


def expand(nodelist: str) -> list[str]:
    names = []
    for prefix, ranges in re.findall(r"([^,\[]+)(?:\[([^\]]*)\])?,?", nodelist):
        for part in ranges.split(",") if ranges else [""]:
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if part else [""]
            names += [f"{prefix}{number}" for number in numbers]
    return names


def known(nodelist: str) -> list[str]:
    names = expand(nodelist)
    if re.search(r"\][^,]", nodelist) or not set(names) <= set(load("nodes")):
        raise Refused("Invalid node name specified")
    return names


def find(jobs: dict[str, Any], job_id: str) -> Job:
    if job_id not in jobs:
        raise Refused("slurm_load_jobs error: Invalid job id specified")
    job: Job = jobs[job_id]
    return job


def advance(job: Job) -> None:
    """Come one step further; what was changed while completing is lost in the end."""
    if job["state"] == "COMPLETING":
        job["completing"] -= 1
        if job["completing"] <= 0:
            job["state"] = "PENDING"
            job["ExcNodeList"] = job.pop("ExcNodeList before", job["ExcNodeList"])
    elif job["state"] == "PENDING" and job["Priority"] and job["StartTime"] == "now":
        free = set(load("nodes")) - set(expand(job["ExcNodeList"]))
        if len(free) >= len(job["nodes"]):
            job.update(state="RUNNING", nodes=sorted(free)[: len(job["nodes"])])


def show_job(job_id: str) -> str:
    jobs = load("jobs")
    job = find(jobs, job_id)
    advance(job)
    save("jobs", jobs)
    state = job["state"]
    fields = {
        "JobId": job_id,
        "JobName": job["name"],
        "Priority": job["Priority"],
        "Account": "(null)",
        "QOS": "(null)",
        "JobState": state,
        "ExitCode": job.get("ExitCode", "0:0"),
        "Reason": job["Reason"],
        "Requeue": job["Requeue"],
        "Restarts": job["Restarts"],
        "NtasksPerN:B:S:C": f"{job.get('tasks_per_node', 0)}:0:*:*",
        "BatchFlag": job["BatchFlag"],
        "StartTime": job["StartTime"],
        "EndTime": job.get("EndTime", "Unknown"),
        "Partition": "main",
        "ReqNodeList": job["ReqNodeList"] or "(null)",
        "ExcNodeList": job["ExcNodeList"] or "(null)",
        "NodeList": ",".join(job["nodes"]) if state == "RUNNING" else "",
        **({"BatchHost": job["nodes"][0]} if job["nodes"] else {}),
        **({"Reservation": job["Reservation"]} if "Reservation" in job else {}),
        "Features": job.get("Features", "(null)"),
        "Comment": job["Comment"],
    }
    return " ".join(f"{key}={value}" for key, value in fields.items()) + " "


def show_nodes(nodelist: str) -> str:
    nodes = load("nodes")
    lines = []
    for name in expand(nodelist):
        if name not in nodes:
            raise Refused(f"Node {name} not found", to_stdout=True)
        node = nodes[name]
        reason = f" Reason={node['reason']}" if node["reason"] else ""
        if reason and not reason.endswith("]"):  # a test may say who set it
            reason += " [root@2026-01-02T03:04:05]"
        features = f"AvailableFeatures={node.get('features', '(null)')}"
        state = f"{features} State={node['state']} Partitions={node.get('partition', 'main')}"
        lines.append(f"NodeName={name} Arch=x86_64 {state}{reason}")
    return "\n".join(lines)


def show_reservations() -> str:
    """Show those of the setting `reservations`: nodes, flags and start, by name."""
    lines = [
        f"ReservationName={name} StartTime={(start or ['2026-01-01T00:00:00'])[0]}"
        f" Nodes={nodes} Features=(null) Flags={flags}"
        for name, (nodes, flags, *start) in load("settings").get("reservations", {}).items()
    ]
    return "\n".join(lines) or "No reservations in the system"


def show_config() -> str:
    settings = load("settings")
    return (
        "ClusterName             = lab\n"
        f"AccountingStorageType   = {settings['accounting']}\n"
        f"PrivateData             = {settings.get('private', 'none')}\n"
        f"PrologFlags             = {settings.get('prolog_flags', '(null)')}\n"
        f"SLURM_VERSION           = {settings.get('release', '22.05.8')}\n"
        "SlurmUser               = slurm(64030)"
    )


def update_job(job_id: str, changes: dict[str, str]) -> None:
    jobs = load("jobs")
    job = find(jobs, job_id)
    for key, value in changes.items():
        match key:
            case "ExcNodeList":
                if job["state"] == "RUNNING":
                    raise Refused(f"Job is no longer pending execution for job {job_id}")
                known(value)
                if job["state"] == "COMPLETING":  # 0 is returned, and the list is lost
                    job.setdefault("ExcNodeList before", job["ExcNodeList"])
                job["ExcNodeList"] = "" if load("settings").get("lose_lists") else value
            case "NodeList":
                kept = known(value)
                if job["nodes"][0] not in kept:
                    raise Refused("Invalid node name specified")
                if not os.access(".", os.W_OK):
                    raise Refused("Unable to create resize script", code=1)
                Path(f"slurm_job_{job_id}_resize.sh").touch()
                job["nodes"] = kept
            case _:
                job[key] = value
    save("jobs", jobs)


def update_node(nodelist: str, changes: dict[str, str]) -> None:
    settings = load("settings")
    names = known(nodelist)
    if not settings["admin"]:
        raise Refused("slurm_update error: Invalid user id")
    if changes.get("State") == "DRAIN" and not changes.get("Reason"):
        raise Refused("You must specify a reason when DOWNING or DRAINING a node. Request denied")
    nodes = load("nodes")
    for name in names:
        if changes.get("State") == "UNDRAIN":
            nodes[name].update(state=nodes[name]["state"].partition("+")[0], reason="")
        elif changes.get("State") == "RESUME":
            nodes[name].update(state="IDLE", reason="")
        elif name not in settings.get("drain_is_lost", []):
            running = [job["nodes"] for job in load("jobs").values() if job["state"] == "RUNNING"]
            state = "MIXED" if any(name in names for names in running) else "IDLE"
            nodes[name].update(state=f"{state}+DRAIN", reason=changes["Reason"])
    save("nodes", nodes)


def requeue_held(job_id: str) -> None:
    jobs = load("jobs")
    if job_id not in jobs:
        raise Refused(f"Invalid job id specified for job {job_id}")
    job = jobs[job_id]
    if job["Requeue"] == 0 or job["BatchFlag"] == 0:
        raise Refused(f"Requested operation is presently disabled for job {job_id}")
    job.update(
        state="COMPLETING",
        completing=load("settings").get("completing_steps", 2),
        Priority=0,
        Reason="job_requeued_in_held_state",
        Restarts=job["Restarts"] + 1,
        StartTime="2026-01-01T00:02:00",
    )
    save("jobs", jobs)


def release(job_id: str) -> None:
    jobs = load("jobs")
    job = find(jobs, job_id)
    if not load("settings").get("lose_releases"):
        job.update(Priority=4294901757, Reason="None")
    save("jobs", jobs)


def show(words: list[str]) -> str:
    match words:
        case ["job", "-o", job_id]:
            return show_job(job_id)
        case ["job", "-d", "-o", job_id]:
            held = find(load("jobs"), job_id)["nodes"]
            share = f"Nodes={','.join(held)} CPU_IDs=0-1 Mem=0 GRES="
            return f"{show_job(job_id)}{share} OverSubscribe=OK"
        case ["node", "-o", nodelist]:
            return show_nodes(nodelist)
        case ["nodes", "-o"]:
            return show_nodes(",".join(load("nodes")))
        case ["partition", "-a", "-o"]:
            names = load("settings").get("partition_nodes", "n[1-9]")
            least = load("settings").get("least_nodes", 0)
            room = f"TotalNodes=9 MaxNodes=UNLIMITED MinNodes={least}"
            return f"PartitionName=main Default=YES {room} Nodes={names}"
        case ["reservation", "-o"]:
            return show_reservations()
        case ["config"]:
            return show_config()
        case ["topology"]:
            return str(load("settings").get("topology", ""))
    raise Refused(f"invalid entity: {' '.join(words)}", to_stdout=True)


def scontrol(words: list[str]) -> str:
    match words:
        case ["show", *what]:
            return show(what)
        case ["update", first, *rest]:
            kind, _, target = first.partition("=")
            changes = dict(word.split("=", 1) for word in rest)
            (update_job if kind == "JobId" else update_node)(target, changes)
            return ""
        case ["requeuehold", job_id]:
            requeue_held(job_id)
            return ""
        case ["release", job_id]:
            release(job_id)
            return ""
        case ["reboot", _, name]:
            known(name)  # when it is back is for a test to say
            return ""
    raise Refused(f"invalid keyword: {' '.join(words)}", to_stdout=True)


def sinfo(words: list[str]) -> str:
    """List the nodes of the partition: state, hardware, the least size of a job, features."""
    busy = {n for job in load("jobs").values() if job["state"] == "RUNNING" for n in job["nodes"]}
    settings = load("settings")
    partition = expand(settings.get("partition_nodes", "n[1-9]"))
    lines = []
    for name, node in load("nodes").items():
        _, *marks = node["state"].split("+")
        state = "mixed" if name in busy else node["state"].partition("+")[0].lower()
        if "DRAIN" in marks:
            state = "draining" if name in busy else "drained"
        elif marks:
            state = marks[0].lower()
        hardware = node.get("hardware", "64 256000 gpu:8")
        least = settings.get("least_nodes", 1) or 1
        if name in partition:
            sizes = f"{least}-infinite {settings.get('time_limit', 'infinite')}"
            lines.append(f"{name} {state} {hardware} {sizes} {node.get('features', '(null)')}")
    return "\n".join(lines)


def sbatch(words: list[str]) -> str:
    options = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    if load("settings").get("no_submissions"):
        raise Refused("sbatch: error: Batch job submission failed: Job violates policy")
    known(options.get("exclude", ""))
    if not Path(options["chdir"]).is_dir() or "--parsable" not in words:
        raise Refused("sbatch: error: not as expected here")
    if any(name.startswith("SLURM_JOB_ID") for name in os.environ):
        raise Refused("sbatch: error: the surrounding job's environment came along")
    jobs = load("jobs")
    job_id = str(max((int(name.partition("_")[0]) for name in jobs), default=0) + 1)
    jobs[job_id] = new_job(options["job-name"], ["n1"])
    jobs[job_id].update(ExcNodeList=options.get("exclude", ""), script=sys.stdin.read())
    save("jobs", jobs)
    return f"{job_id};cluster"


def squeue(words: list[str]) -> str:
    options = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
    if options.get("format") == "%k":
        return find(load("jobs"), options["jobs"])["Comment"] or "(null)"
    if options.get("Format", "").startswith("JobArrayID"):
        return "\n".join(
            f"{number} {job['state']} {len(job['nodes'])} {job['Restarts']}"
            f" {job.get('submitted_s', 0)} {job['Reason']}|{job['name']}"
            for number, job in load("jobs").items()
        )
    if options.get("Format", "").startswith("NumNodes"):
        return " ".join(map(str, find(load("jobs"), options["jobs"])["size"]))
    over = {"COMPLETED", "CANCELLED", "FAILED"}
    named = (n for n, j in load("jobs").items() if j["name"] == options["name"])
    return "\n".join(number for number in named if load("jobs")[number]["state"] not in over)


def sacct(words: list[str]) -> str:
    """Say the state of a job as accounts have it: setting `accounts`, by job."""
    if load("settings")["accounting"] == "accounting_storage/none":
        raise Refused("Slurm accounting storage is disabled")
    match words:
        case ["--noheader", "--parsable2", "--allocations", jobs, "--format=State%64"]:
            states = load("settings").get("accounts", {})
            return str(states.get(jobs.removeprefix("--jobs="), ""))
    raise Refused(f"sacct: unrecognized: {' '.join(words)}")


def scancel(words: list[str]) -> str:
    jobs = load("jobs")
    job = find(jobs, words[-1])
    job["state"] = "CANCELLED"
    save("jobs", jobs)
    return ""


def refuse_what_is_to_be_refused(words: list[str]) -> None:
    for word, text in load("settings").get("refuse", {}).items():
        if word in words:
            raise Refused(text)


def kill_the_caller_if_asked_to() -> None:
    """Kill whoever called, once this many calls are done, before it hears of the last."""
    if load("settings").get("kill_at") == len(file("calls").read_text().splitlines()):
        os.kill(os.getppid(), signal.SIGKILL)


def new_job(name: str, nodes: list[str]) -> Job:
    return {
        "name": name,
        "nodes": nodes,
        "state": "RUNNING",
        "Reason": "None",
        "Priority": 4294901757,
        "Requeue": 1,
        "BatchFlag": 1,
        "Restarts": 0,
        "StartTime": "2026-01-01T00:00:00",
        "ReqNodeList": "",
        "ExcNodeList": "",
        "Comment": "",
        "size": [len(nodes)] * 3,  # nodes, processors, tasks
    }


def main() -> int:
    name = Path(sys.argv[0]).name
    commands = {"scontrol": scontrol, "sbatch": sbatch, "squeue": squeue, "scancel": scancel}
    commands |= {"sacct": sacct, "sinfo": sinfo}
    with file("calls").open("a") as calls:
        fcntl.flock(calls, fcntl.LOCK_EX)  # one command at a time, as one controller serves them
        calls.write(json.dumps([name, *sys.argv[1:]]) + "\n")
        calls.flush()
        try:
            refuse_what_is_to_be_refused(sys.argv[1:])
            answer = commands[name](sys.argv[1:])
        except Refused as refused:
            print(refused, file=sys.stdout if refused.to_stdout else sys.stderr)
            return refused.code
        kill_the_caller_if_asked_to()
    if answer:
        print(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())

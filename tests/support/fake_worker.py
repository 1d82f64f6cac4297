#!/usr/bin/env -S python3 -S
# SPDX-License-Identifier: Apache-2.0
"""Stands in for an interpreter with torch: speaks the worker's protocol, measures nothing.

How it behaves is read at its start and at each round from the file <node> in $FAKE_WORKER_DIR, or
in ~/played where a job is given no such variable:

    well (or no file)   samples and "measured"; with partners, once all have arrived
    slow                so, with times ten times longer
    lagging             so, with times a third longer
    unreachable         measures alone, but no partner hears of it
    apart               so with another one that is apart, and well with all others
    no-torch            ends at once, since its interpreter has no torch
    broken-torch        ends at once as Python does with a torch that cannot be loaded
    refusing            ends because another process uses its device
    never-ready         starts and says nothing, for as long as it is told so
    broken-device       its device says that it is broken, and it ends
    driver-hangs        has loaded torch, and its device does not open for as long as it is told so
    dies                is killed in the round
    dies-with-partner   so, while it works with its partner
    raises              its own probe raises
    first-raises        so, on the first device, and the others wait for it in vain
    computes-wrongly    its device computes wrong results
    cannot              its probe cannot measure, for no fault of the node
    stuck               never answers, whatever it is told
    deaf                as stuck, and ignores SIGTERM

Where FAKE_WORKER_MODEL is set, it plays an accelerator of that model. Where FAKE_WORKER_ROUND_S is,
each of its rounds takes so many seconds more.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

HOME = Path(os.environ.get("FAKE_WORKER_DIR") or Path.home() / "played")
LOCAL_RANK = int(sys.argv[2])
MODEL = os.environ.get("FAKE_WORKER_MODEL", "")
ROUND_S = float(os.environ.get("FAKE_WORKER_ROUND_S", "0"))
MATMUL_MS = 3.0
ALLGATHER_MS = 50.0


def node() -> str:
    """Return the node this plays on, from the agent's command line."""
    words = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
    named = [word.partition("=")[2] for word in words if word.startswith("--node=")]
    return named[0] if named else os.environ.get("SLURMD_NODENAME", "node")


def behaviour() -> str:
    try:
        return (HOME / node()).read_text().strip()
    except FileNotFoundError:
        return "well"


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


def sample(index: int, probe: str, iteration_ms: list[float], **more: object) -> None:
    fields: dict[str, object] = {
        "quantity": "",
        "scope": "solo",
        "flop": 0.0,
        "total_bytes": 0,
        "world_size": 1,
        "figures": {},
    }
    fields |= more
    line = {"kind": "sampled", "round": index, "probe": probe, "iteration_ms": [iteration_ms]}
    print(json.dumps({**line, **fields}), flush=True)


def done(index: int, outcome: str, detail: str = "", **flags: bool) -> None:
    usual = {"own_fault": False, "wrong_results": False, "spent": False}
    say("done", round=index, outcome=outcome, detail=detail, **{**usual, **flags})


def listen(rounds: queue.Queue[dict[str, Any]], aborted: set[int]) -> None:
    for line in sys.stdin:
        command = json.loads(line)
        if command["op"] == "abort":
            aborted.add(command["round"])
        else:
            rounds.put(command)
    os._exit(0)


def meet(command: dict[str, Any], how: str, aborted: set[int]) -> str:
    """Wait until every rank has come to this round's meeting; return how that failed, if so."""
    group = command["groups"]["pair"]
    place = HOME / "meetings" / group["prefix"].replace("/", "_")
    place.mkdir(parents=True, exist_ok=True)
    cut = place / "cut"
    arrived = place / (f"{group['rank']} apart" if how == "apart" else str(group["rank"]))
    (cut if how == "unreachable" else arrived).touch()
    while len(list(place.iterdir())) < group["world_size"] or cut.exists():
        if cut.exists():
            return "failed"
        if command["round"] in aborted:
            return "timed_out"
        time.sleep(0.005)
    return "failed" if len(list(place.glob("* apart"))) > 1 else ""


def serve(command: dict[str, Any], aborted: set[int]) -> None:
    index = command["round"]
    time.sleep(ROUND_S)
    how = behaviour()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "dies-with-partner":
        say("scope", round=index, scope="pair")
        os.kill(os.getpid(), signal.SIGABRT)
    if how in {"stuck", "deaf"} or (how == "first-raises" and LOCAL_RANK):
        time.sleep(1000)
    if how in {"raises", "first-raises"}:
        detail = "RuntimeError: out of memory"
        done(index, "failed", detail, own_fault=True)
        return
    if how == "computes-wrongly":
        detail = f"{'device 0 computes' if MODEL else 'the processors compute'} wrong results"
        done(index, "failed", detail, own_fault=True, wrong_results=True)
        return
    if how == "cannot":
        detail = "matmul: another process holds the device"
        done(index, "unmeasured", detail)
        return
    factor = {"slow": 10.0, "lagging": 1.33}.get(how, 1.0)
    sample(index, "matmul", [MATMUL_MS * factor] * 3, flop=1e9)
    if "pair" in command["groups"]:
        if outcome := meet(command, how, aborted):
            detail = "allgather: connection closed by peer"
            done(index, outcome, detail)
            return
        ranks = command["groups"]["pair"]["world_size"]
        times = [ALLGATHER_MS] * 3
        sample(index, "allgather", times, scope="pair", total_bytes=1 << 24, world_size=ranks)
    done(index, "measured")


def main() -> None:
    how = behaviour()
    if how == "no-torch":
        say("state", state="no_torch", detail="its python has no torch")
        raise SystemExit("No module named 'torch'")
    if how == "broken-torch":
        raise SystemExit("ImportError: libtorch_cpu.so: cannot open shared object file")
    rounds: queue.Queue[dict[str, Any]] = queue.Queue()
    aborted: set[int] = set()
    threading.Thread(target=listen, args=(rounds, aborted), daemon=True).start()
    while behaviour() == "never-ready":
        time.sleep(0.02)
    say("state", state="loaded", torch="2.4.0")
    if how == "broken-device":
        detail = "device 3: CUDA error: uncorrectable ECC error encountered"
        say("state", state="unusable", detail=detail)
        raise SystemExit(detail)
    if how == "refusing":
        detail = "device 0 (used by process 4711, python of alice): out of memory"
        say("state", state="refused", detail=detail)
        raise SystemExit(detail)
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while behaviour() == "driver-hangs":
        time.sleep(0.02)
    say("state", state="opened")
    say(
        "ready",
        store_port=4711,
        torch="2.4.0",
        backend="nccl" if MODEL else "gloo",
        device=MODEL or "cpu",
        collective_library="gloo",
        model=MODEL or "cpu with 1 thread",
        free_bytes=(64 if MODEL else 1) << 30,
        start_ms=20.0,
    )
    while True:
        serve(rounds.get(), aborted)


if __name__ == "__main__":
    main()

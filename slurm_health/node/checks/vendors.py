# SPDX-License-Identifier: Apache-2.0
"""Checks by vendors' tools: AMD GPUs, NVMe drives, the board, NVIDIA's diagnostic."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Annotated

import msgspec

from slurm_health.node.checks.check import (
    Check,
    CheckContext,
    Count,
    NotApplicable,
    Weight,
)
from slurm_health.node.checks.external import ProgramRun, run_program
from slurm_health.node.checks.gpu import allotted
from slurm_health.node.checks.rows import Record, Row, ask, judge, records_of
from slurm_health.node.rules.finding import (
    Finding,
    Remedy,
    inconclusive,
    joined,
    node_fault,
    passed,
    warned,
)
from slurm_health.records.errors import Unmeasured
from slurm_health.records.text import counted

# --- AMD GPUs ------------------------------------------------------------------------------------

# Of amd-smi's violations; its power cap (ppt) is normal under load and is not among them.
_SLOWED = {
    "prochot_violation_status": "processor hot",
    "socket_thermal_violation_status": "heat of the socket",
    "vr_thermal_violation_status": "heat of a voltage regulator",
    "hbm_thermal_violation_status": "heat of the memory",
}


class AmdGpus(Check, frozen=True, kw_only=True):
    """All AMD GPUs, by `amd-smi` (ROCm 6 and 7). It has not met an AMD GPU yet.

    An XGMI link that is shut is a node fault. `init config` writes `time_limit_s = 40`.
    """

    COMPONENTS = ("node", "device", "compute", "memory", "links", "network")

    # Name or path.
    program: str = "amd-smi"
    # How many there should be; 0: as many as Slurm expects for the job. Parts of a divided GPU
    # count.
    count: Count = 0
    # Uncorrected ECC errors; more is a node fault.
    max_uncorrected: Count = 0
    # Slowdown by heat or prochot. The power cap never counts.
    throttling: Weight = "warn"

    def measure(self, machine: CheckContext) -> Finding:
        """Read all metrics, and the links."""
        metrics = ask([self.program, "metric", "--json"], machine)
        links = records_of(run_program([self.program, "topology", "--json"], machine).output)
        gpus = amd_gpus(metrics)
        expected = self.count or max(allotted(machine), default=-1) + 1
        number = counted(len(gpus), "AMD GPU")
        parts = [passed("", gpus=len(gpus))]
        if len(gpus) < expected:
            parts.append(node_fault(f"{number}, expected {expected}", expected=expected))
        if not expected and (machine.context == "retest" or not gpus):
            parts.append(inconclusive(f"{number}, and the expected number is unknown: set count"))
        limit = self.max_uncorrected
        text = "GPU {gpu} has {total_uncorrectable_count} uncorrected ECC errors, limit"
        rows = [
            # The driver resets the GPU by itself. An error that it cannot recover from needs a
            # reboot (kernel documentation of amdgpu, RAS), and so does a reset of the count.
            Row(
                {"in": "ecc"},
                "fault",
                f"{text} {limit}",
                above=("total_uncorrectable_count", limit),
                remedy=Remedy.REBOOT,
            ),
            *(
                Row({name: "ACTIVE"}, self.throttling, f"GPU {{gpu}} is throttled: {why}")
                for name, why in _SLOWED.items()
            ),
        ]
        shut = Row(
            {"in": "links", "link_type": "XGMI", "link_status": "DISABLED"},
            "fault",
            "GPU at {bdf} has an XGMI link that is shut",
        )
        parts += [*judge(metrics, rows), *judge(links, [shut])]
        return joined(parts, well=f"{number} healthy")


def amd_gpus(metrics: Iterable[Record]) -> set[str]:
    """Return the numbers of the GPUs in amd-smi's metrics: ROCm 6 and 7 nest them differently."""
    return {record["gpu"] for record in metrics if record.get("gpu", "").isdecimal()}


# --- NVMe drives ---------------------------------------------------------------------------------

_NVME = "/sys/class/nvme"
_LIFE = 100.0  # percent of the writes that the maker promises
# Bits of the critical warning (NVM Express base specification 2.0, figure 207).
_CRITICAL: dict[int, tuple[Callable[[str], Finding], str]] = {
    0x04: (node_fault, "its reliability is degraded"),
    0x08: (node_fault, "it can only be read"),
    0x01: (warned, "its spare blocks are used up"),
    0x02: (warned, "it is too hot or too cold"),
    0x10: (warned, "what protects its cache at a power loss has failed"),
}


class Nvme(Check, frozen=True, kw_only=True):
    """Local NVMe drives, by /sys and `nvme smart-log`.

    A drive that the kernel has given up, that is read-only or calls itself degraded is a node
    fault. Used-up spare blocks, wear, heat, and blocks that could not be read since the last run
    are warnings.
    """

    COMPONENTS = ("node", "storage")
    CONTEXTS = ("healthcheck", "retest")

    # Name or path.
    program: str = "nvme"
    # Fewer is a node fault; 0: not judged.
    count: Count = 0

    def measure(self, machine: CheckContext) -> Finding:
        """Read /sys/class/nvme, and the health log of every drive."""
        names = local_drives(machine)
        if not names and not self.count:
            raise NotApplicable("there is no NVMe drive")
        number = counted(len(names), "NVMe drive")
        parts = [passed("", drives=len(names))]
        if len(names) < self.count:
            parts.append(node_fault(f"{number}, expected {self.count}", expected=self.count))
        errors: dict[str, int] = {}
        for name in names:
            if machine.read_or_none(f"{_NVME}/{name}/state") == "dead":  # do not ask it: it hangs
                parts.append(node_fault(f"{name}: the kernel has given it up"))
            else:
                parts += self._drive(name, machine, errors)
        history = machine.history(f"nvme.{machine.context}", errors, dict[str, int])
        before = history[-1][1] if history else errors
        for name, count in errors.items():
            lost = count - before.get(name, count)
            if lost > 0:
                text = f"{name}: {counted(lost, 'block')} could not be read since the last check"
                parts.append(warned(text, media_errors=lost))
        return joined(parts, well=f"{number} healthy")

    def _drive(self, name: str, machine: CheckContext, errors: dict[str, int]) -> Iterator[Finding]:
        try:
            run = run_program([self.program, "smart-log", "-o", "json", f"/dev/{name}"], machine)
        except Unmeasured as err:
            yield inconclusive(f"{name}: {err}")
            return
        records = records_of(run.output)
        # Newer releases of nvme-cli give the warning as an object of bits.
        warning = next(
            (
                value
                for record in records
                if (value := record.get("critical_warning"))
                or (record.get("in") == "critical_warning" and (value := record.get("value")))
            ),
            "",
        )
        if not warning.isdecimal():
            yield inconclusive(f"{name}: {run.first_line or f'exit code {run.code}'}")
            return
        for bit, (judged, text) in _CRITICAL.items():
            if int(warning) & bit:
                yield judged(f"{name}: {text}")
        words = f"{name}: {{percent_used}} % of its life are used, limit {_LIFE:g}"
        worn = Row({}, "warn", words, above=("percent_used", _LIFE - 1))
        yield from list(judge(records, [worn]))[:1]
        for record in records:
            if (count := record.get("media_errors", "")).isdecimal():
                errors[name] = int(count)


def local_drives(machine: CheckContext) -> list[str]:
    """Return the controllers that sit in the node: `nvme0` and so on."""
    return [
        name
        for name in machine.entries(_NVME)
        if machine.read_or_none(f"{_NVME}/{name}/transport") in {"pcie", None}
    ]


# --- the board's controller ----------------------------------------------------------------------

# Of the log's end; a BMC reads an entry in some 10 ms.
_LATEST = "100"
# Memory events of the log: those that end a job, and those that announce them.
_MEMORY_FAULT = ".*(Uncorrectable ECC|Memory Device Disabled|Parity).*"
_MEMORY_WARNED = ".*(Correctable ECC|Memory Scrub Failed).*"
# `11/24/2026 06:50:12`, of newer releases `11/24/26 06:50:12 UTC`
_TIME = re.compile(r"(?P<date>\d{2}/\d{2}/)(?P<year>\d{2}(?:\d{2})?)[\s|]+(?P<time>[\d:]{8})")
_MEMORY_WINDOW_S = 86_400.0


class Bmc(Check, frozen=True, kw_only=True):
    """Memory events of the last day in the log of the node's BMC, by `ipmitool` over /dev/ipmi0.

    A node that was drained for one comes back after a day.
    """

    COMPONENTS = ("node", "memory")
    # Its log takes seconds to read, which a job should not wait for.
    CONTEXTS = ("healthcheck", "retest")

    # Name or path.
    program: str = "ipmitool"
    # An uncorrectable error, a parity error or a disabled module in the log's last 100 entries.
    memory: Weight = "fault"

    def measure(self, machine: CheckContext) -> Finding:
        """Read the events and the clock of this node's BMC, through the kernel's driver."""
        lines = [
            [field.strip() for field in line.split("|")]
            for line in self._asked(machine, "sel", "elist", "last", _LATEST).splitlines()
        ]
        names = ("number", "date", "time", "sensor", "event", "state")
        events = [dict(zip(names, line, strict=False)) for line in lines if len(line) >= len(names)]
        now = _moment(self._asked(machine, "sel", "time", "get"))
        of_memory = {"sensor": "Memory.*", "state": "Asserted"}
        words = "{sensor}: {event}"
        rows = [
            Row({**of_memory, "event": _MEMORY_FAULT}, self.memory, words),
            Row({**of_memory, "event": _MEMORY_WARNED}, "warn", words),
        ]
        # Only events of the last day, and since the node was last returned.
        within_s, booted = _MEMORY_WINDOW_S, machine.boot_time()
        if booted is not None and machine.returned_uptime_s:
            within_s = min(within_s, max(0.0, booted.uptime_s - machine.returned_uptime_s))
        recent = [
            event
            for event in events
            if now is not None
            and (at := _moment(f"{event['date']} {event['time']}")) is not None
            # A clock that was set leaves events in the future: their real time is unknown.
            and 0 <= (now - at).total_seconds() <= within_s
        ]
        parts = {finding.text: finding for finding in judge(recent, rows)}.values()
        return joined([*parts], well=f"{counted(len(events), 'event')}, none of memory is new")

    def _asked(self, machine: CheckContext, *arguments: str) -> str:
        run = run_program([self.program, *arguments], machine)
        # An empty log, and a sensor that does not answer, end with an exit code too.
        if run.code != 0 and "|" not in run.output and "SEL has no entries" not in run.output:
            words = " ".join([self.program, *arguments])
            raise Unmeasured(f"{words}: {run.first_line or f'exit code {run.code}'}")
        return run.output


def _moment(text: str) -> datetime | None:
    """Return a time of the BMC's clock; None for `Pre-Init` and the like, which is no time."""
    match = _TIME.search(text)
    if match is None:
        return None
    year = match["year"][-2:]
    try:
        # Only compared with others of the same clock.
        return datetime.strptime(f"{match['date']}{year} {match['time']}", "%m/%d/%y %H:%M:%S")
    except ValueError:
        return None


# --- NVIDIA's own diagnostic ---------------------------------------------------------------------

_RAN = "pass|fail|warn"
_WHERE = "{where}{name}: {warning}"
# Numbers of dcgm_errors.h. Errors: a file, a parameter, a library, the driver, a library again,
# processes of others, the host engine, variables, persistence mode. Categories: configuration,
# libraries, CUDA, other software such as IMEX, which joins the NVLinks of several nodes.
_SOFTWARE_ERRORS, _SOFTWARE = "18|21|22|23|24|25|26|28|29", "3|4|6|8"
_ISOLATE, _RESET, _NVLINK_DOWN = "2", "6", "14"
# Tests of software, for which older releases print words and no number.
_SETTINGS = (
    "(?i:blacklist|denylist|nvml library|cuda main library|cuda toolkit libraries"
    "|permissions and os blocks|persistence mode|environment variables|graphics processes)"
)
_DIAGNOSTIC = (
    Row({"status": "pass"}, "ignore"),
    Row({"error_category": _SOFTWARE, "error_severity": f"{_ISOLATE}|{_RESET}"}, "warn", _WHERE),
    Row({"error_id": _SOFTWARE_ERRORS}, "warn", _WHERE),
    Row({"category": "deployment", "name": _SETTINGS, "error_severity": "0"}, "warn", _WHERE),
    Row({"status": "fail", "error_id": _NVLINK_DOWN}, "fault", _WHERE),
    # GPU 3's NvLink link 5 is currently down
    Row({"status": "fail", "warning": r".*\bNvLink link \d+ is currently down.*"}, "fault", _WHERE),
    Row({"status": "fail", "error_severity": _ISOLATE}, "fault", _WHERE),
    Row({"status": "fail", "error_severity": _RESET}, "fault", f"{_WHERE}; reset the GPU"),
    # Monitored and misconfigured GPUs can be used. A result to triage, or an unknown one, may as
    # well be of a diagnostic that could not run.
    Row({"error_severity": "1|5"}, "warn", _WHERE),
    Row({"status": "warn"}, "warn", _WHERE),
    Row({}, "unclear", f"{_WHERE} (dcgmi does not say whether the GPU is at fault)"),
)


class Dcgm(Check, frozen=True, kw_only=True):
    """`dcgmi diag -j`, where DCGM is installed. It needs the GPUs to itself.

    By DCGM's severity, *isolate* and *reset* are a node fault, *monitor* and *config* a warning.
    What concerns software is a warning whatever DCGM calls it; a link that is down is a node
    fault. If every hardware test was skipped, the check is inconclusive. To run it before jobs
    too, add `healthcheck` to `contexts` and set `HealthCheckNodeState=IDLE`.
    """

    EXCLUSIVE = True
    CONTEXTS = ("retest",)
    COMPONENTS = ("node", "device", "compute", "memory", "links")

    # Name or path.
    program: str = "dcgmi"
    # 1 tests no hardware; 2 takes two minutes, 3 fifteen, 4 an hour: set `time_limit_s`. The epilog
    # leaves room for 300 s, and a health check for less than a minute.
    level: Annotated[int, msgspec.Meta(ge=1, le=4)] = 2

    def measure(self, machine: CheckContext) -> Finding:
        """Run it."""
        argv = [self.program, "diag", "-r", str(self.level), "-j"]
        return self.judge(run_program(argv, machine))

    def judge(self, run: ProgramRun) -> Finding:
        """Name what failed, on which GPU. Pure."""
        records = [_of_diagnostic(record) for record in records_of(run.output)]
        stopped = [record["runtime_error"] for record in records if "runtime_error" in record]
        if stopped:
            return inconclusive(f"{self.program}: {stopped[0]}")
        # A result stands as it is, or in the warnings that newer releases put below it.
        results = [record for record in records if record["in"] in {"results", "warnings"}]
        detailed = {_test_of(record) for record in results if record["in"] == "warnings"}
        ran = [
            record
            for record in results
            if re.fullmatch(_RAN, record["status"])
            and (record["in"] == "warnings" or _test_of(record) not in detailed)
        ]
        if not any(record["in"] for record in records):
            why = run.first_line or f"exit code {run.code}"
            return inconclusive(f"{self.program} gave no result: {why}")
        if not ran:
            return inconclusive(f"{self.program} ran no test")
        parts = [passed("", level=self.level)]
        hardware = {r["name"] for r in results if r.get("category") != "deployment"}
        if self.level > 1 and all(record.get("category") == "deployment" for record in ran):
            skipped = f" (skipped: {', '.join(sorted(hardware))})" if hardware else ""
            parts.append(inconclusive(f"{self.program} tested no hardware{skipped}"))
        parts += judge(ran, _DIAGNOSTIC)
        return joined(parts, well=f"dcgmi diag, level {self.level}: all tests passed")


def _test_of(record: Record) -> tuple[str, str]:
    return record.get("name", ""), record["where"]


def _of_diagnostic(record: Record) -> Record:
    """Return a record with the fields of every release, under one name and in small letters."""
    number = next((record[n] for n in ("entity_id", "gpu_ids", "gpu_id") if n in record), None)
    where = f"{record.get('entity_group', 'GPU')} {number}: " if number is not None else ""
    words = record.get("warnings") or record.get("warning") or record.get("info") or "failed"
    return {
        "in": "",
        "name": "a test",
        "error_severity": "0",
        **record,
        "where": where,
        "warning": words,
        "status": record.get("status", "").lower(),
        "category": record.get("category", "").lower(),
    }

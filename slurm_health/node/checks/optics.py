# SPDX-License-Identifier: Apache-2.0
"""Cables and optics of the network: what their modules say, by `ethtool -m` and `mlxlink`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from slurm_health.node.checks.check import Check, CheckContext, NotNegative, Seen, first_few
from slurm_health.node.checks.external import ProgramSeen, json_in, run_program
from slurm_health.node.rules.finding import Finding, Status, inconclusive, joined, passed, warned
from slurm_health.records.errors import Unmeasured

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][\w.:-]{0,63}$")]
# `Laser rx power low alarm (Chan 1)         : On`: newer releases have JSON for it, but those of
# current distributions print this alone.
_FLAG = re.compile(r"^\s*(?P<what>[^:]* alarm(?:\s+\([^:]*\))?)\s*:\s*(?P<value>\w+)\s*$", re.M)
# `45 [-10..80]`, `1.017,1.264,-40 [-10.41..6]`: of each lane, and what the module's maker allows.
_WITHIN = re.compile(r"(?P<values>[-\d.,\s]+?)\s*\[(?P<low>[-\d.]+)\.\.(?P<high>[-\d.]+)\]")
_WATCHED = ("Temperature [C]", "Rx Power Current [dBm]", "Tx Power Current [dBm]")
# How mlxlink says that nothing was counted.
_NO_ERRORS = "15E-255"


class OpticsSeen(Seen, frozen=True, kw_only=True):
    """What was printed of each port; `unasked` is why there is nothing of the others."""

    ethtool: dict[str, str]
    mlxlink: dict[str, str]
    unasked: dict[str, str]


class Optics(Check, frozen=True, kw_only=True):
    """The modules in the ports named. A dirty fibre may end at the switch: it is a warning."""

    SEEN = OpticsSeen
    SEVERITY = Status.WARN
    COMPONENTS = ("node", "network", "nic")
    # A module answers over a slow bus, in up to a second.
    CONTEXTS = ("healthcheck", "retest")

    # Ethernet interfaces, asked by ethtool, and adapters (`mlx5_0`), asked by mlxlink.
    interfaces: tuple[Name, ...] = ()
    devices: tuple[Name, ...] = ()
    ethtool: str = "ethtool"
    mlxlink: str = "mlxlink"
    # After correction; the InfiniBand architecture asks a link for 1e-12.
    max_bit_error_rate: NotNegative = 1e-12

    def __post_init__(self) -> None:
        if not self.interfaces and not self.devices:
            raise ValueError("name the ports: interfaces = [...] or devices = [...]")

    def collect(self, machine: CheckContext) -> OpticsSeen:
        """Ask the module of each port."""
        commands = {name: [self.ethtool, "-m", name] for name in self.interfaces}
        commands |= {
            name: [self.mlxlink, "-d", name, "-m", "-c", "--json"] for name in self.devices
        }
        said, unasked = {}, {}
        for name, argv in commands.items():
            try:
                said[name] = _answer(run_program(argv, machine))
            except Unmeasured as err:
                unasked[name] = str(err)
        return OpticsSeen(
            ethtool={name: said[name] for name in self.interfaces if name in said},
            mlxlink={name: said[name] for name in self.devices if name in said},
            unasked=unasked,
        )

    def judge(self, seen: OpticsSeen) -> Finding:
        """Name alarms, values beyond what a module's maker allows, and errors left uncorrected."""
        parts = [passed("", ports=len(seen.ethtool) + len(seen.mlxlink))]
        for name, text in seen.ethtool.items():
            if alarms := _alarms(text):
                parts.append(warned(f"{name}: {first_few(alarms)}"))
        for name, text in seen.mlxlink.items():
            parts += self._adapter(name, text)
        parts += [inconclusive(f"{name}: {why}") for name, why in seen.unasked.items()]
        return joined(parts, well="no alarm of a cable or an optic")

    def _adapter(self, name: str, text: str) -> Iterator[Finding]:
        output = _table(_table(json_in(text), "result"), "output")
        if not output:
            yield inconclusive(f"{name}: mlxlink gave no result")
            return
        trouble = _table(output, "Troubleshooting Info")
        if str(trouble.get("Status Opcode", "0")) not in {"0", "N/A"}:
            yield warned(f"{name}: {trouble.get('Recommendation') or 'mlxlink sees trouble'}")
        module = _table(output, "Module Info")
        for what in _WATCHED:
            if outside := _outside(str(module.get(what, ""))):
                yield warned(f"{name}: {what} {outside}")
        counted = _table(output, "Physical Counters and BER Info")
        rate = _rate(str(counted.get("Effective Physical BER", "")))
        if rate is not None and rate > self.max_bit_error_rate:
            limit = f"limit {self.max_bit_error_rate:g}"
            yield warned(f"{name}: bit error rate {rate:g} after correction, {limit}")


def _answer(seen: ProgramSeen) -> str:
    """Return what a program printed.

    Raises:
        Unmeasured: the port has no module that answers.
    """
    if seen.code != 0:
        raise Unmeasured(seen.said or f"exit code {seen.code}")
    return seen.output


def _alarms(text: str) -> list[str]:
    """Return the alarms that are on; the warnings, at narrower limits, come before and go away."""
    return [
        " ".join(each["what"].split()) for each in _FLAG.finditer(text) if each["value"] == "On"
    ]


def _outside(text: str) -> str:
    """Return values and limits where a value is beyond them, else nothing."""
    found = _WITHIN.search(text)
    if found is None:
        return ""
    try:
        values = [float(each) for each in found["values"].split(",")]
        low, high = float(found["low"]), float(found["high"])
    except ValueError:
        return ""
    if low >= high or all(low <= each <= high for each in values):  # some makers give no limits
        return ""
    return f"{found['values']}, allowed {low:g} to {high:g}"


def _rate(text: str) -> float | None:
    if text == _NO_ERRORS:
        return 0.0
    try:
        return float(text)
    except ValueError:
        return None


def _table(document: object, name: str) -> Mapping[str, Any]:
    part = document.get(name) if isinstance(document, dict) else None
    return part if isinstance(part, dict) else {}

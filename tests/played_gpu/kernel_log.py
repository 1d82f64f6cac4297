# SPDX-License-Identifier: Apache-2.0
"""What NVIDIA's driver writes into the kernel's log of a device's fault, in its own words. Pure.

The numbers and what they mean are in NVIDIA's catalogue of Xid errors; the wording is that of the
driver's releases 525 to 580.
"""

from collections.abc import Iterator

from tests.played_gpu.description import Device, Fault

_NOBODY = "pid='<unknown>', name=<unknown>"
_ERR, _INFO = 3, 6
_CUDA_ECC_ERROR = 214


def loaded(version: str = "580.82.07") -> str:
    """Return what the driver says when it is loaded."""
    return f"NVRM: loading NVIDIA UNIX x86_64 Kernel Module  {version}"


def said(device: Device, fault: Fault) -> Iterator[str]:
    """Yield the messages of one fault; none for what the driver does not notice."""
    address = device.pci_address.rpartition(":")[0]

    def xid(number: int, text: str) -> str:
        return f"NVRM: Xid (PCI:{address}:00): {number}, {_NOBODY}, {text}"

    match fault.kind:
        case "off_bus":
            yield xid(79, "GPU has fallen off the bus.")
            yield f"NVRM: GPU {device.pci_address}: GPU has fallen off the bus."
            yield xid(
                154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
            )
        case "open_error" if fault.value == 999:
            yield xid(119, "Timeout after 6s of waiting for RPC response from GPU0 GSP!")
        case "sticky_error" if fault.value == _CUDA_ECC_ERROR:
            yield xid(
                63,
                "Row Remapper: New row (0x0000000000b1e2f3) marked for remapping,"
                " reset gpu to activate.",
            )
            yield xid(94, "Contained: CE User Channel (0x9). RST: No, D-RST: No")
            yield xid(
                154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
            )
        case "remap_failed":
            yield xid(
                64,
                "Row Remapper Error: (0x0000000000b1e2f3)"
                " - All reserved rows for bank are remapped",
            )
        case "nvlinks_down":
            for link in range(int(fault.value)):
                yield xid(
                    74,
                    f"NVLink: fatal error detected on link {link}"
                    "(0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0)",
                )
        case "hang":
            yield xid(109, "Ch 00000008, errorString CTX SWITCH TIMEOUT, Info 0x1c0019")


def records(messages: list[str], *, first: int, uptime_s: float) -> str:
    """Return the messages as /dev/kmsg would have them: level, number, microseconds; text."""
    return "".join(
        f"{_ERR if 'Xid' in message else _INFO},{first + count},{int(uptime_s * 1e6)},-;{message}\n"
        for count, message in enumerate(messages)
    )

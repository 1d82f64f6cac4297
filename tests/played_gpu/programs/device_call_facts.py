# SPDX-License-Identifier: Apache-2.0
"""What torch does that the device path relies on: `device_call_facts alone|group RANK PORT`.

Runs in an interpreter with torch and two devices or more; says of each fact whether it holds, as
JSON, one a line. docs/reference/device-calls.md names the call that each belongs to.
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slurm_health.preflight.probes.torch_group import exception_of

MIB = 1 << 20
_LIMIT = timedelta(seconds=60)
_LATE_S = 1.0  # a partner comes so much later

Fact = Callable[[], bool]


def init_and_count() -> bool:
    torch.cuda.init()
    return torch.cuda.is_available() and torch.cuda.device_count() >= 2


def device_is_made_current() -> bool:
    torch.cuda.set_device(1)
    ones = torch.ones(2, device="cuda")
    torch.cuda.set_device(0)
    return ones.device == torch.device("cuda", 1)


def device_is_named() -> bool:
    properties = torch.cuda.get_device_properties(0)
    name = torch.cuda.get_device_name(0)
    if not bool(name) or properties.name != name:
        return False
    return torch.__version__ < "2.6" or len(str(properties.uuid)) == 36


def capability_is_two_numbers() -> bool:
    return torch.cuda.get_device_capability(0) >= (1, 0)


def free_memory_follows_what_is_held() -> bool:
    free_bytes, total_bytes = torch.cuda.mem_get_info(torch.device("cuda", 0))
    held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")
    less_bytes, _ = torch.cuda.mem_get_info(torch.device("cuda", 0))
    del held
    return free_bytes <= total_bytes and less_bytes <= free_bytes - 256 * MIB


def cache_is_given_back() -> bool:
    torch.empty(256 * MIB, dtype=torch.uint8, device="cuda:0")  # freed into torch's own cache
    before_bytes, _ = torch.cuda.mem_get_info(0)
    torch.cuda.empty_cache()
    after_bytes, _ = torch.cuda.mem_get_info(0)
    return after_bytes >= before_bytes + 256 * MIB


def most_reserved_memory_is_kept() -> bool:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    return int(torch.cuda.max_memory_reserved(0)) >= 64 * MIB


def lack_of_memory_has_its_own_error() -> bool:
    try:
        torch.empty(1 << 42, dtype=torch.uint8, device="cuda:0")
    except torch.cuda.OutOfMemoryError as err:
        return isinstance(err, RuntimeError) and "out of memory" in str(err)
    return False


def events_tell_milliseconds() -> bool:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    time.sleep(0.1)
    end.record()
    end.synchronize()
    return 100 <= float(begin.elapsed_time(end)) < 60_000


def synchronize_waits_for_the_device() -> bool:
    end = torch.cuda.Event()
    torch.mm(*[torch.ones(256, 256, device="cuda:0")] * 2)
    end.record()
    torch.cuda.synchronize(torch.device("cuda", 0))
    return bool(end.query())


def nccl_has_a_version_of_three_numbers() -> bool:
    version = torch.cuda.nccl.version()
    return len(version) == 3 and version >= (2, 0, 0)


ALONE: dict[str, Fact] = {
    each.__name__: each
    for each in (
        init_and_count,
        device_is_made_current,
        device_is_named,
        capability_is_two_numbers,
        free_memory_follows_what_is_held,
        cache_is_given_back,
        most_reserved_memory_is_kept,
        lack_of_memory_has_its_own_error,
        events_tell_milliseconds,
        synchronize_waits_for_the_device,
        nccl_has_a_version_of_three_numbers,
    )
}


class Group:
    """Two ranks; rank 1 comes late where that shows something."""

    def __init__(self, rank: int, port: int) -> None:
        self._rank = rank
        self._device = torch.device("cuda", rank)
        torch.cuda.set_device(rank)
        self._tcp = dist.TCPStore(
            "127.0.0.1", port, None, rank == 0, timeout=_LIMIT, wait_for_workers=False
        )
        self._met = 0
        self._enter("first")

    def _enter(self, prefix: str) -> None:
        dist.init_process_group(
            "nccl",
            store=dist.PrefixStore(prefix, self._tcp),
            rank=self._rank,
            world_size=2,
            timeout=_LIMIT,
        )

    def _own(self, size: int = 4) -> torch.Tensor:
        return torch.full((size,), float(self._rank + 1), device=self._device)

    def store_tells_without_waiting(self) -> bool:
        if not self._tcp.port:
            return False
        mine, other = (dist.PrefixStore(each, self._tcp) for each in ("mine", "other"))
        key = f"here/{self._rank}"
        before = mine.check([key])
        mine.set(key, "1")
        told = mine.check([key]) and not other.check([key])
        return not before and told and bytes(mine.get(key)) == b"1"

    def work_is_completed_once_the_partner_has_come(self) -> bool:
        dist.all_reduce(self._own())  # connected from here on
        torch.cuda.synchronize(self._device)
        if self._rank == 1:
            time.sleep(_LATE_S)
        work = dist.all_reduce(self._own(), async_op=True)
        early = work.is_completed()
        while not work.is_completed():
            time.sleep(0.01)
        return self._rank == 1 or not early

    def work_that_succeeded_has_no_exception(self) -> bool:
        work = dist.all_reduce(self._own(), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        return exception_of(work) is None

    def success_of_work_cannot_be_asked(self) -> bool:
        work = dist.all_reduce(self._own(), async_op=True)
        try:
            work.is_success()
        except NotImplementedError:
            return True
        return False

    def wait_leaves_the_host_free(self) -> bool:
        if self._rank == 1:
            time.sleep(_LATE_S)
        work = dist.all_reduce(self._own(), async_op=True)
        work.wait()
        early = work.is_completed()
        torch.cuda.synchronize(self._device)
        return (self._rank == 1 or not early) and work.is_completed()

    def sums_and_maxima_are_of_all_ranks(self) -> bool:
        added, most = self._own(), self._own()
        dist.all_reduce(added)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        both = dist.get_world_size(None) == 2
        return both and bool((added == 3).all()) and bool((most == 2).all())

    def gathered_parts_lie_in_the_order_of_ranks(self) -> bool:
        wanted = torch.tensor([1.0] * 4 + [2.0] * 4)
        whole = torch.empty(8, device=self._device)
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(
            whole, self._own()
        )
        parts = [torch.empty(4, device=self._device) for _ in range(2)]
        dist.all_gather(parts, self._own())
        return torch.equal(whole.cpu(), wanted) and torch.equal(torch.cat(parts).cpu(), wanted)

    def two_members_send_and_receive_at_once(self) -> bool:
        received, other = torch.empty(4, device=self._device), 1 - self._rank
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._own(), other, None),
                dist.P2POp(dist.irecv, received, other, None),
            ]
        )
        torch.cuda.synchronize(self._device)
        return bool((received == other + 1).all())

    def group_is_formed_by_its_members_alone(self) -> bool:
        if self._rank == 1:
            return True  # and takes no part
        group = dist.new_group([0], timeout=_LIMIT, use_local_synchronization=True)
        alone = self._own()
        dist.all_reduce(alone, group=group)
        return bool((alone == 1).all())

    def group_can_be_left_and_formed_anew(self) -> bool:
        before = dist.is_initialized()
        dist.destroy_process_group()
        between = dist.is_initialized()
        self._enter("second")
        added = self._own()
        dist.all_reduce(added)
        return before and not between and bool((added == 3).all())

    def abort_ends_what_waits_and_says_nothing(self) -> bool:
        if not hasattr(dist.distributed_c10d, "_abort_process_group"):
            return True  # before torch 2.6, where a worker whose group broke is replaced
        work = None
        if self._rank == 0:  # and rank 1 takes no part
            work = dist.all_reduce(self._own(), async_op=True)
        dist.distributed_c10d._abort_process_group(dist.group.WORLD)
        gone = not dist.is_initialized()
        torch.cuda.synchronize(self._device)
        dist.distributed_c10d._world.group_count = 0
        self._enter("third")
        added = self._own()
        dist.all_reduce(added)
        told = work is None or (work.is_completed() and exception_of(work) is None)
        return gone and told and bool((added == 3).all())

    def facts(self) -> dict[str, Fact]:
        names = [name for name in vars(Group) if not name.startswith("_") and name != "facts"]
        return {name: getattr(self, name) for name in names}


def main() -> None:
    """Say each fact."""
    facts: dict[str, Any] = ALONE
    if sys.argv[1] == "group":
        facts = Group(int(sys.argv[2]), int(sys.argv[3])).facts()
    for name, holds in facts.items():
        try:
            print(json.dumps({"fact": name, "holds": holds()}), flush=True)
        except Exception as err:
            said = f"{type(err).__name__}: {err}"[:300]
            print(json.dumps({"fact": name, "holds": False, "said": said}), flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A DDP training on CPUs that fails or hangs as asked: `training.py [CAUSE [RANK]] [OPTIONS]`.

Started by torchrun, or once per task by srun. The rank (-1: all) meets the cause at step `--at`.
With `--checkpoint` it saves after each step and resumes; as long as `CHECKPOINT.hold` is there it
goes on for ever. Each rank leaves its process id in `pid-RANK`.
"""

import argparse
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from slurm_health import heartbeat

WIDTH = 32
ALL = -1
# Far more than the limit leaves, and no page of it is touched.
TOO_MUCH_BYTES = 1 << 40


def read_pipe() -> None:
    """Read from a pipe as a file of a filesystem that does not answer."""
    path = Path(f"pipe-{os.getpid()}")
    os.mkfifo(path)
    path.read_bytes()


def key_error() -> None:
    raise KeyError("learning_rate")


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def use_up_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    bytearray(TOO_MUCH_BYTES)


CAUSES: dict[str, Callable[[], object]] = {
    "key-error": key_error,
    "kill": lambda: kill(signal.SIGKILL),
    # Its loader's worker keeps the connections open: the other ranks do not notice.
    "kill-held": lambda: kill(signal.SIGKILL),
    "memory": use_up_memory,
    "none": lambda: None,
    "own-code": read_pipe,
    "stop": lambda: kill(signal.SIGSTOP),
    "wait": lambda: time.sleep(3600),
}


class Batches(IterableDataset[torch.Tensor]):
    """So many batches, after which they come from a pipe that nobody writes to, if it is `held`."""

    def __init__(self, count: int, *, held: bool) -> None:
        self._count, self._held = count, held

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self._count):
            yield torch.ones(2, WIDTH)
        if self._held:
            read_pipe()


class Training:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.checkpoint: Path | None = options.checkpoint
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.restart = int(os.environ.get("SLURM_HEALTH_RESTART_COUNT", "0"))
        self.meets = options.rank in {self.rank, ALL}
        self.steps: int = options.steps
        if options.times and not self.checkpoint and self._mark(options.rank, 0).exists():
            self.steps -= options.at  # what the start that failed had trained
        torch.manual_seed(0)
        self.model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def run(self) -> None:
        begin = 0
        if self.checkpoint and self.checkpoint.exists():
            saved = torch.load(self.checkpoint)
            self.model.load_state_dict(saved["model"])
            begin = saved["step"] + 1
        self._print(f"{self.count} processes begin at {begin}, restart {self.restart}")
        step = begin
        for step, batch in enumerate(self._batches(begin), begin):
            began_s = time.monotonic()
            time.sleep(self.options.step_s)
            own_s = time.monotonic() - began_s
            self._meet(step)
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if self.options.heartbeat:
                heartbeat.step(step, own_s)
            self._print(f"step {step} loss {loss.item():.4f}")
            if self.checkpoint and not self._saved(self.checkpoint, step):
                break
        self._print(f"{self.count} processes end at {step + 1}")

    def _batches(self, begin: int) -> DataLoader[torch.Tensor]:
        held = self.options.cause == "kill-held"
        count = 1 << 40 if self.checkpoint else self.steps - begin
        if held and self.meets:
            count = self.options.at + 1  # a rank that is to be killed at a step gets there
        batches = Batches(count, held=held and self.meets)
        return DataLoader(batches, batch_size=None, num_workers=int(held))

    def _meet(self, step: int) -> None:
        options = self.options
        if not self.meets or step < options.at or (options.first_start and self.restart):
            return
        if options.times:
            marks = [self._mark(self.rank, number) for number in range(options.times)]
            left = [mark for mark in marks if not mark.exists()]
            if not left:
                return
            left[0].touch()
        elif step > options.at:
            return
        CAUSES[options.cause]()

    def _mark(self, rank: int, number: int) -> Path:
        return (self.checkpoint or Path("training")).with_suffix(f".failed-{rank}-{number}")

    def _saved(self, checkpoint: Path, step: int) -> bool:
        """Save a step; tell whether there is another. All ranks hear it from the first."""
        if self.rank == 0:
            new = checkpoint.with_suffix(".new")
            torch.save({"model": self.model.state_dict(), "step": step}, new)
            new.replace(checkpoint)
        holds = checkpoint.with_suffix(".hold").exists()
        go_on = torch.tensor(int(holds or step + 1 < self.steps))
        dist.broadcast(go_on, 0)
        return bool(go_on.item())

    def _print(self, text: str) -> None:
        if self.rank == 0 and not self.options.silent:
            print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cause", nargs="?", default="none", choices=sorted(CAUSES))
    parser.add_argument("rank", nargs="?", type=int, default=ALL)
    parser.add_argument("--at", type=int, default=3, metavar="STEP")
    parser.add_argument("--times", type=int, default=0, help="of all starts; 0: each start")
    parser.add_argument("--first-start", action="store_true", help="only there")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--heartbeat", action="store_true")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="of collectives")
    options = parser.parse_args()
    if "RANK" not in os.environ:  # started by srun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    Path(f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    Training(options).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

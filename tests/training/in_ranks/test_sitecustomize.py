# SPDX-License-Identifier: Apache-2.0
"""A heartbeat that no line of the script says: seen on real interpreters and the real torch."""

import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from slurm_health.heartbeat import LAYOUT, MAGIC
from slurm_health.preflight.supervisor.monitor_process import heartbeat_environ

# Most start several interpreters, each of which loads torch, at once with other tests.
pytestmark = pytest.mark.timeout(300)

# What a rank's monitor would read, from inside: the steps of each heartbeat of this process.
LOOK = """
def beats():
    import os
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if "slurm-health-heartbeat " in os.readlink("/proc/self/fd/" + name) + " ":
                found.append(os.pread(int(name), 400, 0))
        except OSError:
            pass
    return [data.hex() for data in found if data]
"""
TRAINS = (
    LOOK
    + """
import torch
model = torch.nn.Linear(2, 2)
one, two = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
def train(steps, *optimizers):
    for _ in range(steps):
        for each in optimizers:
            model(torch.ones(1, 2)).sum().backward()
            each.step()
"""
)


def python(
    directory: Path, text: str, *, environ: Mapping[str, str] | None = None, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a script as a rank would be, with the variable that the supervisor sets."""
    told = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told |= {"PYTHONPATH": path} if path else {}
    told |= environ if environ is not None else heartbeat_environ(told)
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=directory,
        env=told,
        capture_output=True,
        text=True,
        check=False,
    )


def steps_in(said: str) -> list[int]:
    """How many steps the heartbeats tell that a script has printed."""
    counts = []
    for word in said.split():
        data = bytes.fromhex(word)
        assert data.startswith(MAGIC)
        counts.append(struct.unpack(LAYOUT.format, data[: LAYOUT.size])[4])
    return counts


def user_has(directory: Path, text: str) -> str:
    """Lay a sitecustomize of the user's; return its directory."""
    own = directory / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(text)
    return str(own)


def test_a_process_without_torch_is_as_it_would_be(tmp_path: Path) -> None:
    look = "import sys; print([p for p in sys.path if 'in_ranks' in p], sorted(sys.modules))"
    with_it, without = python(tmp_path, look), python(tmp_path, look, environ={})

    assert (with_it.returncode, with_it.stderr) == (0, "")
    assert with_it.stdout.startswith("[] ")
    assert set(eval(with_it.stdout[3:])) - set(eval(without.stdout[3:])) <= {"sitecustomize"}


def test_the_users_sitecustomize_is_loaded_as_it_would_be(tmp_path: Path) -> None:
    own = user_has(tmp_path, "import sys; sys.own_word = __file__")
    ran = python(
        tmp_path, "import sys, sitecustomize as s; print(sys.own_word, s.__file__)", path=own
    )

    assert ran.stderr == ""
    assert ran.stdout.split() == [f"{own}/sitecustomize.py"] * 2


@pytest.mark.parametrize("fault", ["1 / 0", "import not_there_at_all", "def broken("])
def test_what_the_users_sitecustomize_raises_is_told_as_it_would_be(
    tmp_path: Path, fault: str
) -> None:
    own = user_has(tmp_path, fault)
    ran = python(tmp_path, "print('runs')", path=own)
    alone = python(tmp_path, "print('runs')", path=own, environ={})

    assert (ran.returncode, ran.stdout) == (alone.returncode, alone.stdout)
    assert ran.stderr.splitlines()[0] == alone.stderr.splitlines()[0]
    assert ran.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    "optimizer",
    ["", "def register_optimizer_step_post_hook(hook): raise OSError", "raise ImportError('no')"],
    ids=["knows no hook", "refuses it", "cannot be loaded"],
)
def test_a_torch_that_is_not_as_expected_is_imported_as_it_would_be(
    tmp_path: Path, optimizer: str
) -> None:
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    for directory in (package, package.parent):
        (directory / "__init__.py").touch()
    (package / "optimizer.py").write_text(optimizer)
    text = "import torch.optim.optimizer as o; print(o.__spec__.loader.__dict__.keys())"
    ran, alone = python(tmp_path, text), python(tmp_path, text, environ={})

    assert (ran.returncode, ran.stdout) == (alone.returncode, alone.stdout)
    assert ran.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


PACKAGE = Path(__file__).parents[3] / "slurm_health"
OF_OURS = PACKAGE / "preflight" / "probes" / "worker.py"
BEATS = """
from {0} import heartbeat
for step in range(7):
    train(1, one)
    heartbeat.step(step)
"""


@pytest.mark.torch
@pytest.mark.parametrize(
    ("trains", "steps"),
    [
        # The first two are left to a heartbeat of the script's own.
        pytest.param("train(5, one)", [3], id="an optimizer", marks=pytest.mark.heavy),
        pytest.param(
            "train(5, one, two); train(2, two)", [5], id="several", marks=pytest.mark.slow
        ),
        pytest.param(BEATS.format("slurm_health"), [7], id="own", marks=pytest.mark.heavy),
        pytest.param(BEATS.format("copied"), [7], id="own copy", marks=pytest.mark.heavy),
        pytest.param(
            f"train(5, one){BEATS.format('slurm_health')}", [7], id="late", marks=pytest.mark.slow
        ),
        pytest.param(
            f"import __main__\n__main__.__file__ = {str(OF_OURS)!r}\ntrain(5, one)",
            [],
            id="a probe of ours",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_are_those_of_the_busiest_optimizer_unless_the_script_has_a_heartbeat_of_its_own(
    tmp_path: Path, trains: str, steps: list[int]
) -> None:
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "heartbeat.py").write_text((PACKAGE / "heartbeat.py").read_text())
    ran = python(tmp_path, f"{TRAINS}\n{trains}\nprint(*beats())")

    assert (ran.returncode, steps_in(ran.stdout)) == (0, steps), ran.stderr


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(400)  # what compiles takes ten seconds of a processor to load
def test_a_compiled_step_runs_as_it_would(tmp_path: Path) -> None:
    text = TRAINS + (
        "import sys\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "step = torch.compile(one.step, backend='eager')\n"
        "for _ in range(6): step()\n"
        "print([p.tolist() for p in model.parameters()][0] != 0)"
    )
    ran = python(tmp_path, text)

    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr

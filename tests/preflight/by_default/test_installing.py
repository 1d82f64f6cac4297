# SPDX-License-Identifier: Apache-2.0

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_health.node.rules.settings import Default
from slurm_health.preflight.by_default import installing
from slurm_health.preflight.sbatch import script
from tests.support.supervised import write_executable

ON = {"JobSubmitPlugins": "lua"}


def lua(rules: Default | None = None, python: str = "/opt/slurm-health/bin/python") -> str:
    return installing.lua(rules or Default(), python=python, flags=["-P"], site="/etc/x.toml")


def advice(directory: Path, config: dict[str, str], text: str) -> list[str]:
    found = installing.advise(directory, config, Default(min_nodes=4), text)
    return [each.text for each in found]


def test_rules_are_written_as_lua() -> None:
    text = lua(Default(min_nodes=4, partitions=("gpu", 'a"b'), opt_out="no"))

    assert "min_nodes = 4,\n" in text
    assert r'partitions = { ["gpu"] = true, ["a\034b"] = true, },' in text
    assert 'opt_out = "no",\n' in text
    assert "@" not in text.replace('"$@"', "")


def test_a_string_of_lua_holds_any_bytes() -> None:
    assert installing.lua_string(b'a"\\\xe9\n') == '"a\\034\\092\\233\\010"'
    assert installing.lua_string(b"one\ntwo\n") == "[==[\none\ntwo\n]==]"
    assert installing.lua_string(b"a\n]==]") == '"a\\010]==]"'


def test_a_loader_of_the_site_s_own_stays(tmp_path: Path) -> None:
    own = tmp_path / installing.LOADER
    text = f"-- ours since 2019\npcall(dofile, '{tmp_path}/{installing.CHECK}')\n"
    own.write_text(text)

    done = installing.install(tmp_path, lua())
    removed = installing.remove(tmp_path, is_loaded=False)

    assert done.written == removed.removed == (tmp_path / installing.CHECK,)
    assert f'pcall(dofile, "{tmp_path}/slurm-health.lua")' in done.left
    assert "take the lines" in removed.left
    assert own.read_text() == text


def test_what_was_written_is_taken_away_once_slurmctld_does_not_load_it(tmp_path: Path) -> None:
    installing.install(tmp_path, lua())

    assert installing.remove(tmp_path, is_loaded=True).left
    assert [path.name for path in tmp_path.iterdir()] == [installing.LOADER]
    assert not installing.remove(tmp_path, is_loaded=False).left
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("there", "line"), [("", "lua"), ("throttle", "throttle,lua"), ("lua", "lua")]
)
def test_the_line_of_slurm_conf_keeps_what_is_there(there: str, line: str) -> None:
    assert installing.plugin_line({"JobSubmitPlugins": there}) == f"JobSubmitPlugins={line}"


def test_doctor_says_what_keeps_jobs_from_being_checked(tmp_path: Path) -> None:
    assert "is not on this machine" in advice(tmp_path, ON, lua())[0]
    installing.install(tmp_path, lua())
    assert "loads no Lua" in advice(tmp_path, {}, lua())[0]
    assert "checked by default" in advice(tmp_path, ON, lua())[0]
    assert "differs from what the config file" in advice(tmp_path, ON, lua(python="/new/python"))[0]
    (tmp_path / installing.LOADER).write_text("-- the site's own\n")
    assert "does not call" in advice(tmp_path, ON, lua())[0]
    (tmp_path / installing.LOADER).unlink()
    assert "does not start" in advice(tmp_path, ON, lua())[0]


@pytest.mark.parametrize("works", [False, True])
def test_the_launcher_runs_the_script_where_there_is_no_installation(
    tmp_path: Path, works: bool
) -> None:
    """One that is older has no module for this; it fails when asked for it."""
    python = tmp_path / "python"
    if works:
        write_executable(python, "#!/bin/sh\necho 'No module named by_default'; exit 1\n")
    launcher = script.by_default(
        template=script.read_template(by_default=True),
        python=str(python),
        flags=["-P"],
        rules="{}",
    )
    job = tmp_path / "job"
    job.write_bytes(launcher + b'#!/bin/sh\necho "$# $1"\nexit 7\n')
    job.chmod(0o755)
    environ = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}

    done = subprocess.run([job, "a b"], env=environ, capture_output=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (7, b"1 a b\n", b"")


def test_a_directory_that_is_not_there_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("")
    words = ["init", "default", str(tmp_path / "slrum"), f"--config={site}"]
    argv = [sys.executable, "-m", "slurm_health", *words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)

    assert done.returncode != 0
    assert "slrum is no directory: name the one with slurm.conf" in done.stderr
    assert not (tmp_path / "slrum").exists()


ASK_LUA = """
import ctypes, sys
lua = ctypes.CDLL("liblua5.1.so.0")
lua.luaL_newstate.restype = ctypes.c_void_p
state = ctypes.c_void_p(lua.luaL_newstate())
lua.luaL_openlibs(state)
code = open(sys.argv[1], "rb").read()
sys.exit(lua.luaL_loadstring(state, code) or lua.lua_pcall(state, 0, 0, 0))
"""


@pytest.mark.parametrize("begins", ["gpu", "gpu:", ":1", ",gpu"])
def test_what_a_hostile_user_asks_for_does_not_hold_slurmctld_up(
    tmp_path: Path, begins: str
) -> None:
    """In Lua itself; a pattern that began anew at each letter took minutes for this."""
    try:
        ctypes.CDLL("liblua5.1.so.0")  # of which Debian's Slurm is built
    except OSError:
        pytest.skip("no Lua 5.1")
    check = tmp_path / "check.lua"
    check.write_text(lua(Default(min_nodes=1, gpus=True)))
    code = tmp_path / "code.lua"
    code.write_text(
        f"slurm = {{ log_debug = error }}; local job = {{ script = '#!/bin/sh\\n',"
        f" tres_per_task = 'gpu' .. string.rep('{begins}', 500000) .. 'x' }}\n"
        f"dofile('{check}')(job, {{}}); assert(job.script ~= '#!/bin/sh\\n')"
    )
    argv = [sys.executable, "-c", ASK_LUA, str(code)]

    assert subprocess.run(argv, timeout=55, check=False).returncode == 0

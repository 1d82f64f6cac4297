# SPDX-License-Identifier: Apache-2.0
"""`slurm-health healthcheck`, and the config file as commands of administrators read it.

slurmd does not call this but the shims, which start `slurm_health.node.hooks` without click.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_health.cli.output import print_result
from slurm_health.records.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.rules.finding import CheckResult
    from slurm_health.node.site import Site

_F = TypeVar("_F", bound=Callable[..., Any])


def config_option(command: _F) -> _F:
    """Add the option that names the site's file."""
    return click.option(
        "--config",
        metavar="FILE",
        help="The site's file [default: SLURM_HEALTH_CONFIG, else /etc/slurm-health/config.toml].",
    )(command)


def load_site(config: str | None) -> Site:
    """Read the site's file: the named one, else the one all commands use.

    Raises:
        ConfigError: it cannot be read or trusted, or says something impossible.
    """
    from slurm_health.node.site import load
    from slurm_health.preflight.config import refuse_unreadable, site_file

    path = Path(config) if config else site_file(os.environ)
    if not _is_there(path):
        raise ConfigError(
            str(path),
            "",
            f"does not exist; on a healthy, idle node: slurm-health init config > {path}"
            " (documentation, admin/install.md), or name another file with --config",
        )
    return load(path, refuse_unreadable)


def site_if_any(config: str | None) -> Site | None:
    """Read the site's file; None where none is named and none is installed.

    Raises:
        ConfigError: as `load_site`.
    """
    from slurm_health.preflight.config import site_file

    if config is None and not _is_there(site_file(os.environ)):
        return None
    return load_site(config)


def _is_there(path: Path) -> bool:
    """Tell whether there is a file, or what keeps it from being looked at: reading it says what."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def check_context(context: str, site: Site) -> CheckContext:
    """Return what checks are told of this node and this moment, where a person runs them."""
    import msgspec

    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.state import returned_uptime_s

    # What checks remember belongs to the hooks; a person who looks must not move it.
    place = CheckContext(environ=dict(os.environ), now_s=time.time(), context=context)
    returned_s = returned_uptime_s(site.state, place.boot_time())
    return msgspec.structs.replace(place, returned_uptime_s=returned_s)


@click.command(short_help="Run this node's checks and print what they find.")
@config_option
@click.option(
    "--context",
    type=click.Choice(["prolog", "epilog", "healthcheck", "retest"]),
    default="healthcheck",
    show_default=True,
    help="Run the checks of this hook.",
)
@click.option("--explain", is_flag=True, help="Run nothing; say what would run here, and why.")
@click.option(
    "--act", is_flag=True, help="Drain and return to service, as HealthCheckProgram does."
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def healthcheck(config: str | None, context: str, explain: bool, act: bool, as_json: bool) -> int:
    """Run the checks that are configured for this node and print what they find.

    Nothing is drained or returned to service without --act. Exits 0 when the node is healthy, 1
    for a proven fault, 3 when something could not be measured or, with --act, when another health
    check is at work.
    """
    if act and explain:
        raise click.UsageError("--explain runs nothing: leave out --act")
    if act and context != "healthcheck":
        raise click.UsageError(
            f"--act does what HealthCheckProgram does: leave out --context {context}"
        )
    if act:
        return _act(config, as_json=as_json)
    from slurm_health.node.hooks import explain as texts
    from slurm_health.node.run import chosen, node_name, run_checks

    site = load_site(config)
    node = node_name(os.environ)
    partition = os.environ.get("SLURM_JOB_PARTITION")
    if explain:
        print_result(texts.explain(site, node, partition))
        return int(ExitCode.HEALTHY)
    checks = chosen(site.planned, context, node, partition)
    results = run_checks(checks, check_context(context, site))
    print_result(_results_json(results) if as_json else texts.results_text(results))
    return int(exit_code_of(results))


def _act(config: str | None, *, as_json: bool) -> int:
    from slurm_health.node.hooks import healthcheck as hook
    from slurm_health.node.hooks.__main__ import frame

    this = frame("healthcheck", load_site(config), os.environ)
    hook.run(this)
    if this.not_checked:  # which its log has said; a launcher that asks is not told of a pass
        return int(ExitCode.INCONCLUSIVE)
    if as_json:
        print_result(_results_json(this.results))
    return int(exit_code_of(this.results))


def _results_json(results: list[CheckResult]) -> str:
    import msgspec

    return json.dumps(msgspec.to_builtins(results), indent=2) + "\n"


def exit_code_of(results: list[CheckResult]) -> ExitCode:
    """Return how a command ends that shows these results."""
    from slurm_health.node.rules.finding import Status, node_faults

    if node_faults(results):
        return ExitCode.BAD_NODES
    if any(each.status is Status.INCONCLUSIVE for each in results):
        return ExitCode.INCONCLUSIVE
    return ExitCode.HEALTHY

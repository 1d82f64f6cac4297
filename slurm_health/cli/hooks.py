# SPDX-License-Identifier: Apache-2.0
"""`slurm-health healthcheck`, and the config file as commands of administrators read it.

slurmd does not call this but the shims, which start `slurm_health.node.hooks` without click.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_health.cli.options import config_option, json_option
from slurm_health.cli.output import print_answer, print_result
from slurm_health.records.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from slurm_health.node.checks.check import CheckContext
    from slurm_health.node.rules.finding import CheckResult
    from slurm_health.node.site import Site


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


@click.command()
@click.option("--explain", is_flag=True, help="Run nothing; say what would run here, and why.")
@json_option
@click.option(
    "--context",
    metavar="HOOK",
    type=click.Choice(["prolog", "epilog", "healthcheck", "retest"]),
    default="healthcheck",
    show_default=True,
    help="Run the checks of the prolog, epilog, healthcheck or retest.",
)
@config_option
def healthcheck(explain: bool, as_json: bool, context: str, config: str | None) -> int:
    """Run the checks that are configured for this node and print what they find.

    Nothing is drained or returned to service; HealthCheckProgram does that. Exits 0 if the node is
    healthy, 1 for a proven fault, 3 if something could not be measured.
    """
    from slurm_health.node.hooks import explain as texts
    from slurm_health.node.run import chosen, node_name, run_checks

    site, node = load_site(config), node_name(os.environ)
    partition = os.environ.get("SLURM_JOB_PARTITION")
    if explain:
        print_result(texts.explain(site, node, partition))
        return ExitCode.HEALTHY
    checks = chosen(site.planned, context, node, partition)
    results = run_checks(checks, check_context(context, site))
    text = texts.results_text(results)
    print_answer(results, text, as_json=as_json)
    return exit_code_of(results)


def exit_code_of(results: list[CheckResult]) -> ExitCode:
    """Return how a command ends that shows these results."""
    from slurm_health.node.rules.finding import Status, node_faults

    if node_faults(results):
        return ExitCode.BAD_NODES
    if any(result.status is Status.INCONCLUSIVE for result in results):
        return ExitCode.INCONCLUSIVE
    return ExitCode.HEALTHY

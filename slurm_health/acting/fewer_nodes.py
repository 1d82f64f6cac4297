# SPDX-License-Identifier: Apache-2.0
"""A waiting job that would make do with fewer nodes asks for no more than there are.

Slurm lets a job wait without end for nodes that are drained, and holds it as `BadConstraints` where
it excludes too many.
"""

from __future__ import annotations

from collections.abc import Collection

from slurm_health.slurm.client import Client
from slurm_health.slurm.parsing import Size


def ask_for_what_there_is(name: str, least: int, excluded: Collection[str], client: Client) -> int:
    """Let a waiting job ask for fewer nodes where too few are in use; return how many, 0 for as is.

    Args:
        name: the job, as Slurm's commands call it.
        least: how few nodes it makes do with.
        excluded: nodes that it must not run on.
        client: Slurm's commands.

    Raises:
        SlurmError: it was refused, or Slurm does not answer.
    """
    size = client.size(name)
    chosen = client.job(name).fields.get("Partition", "").split(",")
    partitions = client.partitions()
    names = {node for each in chosen if each in partitions for node in partitions[each].names}
    states = client.nodes(sorted(names - {*excluded})) if size.nodes > least and names else {}
    count = max(least, sum(not node.out_of_pool for node in states.values()))
    if not states or count >= size.nodes:
        return 0
    client.update_job(name, **fewer(size, count))
    return count


def fewer(size: Size, nodes: int) -> dict[str, str]:
    """Return the fields of a job of `size` once it asks for fewer nodes, each with as much.

    Slurm takes the nodes down by itself, but not the tasks and processors that follow from them:
    the job would then ask for more of each node than it has.
    """
    return {
        "NumTasks": str(-(-size.tasks * nodes // size.nodes)),
        "NumCPUs": str(-(-size.cpus * nodes // size.nodes)),
        "NumNodes": f"{nodes}-{size.nodes}",
    }

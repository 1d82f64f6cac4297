# SPDX-License-Identifier: Apache-2.0
"""In which smaller groups a node's devices are connected before all of them are.

A device that hangs in NCCL's initialisation holds up every other one of its group, and none of them
can tell which it is. So where a group has hung before, each device is connected by itself first,
then each with every other one of its node: who hangs then is known.
"""

from __future__ import annotations


def circles(local_rank: int, local_size: int) -> list[list[int]]:
    """Return the groups of a device, by local ranks, in the order in which they are formed.

    In each turn every device is in one group at most: in the first by itself, in the others with
    one other, as in a tournament (the circle method). Who has no partner in a turn has an empty
    group.
    """
    players = local_size + local_size % 2  # an odd one out plays against nobody
    found = [[local_rank]]
    for turn in range(players - 1 if local_size > 1 else 0):
        other = _opponent(local_rank, turn, players)
        found.append(sorted((local_rank, other)) if other < local_size else [])
    return found


def _opponent(player: int, turn: int, players: int) -> int:
    """Return with whom a player meets: all but the last go round in a circle."""
    last, circle = players - 1, players - 1
    if player == last:
        return next(each for each in range(circle) if 2 * each % circle == turn)
    other = (turn - player) % circle
    return last if other == player else other

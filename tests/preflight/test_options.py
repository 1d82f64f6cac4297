# SPDX-License-Identifier: Apache-2.0
"""One table of options for every place in which they can be given."""

from __future__ import annotations

import pytest

from slurm_health.preflight.localize import settings as localize
from slurm_health.preflight.options import (
    OPTIONS,
    Door,
    localize_choices,
    options_of,
    what_to_check,
)
from slurm_health.records.errors import ConfigError


@pytest.mark.parametrize("door", list(Door))
def test_what_may_be_set_of_localisation_can_be_set_at_every_door(door: Door) -> None:
    known = {option.key for option in options_of(door).values()}

    assert {option.name for option in localize.OPTIONS} <= known
    assert {"network_floor", "min_rounds", "expected_ms"} <= known


@pytest.mark.parametrize("door", list(Door))
def test_no_door_has_an_option_twice(door: Door) -> None:
    assert len(options_of(door)) == sum(door in option.doors for option in OPTIONS)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("check", "quick,matmul"),
        ("journal", "/shared/journal"),
        ("python", "python3.12"),
        ("setup", "/home/alice/train-env.sh"),
        ("max-requeues", "0"),
        ("on-straggler", "drain"),
        ("network-floor", "0.3"),
        ("min-rounds", "6"),
        ("expected-ms", "matmul=3.1,allgather=50"),
        ("min-nodes", "3"),
        ("round-deadline", "7.5"),
    ],
)
def test_a_value_reads_back_as_itself_in_the_job(name: str, text: str) -> None:
    kind = options_of(Door.SBATCH)[name].kind

    assert str(kind.read(text)) == text
    assert kind.read(str(kind.read(text))) == kind.read(text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("network-floor", "8%", "expected a number from 0.01 to 3, 0.08 for 8 %, found '8%'"),
        ("min-rounds", "0", "expected a whole number of at least 1, found '0'"),
        ("expected-ms", "matmul", "expected milliseconds above 0 by metric"),
        ("max-requeues", "-1", "expected a whole number, 0 or more, found '-1'"),
        ("round-deadline", "0", "expected seconds, from 1 to 3600, found '0'"),
        ("round-deadline", "1h", "expected seconds, from 1 to 3600, found '1h'"),
        ("min-nodes", "0", "at least one node is needed"),
        ("network-check", "maybe", "expected yes or no, found 'maybe'"),
        ("at-requeue-limit", "go", "'go' is not one of start, hold, stop"),
    ],
)
def test_an_impossible_value_is_named_with_where_it_stands(name: str, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options_of(Door.SCRIPT)[name].parsed(text, "train.sh, line 3", f"--{name}")

    assert str(caught.value).startswith(f"train.sh, line 3: --{name}: {said}")


@pytest.mark.parametrize(
    ("settings", "checked"),
    [
        ({}, "auto"),
        ({"network-check": True}, "network-check"),
        ({"network-check": False}, "auto"),
        ({"check": "quick", "straggler-detection": True}, "quick,straggler-detection"),
        ({"check": "off", "network-check": True}, "off"),
    ],
)
def test_flags_stand_beside_what_is_named(settings: dict[str, object], checked: str) -> None:
    assert what_to_check(settings) == checked


def test_only_what_was_given_is_chosen_whatever_the_spelling_of_its_name() -> None:
    given = {"min-rounds": "4", "network_floor": "0.2", "expected_ms": None, "journal": "/j"}

    assert localize_choices(given) == {"min_rounds": "4", "network_floor": "0.2"}

# SPDX-License-Identifier: Apache-2.0
"""What a site's history says against nodes, as a file and as the prior of a check."""

import pytest

from slurm_health.fleet.standing import Standing, published
from slurm_health.preflight.localize import Localizer
from slurm_health.records.standings import OLD_S, Reliability, known_of, prior_of, read

NOW_S = 1_700_000_000.0


def standing(node: str, level: Reliability, score: float, *, spoiled: int = 5) -> Standing:
    return Standing(
        node=node,
        level=level,
        score=score,
        chance=0.01,
        jobs=20,
        spoiled=spoiled,
        elsewhere_jobs=100,
        elsewhere_spoiled=1,
        signals={"slow": spoiled},
        reason="again and again",
    )


FLEET = [
    standing("n1", Reliability.LEMON, 64.0),
    standing("n2", Reliability.LEMON, 12.5),
    standing("n3", Reliability.SUSPECT, 40.0),
    standing("n4", Reliability.CLEAR, 2.0, spoiled=0),
    standing("n5", Reliability.UNKNOWN, 2.0, spoiled=0),
]


def test_a_file_holds_what_speaks_against_nodes_and_convicts_none() -> None:
    found = read(published({"lab": FLEET}, now_s=NOW_S), now_s=NOW_S)

    known = known_of(found, "lab", [f"n{number}" for number in range(1, 9)])
    prior = prior_of(known)

    assert (known["n1"].jobs, known["n1"].spoiled) == (20, 5)
    assert known_of(found, "other", ["n1"]) == {}
    assert prior == {"n1": 0.3, "n2": 0.125, "n3": 0.1}
    Localizer(["n1", "n2", "n3", "n4"], prior=prior)


def test_a_file_that_cron_has_forgotten_is_too_old() -> None:
    data = published({"lab": FLEET}, now_s=NOW_S)

    read(data, now_s=NOW_S + OLD_S)
    with pytest.raises(ValueError, match="written 7 days ago"):
        read(data, now_s=NOW_S + OLD_S + 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (published({"lab": FLEET}, now_s=NOW_S)[:100], "damaged"),
        (b'{"version": 2, "written_s": 0, "clusters": {}}', "version 2"),
        (b'{"version": 1, "written_s": "x", "clusters": {}}', "damaged"),
        (
            published({"lab": [standing("n1", Reliability.LEMON, 101.0)]}, now_s=NOW_S),
            "damaged",
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_why(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(data, now_s=0.0)

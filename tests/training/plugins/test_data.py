# SPDX-License-Identifier: Apache-2.0
"""What collectors collected is kept by kind and time, and forgotten."""

from __future__ import annotations

import time

from slurm_health.training.plugins import DataCollector, DataManager


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Temperatures(DataCollector):
    def is_enabled(self) -> bool:
        return True

    def collect_data(self) -> object:
        return [60, 61]


class Named(Temperatures):
    kind = "heat"


def test_a_collector_is_called_as_its_class_unless_it_says_otherwise() -> None:
    assert (Temperatures().kind, Named().kind) == ("Temperatures", "heat")


def test_data_of_a_kind_is_kept_in_the_order_of_its_times() -> None:
    clock = Clock()
    manager = DataManager(clock)
    manager.store("heat", 62)
    manager.store("heat", 60, time_s=990.0)
    manager.store("power", 300)

    assert [(each.time_s, each.data) for each in manager.get("heat")] == [(990.0, 60), (1000.0, 62)]
    assert (manager.latest("heat"), manager.latest("power")) == (62, 300)
    assert manager.latest("noise") is None


def test_what_is_older_than_it_is_kept_for_is_forgotten() -> None:
    clock = Clock()
    manager = DataManager(clock, keep_s=10.0)
    manager.store("heat", 60)
    clock.now_s += 10.0
    manager.store("heat", 61)
    assert len(manager.get("heat")) == 2
    clock.now_s += 0.5

    assert [each.data for each in manager.get("heat")] == [61]


def test_a_manager_without_a_clock_goes_by_the_machines() -> None:
    before_s = time.time()
    manager = DataManager()
    manager.store("heat", 60, time_s=before_s - 601)
    manager.store("heat", 61)
    (kept,) = manager.get("heat")

    assert kept.data == 61
    assert before_s <= kept.time_s <= time.time()


class Inherits(DataCollector):
    def is_enabled(self) -> bool:
        return super().is_enabled()

    def collect_data(self) -> object:
        return None


def test_a_collector_that_asks_what_is_inherited_is_enabled() -> None:
    assert Inherits().is_enabled()


def test_of_very_many_of_a_kind_the_latest_are_kept() -> None:
    manager = DataManager(Clock(), most=3)
    for number in range(10):
        manager.store("heat", number)

    assert [each.data for each in manager.get("heat")] == [7, 8, 9]

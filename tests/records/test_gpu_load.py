# SPDX-License-Identifier: Apache-2.0
"""From what GPUs said under load to what is worth saying of them."""

import msgspec

from slurm_health.records.gpu_load import (
    Burn,
    DeviceSample,
    NotSampled,
    decode,
    summarise,
    those_of,
    words,
    words_of_all,
)
from tests.support.rows import rows

UUID = "GPU-6f3c"


def burn(**series: list[object]) -> Burn:
    """Summarise one GPU, sampled four times a second; the last value of a series stays."""
    length = max(len(values) for values in series.values())
    samples = [
        DeviceSample(
            at_s=100 + place / 4,
            index=3,
            uuid=UUID,
            **{name: values[min(place, len(values) - 1)] for name, values in series.items()},  # type: ignore[arg-type]
        )
        for place in range(length)
    ]
    (found,) = summarise(samples)
    return found


def steady(value: object, times: int = 20) -> list[object]:
    return [value] * times


def test_a_gpu_that_is_well_gives_no_words() -> None:
    well = burn(clock_mhz=steady(1980), reasons=[0], temperature_c=[45, 60, 66], power_w=[690.0])

    assert words(well) == []
    assert well.clock_mhz == 1980
    assert well.clock_slope_mhz_per_s == 0
    assert well.max_temperature_c == 66
    assert well.power_w == 690


def test_a_hot_gpu_is_named_with_its_clocks_and_its_temperature() -> None:
    hot = burn(
        clock_mhz=[1980, 1980, 1980, 1980, *range(1960, 1410, -50), *steady(1410, 4)],
        reasons=[0, 0, 0, 0, 0x48],
        temperature_c=[60, 70, 80, 89, 88],
    )

    (said,) = words(hot)
    assert said == (
        "GPU 3 (GPU-6f3c): hardware thermal slowdown during the burn,"
        " clock 1,980 -> 1,410 MHz, 89 C"
    )
    assert hot.clock_slope_mhz_per_s is not None
    assert hot.clock_slope_mhz_per_s < -100


@rows
def test_each_reason_has_its_words(reasons: int, said: str) -> None:
    assert said in words(burn(reasons=steady(reasons)))[0]


@rows
def test_what_was_there_before_the_burn_is_not_told(series: dict[str, list[object]]) -> None:
    assert words(burn(**series)) == []


def test_clocks_between_two_loads_do_not_count_a_blink_is_kept_and_a_counter_begins_again() -> None:
    paused = burn(clock_mhz=[1980, 345, 345, 345, 1980], reasons=[0, 1, 1, 1, 0])

    assert paused.clock_mhz == paused.first_clock_mhz == paused.last_clock_mhz == 1980
    assert paused.reasons == 0
    assert burn(clock_mhz=steady(1980), reasons=[0, 0x8, 0]).reason_samples == {0x8: 1}
    assert burn(uncorrected=[9, 0, 1]).uncorrected == 1


def test_gpus_are_summarised_apart_and_one_that_is_lost_keeps_its_name() -> None:
    lost = DeviceSample(at_s=2, index=3, lost="GPU is lost")
    samples = [
        DeviceSample(at_s=1, index=index, uuid=UUID, clock_mhz=1000 + index) for index in (3, 0)
    ]

    well, gone = summarise([*samples, lost])

    assert (well.index, well.clock_mhz) == (0, 1000)
    assert words(gone) == ["GPU 3 (GPU-6f3c): lost during the burn: GPU is lost"]


@rows
def test_counters_that_grow_are_reported(series: dict[str, list[object]], said: str) -> None:
    assert said in " ".join(words(burn(**series)))


def test_a_gpu_that_tells_nothing_is_not_accused() -> None:
    silent = burn(clock_mhz=[None, None])
    assert words(burn(uncorrected=[None, 3])) == []

    assert words(silent) == []
    assert silent.clock_mhz is None
    assert silent.clock_slope_mhz_per_s is None
    assert silent.max_temperature_c is None


@rows
def test_other_jobs_gpus_are_not_held_against_a_node(uuids: set[str], seen: list[int]) -> None:
    burns = [
        Burn(index=index, uuid=uuid, bus="", samples=9)
        for index, uuid in enumerate(["GPU-a", "GPU-b", ""])
    ]

    assert [each.index for each in those_of(uuids, burns)] == seen


def test_what_shows_in_several_burns_is_said_once() -> None:
    first = burn(clock_mhz=[1980, *steady(1410)], reasons=[0x40])
    again = burn(clock_mhz=steady(1410), reasons=[0x40], remapped_rows=[0, 1])

    said = words_of_all([first, again])

    assert len(said) == 2
    assert "hardware thermal slowdown during the burn, clock" in said[0]
    assert "1 memory row remapped" in said[1]


def test_lines_come_back_and_torn_ones_are_skipped() -> None:
    sample = DeviceSample(at_s=1.25, index=0, uuid=UUID, clock_mhz=1980, remap_pending=False)
    line = msgspec.json.encode(sample)

    assert decode(line) == sample
    assert decode(line[:-4]) is None
    assert decode(b"") is None
    assert decode(b'{"not_sampled": "no driver"}') == NotSampled(not_sampled="no driver")

"""Chips: the shipped files are complete, and a number without a source is refused."""

import pytest
from support.h200 import CHIP

from megakernel.config import ConfigError, parse, read_toml
from megakernel.hardware import HardwareSpec, load_hardware


@pytest.mark.parametrize("name", ["h200.toml", "h100-sxm.toml"])
def test_shipped_chips_load(name):
    chip = load_hardware(CHIP.with_name(name))
    assert chip.num_sms == 132
    assert chip.streaming_bytes_per_ns < chip.datasheet_bytes_per_ns


def test_a_number_without_its_source_is_refused():
    data = read_toml(CHIP)
    del data["sources"]["costs.issue_ns"]
    with pytest.raises(ConfigError, match=r"no source is given for costs\.issue_ns"):
        parse(data, HardwareSpec, "chip.toml")


def test_a_source_of_nothing_is_refused():
    data = read_toml(CHIP)
    data["sources"]["costs.isue_ns"] = "?"
    with pytest.raises(ConfigError, match="isue_ns, which is no number"):
        parse(data, HardwareSpec, "chip.toml")


def test_ceilings_rise_to_all_sms():
    data = read_toml(CHIP)
    data["ceilings"].pop()
    with pytest.raises(ConfigError, match="up to 132"):
        parse(data, HardwareSpec, "chip.toml")


def test_ceilings_are_interpolated():
    chip = load_hardware(CHIP)
    assert chip.ceiling_bytes_per_ns(1) == 180
    assert chip.ceiling_bytes_per_ns(24) == pytest.approx((2185 + 3595) / 2)
    assert chip.ceiling_bytes_per_ns(132) == 4588

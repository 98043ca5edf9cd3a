"""A measurement file is checked before anything is allocated on a card."""

import pytest

from megakernel.assets import asset
from megakernel.config import ConfigError

pytest.importorskip("cuda.core", reason="needs the launcher of the runtime extra")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("positions = [8191]", "positions = [8192]", "needed at most 1 from 0 to 8191"),
        ("positions = [8191]", "positions = [-5]", "needed at most 1 from 0 to 8191"),
        ("positions = [8191]", "positions = [1, 2]", "needed at most 1 from 0 to 8191"),
        ('name = "hand, uncapped"', 'name = "hand"', "needed a name of its own for each"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused(tmp_path, old, new, message):
    from runtime.gpu.campaign import read_campaign

    text = asset("configs/measure/north-h200.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "measure.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        read_campaign(path)

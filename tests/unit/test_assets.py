"""Shipped files are found from anywhere, and a user's own file comes first."""

import pytest

from megakernel.assets import asset, locate
from megakernel.config import ConfigError
from megakernel.families import read_model

NORTH = "configs/models/CohereLabs--North-Mini-Code-1.0.json"


def test_a_shipped_file_is_found_from_any_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate(NORTH) == asset(NORTH)
    assert asset("configs/models").is_dir()


def test_a_file_of_the_same_name_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / NORTH
    own.parent.mkdir(parents=True)
    own.touch()
    assert locate(NORTH).resolve() == own


@pytest.mark.parametrize("given", ["mine.json", "/no/such.json", "configs/../secret", "x" * 300, "a\0b", ""])
def test_any_other_path_is_left_to_its_reader(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        read_model(locate(given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("configs/models/CohereLabs--North-Mini-Cod-1.0.json", f"did you mean `{NORTH.rpartition('/')[2]}`?"),
        ("configs/modles/x.json", "no such file, neither here nor shipped"),
    ],
)
def test_a_misspelt_shipped_name_is_answered_with_the_nearest(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        locate(given)
    assert str(caught.value).startswith(f"{given}: ")
    assert message in str(caught.value)


def test_a_missing_asset_says_where_it_was_looked_for():
    with pytest.raises(ConfigError, match=r"csrc/nope\.cuh: not among the files shipped"):
        asset("csrc/nope.cuh")

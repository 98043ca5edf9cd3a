"""What a user sees when a file, a flag or an output path is wrong, and that good input passes unchanged."""

import json
import os
import stat
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from megakernel.config import (
    ConfigError,
    Frozen,
    canonical_json,
    check_writable,
    digest,
    load_json,
    load_toml,
    override,
    parse,
    pretty_json,
    write_text_atomic,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Round(Frozen):
    kind: Literal["round"]
    radius_ns: int = Field(gt=0)


class Square(Frozen):
    kind: Literal["square"]
    width_ns: int


class Part(Frozen):
    name: str
    weight: float = 1.0


class Sample(Frozen):
    count: int
    ratio: float = 0.5
    limit: int | None = None
    colour: Colour = Colour.RED
    sizes: tuple[int, ...] = ()
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    shape: Annotated[Round | Square, Field(discriminator="kind")] | None = None

    @model_validator(mode="after")
    def _limit_covers_count(self):
        if self.limit is not None and self.limit < self.count:
            raise ValueError(f"limit {self.limit} is below count {self.count}")
        return self


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sample.toml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(call, *args) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*args)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ reading


def test_toml_and_json_with_the_same_content_give_the_same_model(tmp_path):
    text = """
        count = 3
        ratio = 2
        colour = "blue"
        sizes = [1, 2]
        part = { name = "a" }
        parts = [{ name = "b", weight = 2.5 }]
        shape = { kind = "round", radius_ns = 7 }
    """
    expected = Sample(
        count=3,
        ratio=2.0,
        colour=Colour.BLUE,
        sizes=(1, 2),
        part=Part(name="a"),
        parts=(Part(name="b", weight=2.5),),
        shape=Round(kind="round", radius_ns=7),
    )
    from_toml = load_toml(toml(tmp_path, text), Sample)
    as_json = tmp_path / "sample.json"
    as_json.write_text(pretty_json(from_toml), encoding="utf-8")
    assert from_toml == load_json(as_json, Sample) == expected


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "sample.json"
    path.write_bytes(b'\xef\xbb\xbf{"count": 1}')
    assert load_json(path, Sample).count == 1


def test_a_model_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        Sample(count=1).count = 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count = 1\nsize = [1]", "unknown key `size`; did you mean `sizes`?"),
        ("coun = 1", "unknown key `coun`; did you mean `count`?"),
        ("count = 1\nzzzzzz = 1", "unknown key `zzzzzz`; known here: `colour`, `count`, `limit`"),
        ("count = 1\npart = { nam = 'x' }", "unknown key `part.nam`; did you mean `name`?"),
        ("count = 1\nparts = [{ name = 'x', wight = 1 }]", "`parts.0.wight`; did you mean `weight`?"),
        (
            "count = 1\nshape = { kind = 'round', radius_ns = 1, radius = 2 }",
            "unknown key `shape.radius`; did you mean `radius_ns`?",
        ),
        ("count = 1\nshape = { kind = 'round' }", "`shape.radius_ns` is missing"),
        ("count = 1\nshape = { radius_ns = 1 }", "`shape` needs the key 'kind'"),
        ("count = 1\nshape = { kind = 'oval' }", "expected tags: 'round', 'square'"),
        ("count = 1\nshape = { kind = 'round', radius_ns = 0 }", "`shape.radius_ns` must be greater than 0"),
        ("count = '3'", '`count` must be a valid integer, found "3"'),
        ("count = 3.0", "`count` must be a valid integer, found 3.0"),
        ("count = true", "`count` must be a valid integer, found true"),
        ("count = 1\nratio = 'x'", '`ratio` must be a valid number, found "x"'),
        ("count = 1\nratio = inf", "`ratio` is inf; a finite number is needed"),
        ("count = 1\nratio = nan", "`ratio` is nan; a finite number is needed"),
        ("count = 1\nratio = 2024-01-01", "`ratio` is a date"),
        ("count = 1\ncolour = 'rouge'", "`colour` must be 'red' or 'blue', found \"rouge\""),
        ("count = 1\nsizes = [1, 'x']", '`sizes.1` must be a valid integer, found "x"'),
        ("count = 1\nsizes = 4", "`sizes` must be a valid array, found 4"),
        ("count = 9\nlimit = 1", "limit 1 is below count 9"),
        ("", "`count` is missing"),
        ("count = ", "not valid TOML: Invalid value (at"),
        ("count = 1\ncount = 2", "not valid TOML: Cannot overwrite a value (at"),
        ("a = " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("count = " + "9" * 5000, "not valid TOML"),
    ],
)
def test_a_wrong_toml_file_names_itself_the_key_and_what_is_needed(tmp_path, text, message):
    path = toml(tmp_path, text)
    said = refusal(load_toml, path, Sample)
    assert said.startswith(f"{path}:")
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"count": 1,}', "at line 1 column"),
        ('{"count": 1\n "ratio": 1}', "at line 2 column"),
        ("", "not valid JSON"),
        ('{"count": NaN}', "NaN is not a number"),
        ('{"count": -Infinity}', "-Infinity is not a number"),
        ('{"count": 1, "ratio": 1e999}', "`ratio` is inf; a finite number is needed"),
        ('{"count": 1, "count": 2}', "key `count` appears twice"),
        ('{"count": 1, "part": {"name": "a", "name": "b"}}', "key `name` appears twice"),
        ("[1]", "holds a JSON array at the top level; an object is needed"),
        ('"x"', "holds a JSON string at the top level"),
        ("null", "holds a JSON literal at the top level"),
        ("3", "holds a JSON number at the top level"),
        ("[" * 100000, "nested too deeply"),
        ('{"count": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"count": 1, "part": {"name": "\\ud800"}}', "`part.name` holds a lone surrogate"),
    ],
)
def test_a_wrong_json_file_names_itself_and_the_place(tmp_path, text, message):
    path = tmp_path / "sample.json"
    path.write_text(text, encoding="utf-8")
    said = refusal(load_json, path, Sample)
    assert said.startswith(f"{path}:")
    assert message in said


def test_every_problem_is_listed_once(tmp_path):
    said = refusal(load_toml, toml(tmp_path, "count = 'x'\nratio = 'y'\nsise = [1]"), Sample)
    assert said.splitlines() == [
        f"{tmp_path / 'sample.toml'}:",
        "  unknown key `sise`; did you mean `sizes`?",
        '  `count` must be a valid integer, found "x"',
        '  `ratio` must be a valid number, found "y"',
    ]


def test_a_missing_file_suggests_its_neighbour(tmp_path):
    path = toml(tmp_path, "count = 1")
    assert refusal(load_toml, tmp_path / "sampel.toml", Sample) == (
        f"{tmp_path / 'sampel.toml'}: no such file; did you mean `{path}`?"
    )
    assert refusal(load_toml, tmp_path / "no" / "x.toml", Sample).endswith("no such file")


def test_what_is_no_text_file_is_refused(tmp_path):
    assert "is a directory" in refusal(load_toml, tmp_path, Sample)
    assert "is a directory" in refusal(load_json, tmp_path, Sample)
    assert "cannot be read: " in refusal(load_json, "a\0b", Sample)
    assert "cannot be read: " in refusal(load_json, toml(tmp_path, "") / "below-a-file", Sample)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"count = 1 # \xff\xfe")
    assert refusal(load_toml, binary, Sample) == f"{binary}: not UTF-8 text (byte 12)"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["count", "part"]), inner),
    )
)
def test_any_plain_data_is_either_a_model_or_a_config_error(data):
    try:
        parse(data, Sample, "data")
    except ConfigError as error:
        said = str(error)
    else:
        return
    assert said.startswith(("data: ", "data:\n"))


# ---------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("assignment", "changed"),
    [
        ("count=5", {"count": 5}),
        (" count = 5", {"count": 5}),
        ("ratio=1e-3", {"ratio": 0.001}),
        ("colour=blue", {"colour": Colour.BLUE}),
        ('colour="blue"', {"colour": Colour.BLUE}),
        ("limit=null", {"limit": None}),
        ("sizes=[4, 5]", {"sizes": (4, 5)}),
        ("sizes.1=9", {"sizes": (1, 9)}),
        ("part.name=b=c", {"part": Part(name="b=c")}),
        ("part.name=2024-01-01", {"part": Part(name="2024-01-01")}),
        ('shape={kind="square", width_ns=2}', {"shape": Square(kind="square", width_ns=2)}),
        ("part.name='7'\nratio=9", {"part": Part(name="'7'\nratio=9")}),
    ],
)
def test_an_assignment_changes_only_its_key(assignment, changed):
    before = Sample(count=1, limit=100, sizes=(1, 2), part=Part(name="a"))
    assert override(before, [assignment]) == before.model_copy(update=changed)
    assert before == Sample(count=1, limit=100, sizes=(1, 2), part=Part(name="a"))


def test_assignments_apply_in_order_and_may_fill_an_absent_table():
    assert override(Sample(count=1), ["count=2", "count=3"]).count == 3
    assert override(Sample(count=1), ["part.name=x"]).part == Part(name="x")
    assert override(Sample(count=1), []) == Sample(count=1)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("coutn=1", "--set coutn=1: unknown key `coutn`; did you mean `count`?"),
        ("part.nmae=1", "unknown key `part.nmae`; did you mean `name`?"),
        ("count", "--set count: an assignment is written key=value or a.b=value"),
        ("=1", "an assignment is written key=value or a.b=value"),
        ("part..name=1", "an assignment is written key=value or a.b=value"),
        ("count=many", '`count` must be a valid integer, found "many"'),
        ("count.x=1", "`count.x` lies below 1, which has no keys"),
        ("sizes.7=1", "`sizes.7` is no position in a list of 2 (0 to 1)"),
        ("sizes.x=1", "`sizes.x` is no position in a list of 2"),
        ("parts.0.name=x", "`parts.0` is no position in an empty list"),
        ("ratio=inf", "`ratio` is inf; a finite number is needed"),
        ("limit=0", "limit 0 is below count 1"),
    ],
)
def test_a_wrong_assignment_is_refused_with_its_text(assignment, message):
    said = refusal(override, Sample(count=1, sizes=(1, 2), part=Part(name="a")), [assignment])
    assert said.startswith(f"--set {assignment}")
    assert message in said


def test_a_dict_keeps_its_keys():
    data: dict[str, object] = {"a": {"b": 1}, "c": [1]}
    assert override(data, ["a.b=2", "c.0=x"]) == {"a": {"b": 2}, "c": ["x"]}
    assert data == {"a": {"b": 1}, "c": [1]}
    assert refusal(override, data, ["a.d=2"]) == "--set a.d=2: unknown key `a.d`; known here: `b`"


def test_overrides_while_loading_may_supply_a_key_that_the_file_lacks(tmp_path):
    path = toml(tmp_path, "ratio = 0.25")
    assert load_toml(path, Sample, ["count=4"]) == Sample(count=4, ratio=0.25)
    assert refusal(load_toml, path, Sample, ["cout=4"]) == (
        f"{path} --set cout=4: unknown key `cout`; did you mean `count`?"
    )


# ------------------------------------------------------------------------------------------------ digests


def test_equal_values_have_equal_digests_whatever_their_order_or_container():
    assert canonical_json({"b": (1, 2.5), "a": None}) == '{"a":null,"b":[1,2.5]}'
    assert digest({"b": [1], "a": "é"}) == digest({"a": "é", "b": (1,)})
    assert digest(Part(name="x", weight=1)) == digest({"weight": 1.0, "name": "x"})
    assert digest({"a": 1}) != digest({"a": 2})
    assert digest({"c": Colour.RED}) == digest({"c": "red"})


def test_a_digest_is_the_same_on_every_machine():
    assert digest({}) == "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert digest(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object(), Path("x")])
def test_values_without_one_json_form_are_our_own_mistake(value):
    with pytest.raises(TypeError):
        canonical_json(value)


def test_canonical_json_refuses_nan():
    with pytest.raises(ValueError, match="JSON"):
        canonical_json([float("nan")])


@given(st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()))
def test_canonical_json_is_a_fixed_point(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert json.loads(pretty_json(value)) == json.loads(text)


# ------------------------------------------------------------------------------------------------ writing


def test_a_write_replaces_the_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "out.json"
    check_writable(path)
    assert not path.exists()
    write_text_atomic(path, "one\n")
    write_text_atomic(path, "two é\n")
    assert path.read_bytes() == "two é\n".encode()
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path):
    path = tmp_path / "out"
    write_text_atomic(path, "x")
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)
    path.chmod(0o640)
    write_text_atomic(path, "y")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_followed(tmp_path):
    (tmp_path / "real").write_text("old", encoding="utf-8")
    (tmp_path / "link").symlink_to("real")
    write_text_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text(encoding="utf-8") == "new"


def test_a_device_is_written_through_and_not_replaced():
    check_writable("/dev/null")
    write_text_atomic("/dev/null", "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.write_text("old", encoding="utf-8")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert refusal(write_text_atomic, path, "new") == f"{path}: cannot be written: No space left on device"
    assert path.read_text(encoding="utf-8") == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_an_output_that_cannot_be_written_is_refused_before_and_at_the_write(tmp_path):
    (tmp_path / "file").touch()
    wrong = {
        tmp_path: "is a directory",
        tmp_path / "no" / "out": f"the directory {tmp_path / 'no'} does not exist",
        tmp_path / "file" / "out": "is not a directory",
        tmp_path / ("x" * 300): "cannot be written: File name too long",
        "": "is a directory",
        "a\0b": "cannot be written: ",
        "/dev/no-such-directory/x": "does not exist",
    }
    for path, message in wrong.items():
        assert message in refusal(check_writable, path)
        assert message in refusal(write_text_atomic, path, "x")


def test_a_read_only_file_is_not_replaced_behind_its_owners_back(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.touch(mode=0o444)
    # Root may write to everything, so the answer for any other user is put in place.
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    assert "read-only" in refusal(check_writable, path)

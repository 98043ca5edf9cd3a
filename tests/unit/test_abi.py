"""Host and device agree: the committed header is what is printed, and its arithmetic computes what Python does."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import north

from megakernel.abi import HEADER, RECORD, STRUCTS
from megakernel.assets import asset
from megakernel.config import ConfigError
from megakernel.header import render
from megakernel.live import LIVE_FUNCTIONS
from megakernel.table import TaskTable


def test_the_committed_header_is_what_the_host_packs() -> None:
    assert asset("csrc/abi.cuh").read_text(encoding="utf-8") == render()


def test_records_are_whole_16_byte_loads() -> None:
    assert RECORD.dtype.itemsize % 16 == 0
    for struct in STRUCTS:
        assert struct.dtype.itemsize % 4 == 0


def test_generated_arithmetic_computes_what_python_does(tmp_path: Path) -> None:
    generator = random.Random(7)
    lines, expected = [], []
    for function in LIVE_FUNCTIONS:
        arity = function.__code__.co_argcount
        for _ in range(200):
            arguments = [generator.randrange(0, 5000) for _ in range(arity)]
            arguments[-1] = max(arguments[-1], 1)  # the last argument of each is a divisor or a count
            if function.__name__ in {"chunk_begin", "attend_units"}:
                arguments[-2] = max(arguments[-2], 1)
                arguments[1 if function.__name__ == "chunk_begin" else 2] = generator.choice([0, 1, 64, 4096])
                if function.__name__ == "attend_units":
                    arguments[3] = max(arguments[3], 1)
            lines.append(f'  std::printf("%u\\n", mk::abi::{function.__name__}({", ".join(map(str, arguments))}));')
            expected.append(function(*arguments))
    source = tmp_path / "live.cpp"
    source.write_text(
        f'#include "{asset("csrc/abi.cuh")}"\n#include <cstdio>\nint main() {{\n' + "\n".join(lines) + "\n}\n"
    )
    program = tmp_path / "live"
    subprocess.run(["g++", "-std=c++17", "-O1", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    assert [int(value) for value in printed] == expected


def test_a_table_survives_serialisation() -> None:
    table = north.step().table
    again = TaskTable.from_bytes(table.to_bytes())
    assert again.digest == table.digest
    assert np.array_equal(again.records, table.records)
    assert again.num_sms == 132


@pytest.mark.parametrize(("at", "value"), [(0, 1), (5, 2**32 - 1), (132, 7), (132, 2**32 - 1)])
def test_lists_that_do_not_cover_the_records_are_refused(at: int, value: int) -> None:
    table = north.step().table
    offsets = table.offsets.copy()
    offsets[at] = value
    with pytest.raises(ConfigError, match="must rise from 0 to the 34574 records"):
        TaskTable.from_bytes(replace(table, offsets=offsets).to_bytes())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:10], "needed at least"),
        (lambda data: b"\0" * 4 + data[4:], "not a task table"),
        (lambda data: data[:-1], "its header says"),
        (lambda data: data + b"\0", "its header says"),
    ],
)
def test_damaged_tables_are_refused(damage: object, message: str) -> None:
    data = north.step().table.to_bytes()
    with pytest.raises(ConfigError, match=message):
        TaskTable.from_bytes(damage(data))  # type: ignore[operator]


def test_header_size_is_a_whole_number_of_words() -> None:
    assert HEADER.dtype.itemsize % 4 == 0

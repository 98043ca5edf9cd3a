"""A model from a Hugging Face folder: its spec from config.json, its tensors from safetensors files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakernel.config import ConfigError

INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, Tensor]):
    """Tensors of a folder by name, each, or some of its rows, read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """ConfigError where the folder has no safetensors, an index names a missing file, or a file is damaged."""
        self._opened: tuple[Path, safe_open] | None = None
        self._file_of = {name: path for path in _files(folder) for name in _names(path)}

    def __getitem__(self, name: str) -> Tensor:
        return self._open(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, which is not read."""
        return tuple(self._open(name).get_slice(name).get_shape())

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows of a tensor's first dimension."""
        return self._open(name).get_slice(name)[begin:end]

    def _open(self, name: str) -> safe_open:
        """The tensor's file, which stays open until one of another file is asked for."""
        path = self._file_of[name]
        if self._opened is None or self._opened[0] != path:
            self._opened = path, safe_open(path, framework="pt")
        return self._opened[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index}: no weight_map of tensors to files can be read from it") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"{index} names {missing[0]}, which is not in the folder")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{folder}: no *.safetensors here, needed the weights of a Hugging Face checkpoint")
    return found


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise ConfigError(f"{path}: {error}; the file is damaged or not complete") from error

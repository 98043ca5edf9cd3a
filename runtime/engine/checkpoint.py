"""A model from a Hugging Face folder: its spec from config.json, its tensors from safetensors files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megakernel.config import ConfigError
from megakernel.families import read_model
from megakernel.model import ModelSpec
from megakernel.tiling import Rounding
from runtime.weights import Weights, pack_weights

INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, Tensor]):
    """Tensors of a folder by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """ConfigError where the folder has no safetensors, an index names a missing file, or a file is damaged."""
        self._file_of = {name: path for path in _files(folder) for name in _names(path)}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def load_checkpoint(folder: str | Path, rounding: Rounding, dtype: torch.dtype) -> tuple[ModelSpec, Weights]:
    """A folder's model, packed; ConfigError says which file or tensor is missing or of the wrong shape."""
    model = read_model(Path(folder))
    return model, pack_weights(model, Checkpoint(Path(folder)), rounding, dtype)


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

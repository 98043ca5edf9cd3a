"""North Mini Code's geometry as a folder to serve with drawn weights: config, and a tokenizer that knows every id."""

from __future__ import annotations

import json
from pathlib import Path

from megakernel.assets import asset
from runtime.demo.checkpoint import write_tokenizer


def write_north(folder: Path) -> Path:
    """Write config.json, tokenizer and template; the demo's words, then a word of its own for every other id."""
    config = json.loads(asset("configs/models/CohereLabs--North-Mini-Code-1.0.json").read_text(encoding="utf-8"))
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    taken = set(vocabulary.values())
    vocabulary |= {f"Ġw{idx}": idx for idx in range(config["vocab_size"]) if idx not in taken}
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

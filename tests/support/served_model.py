"""A real checkpoint on a real backend behind the real application: the demo model, on the CPU or on a card."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import torch
from safetensors.torch import load_file, save_file
from support.serving import Script, Served

from runtime.demo import write_checkpoint
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.checkpoint import load_text
from runtime.server.config import ServeConfig
from runtime.server.loading import load_engine, place
from runtime.server.metrics import Metrics
from runtime.server.plan import under_plan
from runtime.server.service import Service


def write_rounded(folder: Path) -> Path:
    """The demo checkpoint in bfloat16, so that a card has the same weights as the CPU."""
    write_checkpoint(folder)
    path = folder / "model.safetensors"
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def open_service(folder: Path, **settings: Any) -> Service:
    """A service with its engine running; `settings` are the config's. The engine is to be closed."""
    config, plan = under_plan(ServeConfig(model=str(folder), **settings), folder)
    config = place(config, folder)
    text = load_text(folder, config)
    service = Service(config, text, Metrics(text.names[0]), plan=plan)
    service.engine = load_engine(folder, service)
    return service


@asynccontextmanager
async def client_of(service: Service) -> AsyncIterator[Served]:
    """The application without sockets; nothing may be left of any request afterwards."""
    transport = httpx.ASGITransport(app=make_app(service, KeyRing((), None), KeyRing((), None)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        served = Served(client, service, Script())
        yield served
        await served.idle(20.0)
        stats = served.engine.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert served.engine.error is None

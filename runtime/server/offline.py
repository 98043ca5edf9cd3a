"""One prompt without a server: the same text side and engine, the pieces of the answer as they come."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megakernel.config import ConfigError
from runtime.parsing import Content, Reasoning
from runtime.request import RefusedError
from runtime.server.chat import chat_wishes
from runtime.server.checkpoint import load_text
from runtime.server.choices import Run
from runtime.server.completions import encode_prompts, text_wishes
from runtime.server.config import ServeConfig
from runtime.server.errors import ApiError, from_validation
from runtime.server.loading import load_engine, place
from runtime.server.metrics import Metrics
from runtime.server.plan import under_plan
from runtime.server.prompts import render_chat
from runtime.server.protocol import ChatRequest, CompletionRequest
from runtime.server.requests import Identity, choices_of
from runtime.server.run import checkpoint_folder
from runtime.server.service import Service


def generate(config: ServeConfig, prompt: str, asked: dict[str, Any], *, raw: bool) -> Iterator[str]:
    """Yield the text of one answer, thinking included, from a card where there is one.

    ConfigError when the prompt is not taken, or the card can't run the model.
    """
    config = config.model_copy(update={"max_num_seqs": 1})
    with tempfile.TemporaryDirectory(prefix="counterpoint-demo-") as scratch, asyncio.Runner() as runner:
        folder = checkpoint_folder(config, Path(scratch))
        config, plan = under_plan(config, folder)
        config = place(config, folder)
        text = load_text(folder, config)
        service = Service(config, text, Metrics(text.names[0]), plan=plan)
        service.engine = load_engine(folder, service)
        pieces = _pieces(service, prompt, asked, raw=raw)
        try:
            while (piece := runner.run(anext(pieces, None))) is not None:
                yield piece
        except (ApiError, RefusedError) as error:
            raise ConfigError(str(error)) from None
        finally:
            runner.run(pieces.aclose())
            if service.engine is not None:
                service.engine.close()


async def _pieces(service: Service, prompt: str, asked: dict[str, Any], *, raw: bool) -> AsyncGenerator[str, None]:
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        if raw:
            body = CompletionRequest.model_validate({"prompt": prompt, **given})
        else:
            body = ChatRequest.model_validate({"messages": [{"role": "user", "content": prompt}], **given})
    except ValidationError as error:
        raise from_validation(error) from None
    if isinstance(body, CompletionRequest):
        tokens, wishes = (await encode_prompts(service, body))[0], await text_wishes(service, body)
    else:
        tokens = (await render_chat(service, body)).tokens
        wishes = await chat_wishes(service, body, tokens)
    choices = choices_of(service, body, Identity.new("offline", "0", service.text.names[0]), [tokens], wishes)
    run = Run(service.ready_engine(), choices, first_token_s=service.config.waits.first_token_s)
    async for step in run.steps():
        for each in step.events:
            if isinstance(each, (Content, Reasoning)):
                yield each.text

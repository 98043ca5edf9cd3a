"""A stream without a server around it: when bytes leave, and how it ends."""

import asyncio
import json

import pytest

from runtime.server.errors import timed_out
from runtime.server.stream import DONE, EventStream, event

pytestmark = pytest.mark.anyio


class Heard:
    """What a stream told its listener."""

    def __init__(self):
        """Nothing yet."""
        self.told = []

    def refused(self, error):
        self.told.append(("refused", error.status))

    def failed(self, error):
        self.told.append(("failed", error.status))

    def close(self):
        self.told.append("closed")


class Client:
    """The other end of the connection; takes at most `room` messages."""

    def __init__(self, room=100):
        """Connected, with nothing received."""
        self.messages, self.gone, self.room = [], asyncio.Event(), room

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if len(self.messages) == self.room:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def body(self):
        return b"".join(each.get("body", b"") for each in self.messages)

    @property
    def status(self):
        return self.messages[0]["status"]


async def run(events, client, *, keep_alive_s=60.0, stalled_s=60.0):
    heard = Heard()
    stream = EventStream(events, heard, keep_alive_s=keep_alive_s, stalled_s=stalled_s)
    async with asyncio.timeout(5):
        await stream({"type": "http"}, client.receive, client.send)
    return heard.told


async def test_events_leave_as_they_come():
    async def events():
        yield event({"a": "x\ny"})
        assert len(client.messages) == 2, "the first event has left before the second is made"
        yield DONE

    client = Client()
    assert await run(events(), client) == ["closed"]
    assert client.body == b'data: {"a":"x\\ny"}\n\ndata: [DONE]\n\n'
    assert (client.status, client.messages[-1]["more_body"]) == (200, False)


async def test_an_error_before_the_first_byte_is_a_status():
    async def events():
        raise timed_out("too late")
        yield

    client = Client()
    assert await run(events(), client) == [("refused", 504), "closed"]
    assert (client.status, json.loads(client.body)["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("error", [timed_out("too late"), RuntimeError("a secret")])
async def test_an_error_after_the_first_byte_is_an_event_and_the_end(error):
    async def events():
        yield event({})
        raise error

    client = Client()
    assert (await run(events(), client))[1:] == ["closed"]
    assert b"secret" not in client.body
    assert json.loads(client.body.split(b"data: ")[-1])["error"]["type"] in ("timeout", "server_error")
    assert not client.messages[-1]["more_body"]


async def test_an_error_after_a_comment_is_an_event_too():
    async def events():
        await commented.wait()
        raise timed_out("too late")
        yield

    client, commented = Client(), asyncio.Event()
    send = client.send

    async def noting(message):
        await send(message)
        if message.get("body") == b": waiting\n\n":
            commented.set()

    client.send = noting
    assert await run(events(), client, keep_alive_s=0.01) == [("failed", 504), "closed"]
    assert client.body.startswith(b": waiting\n\n")


async def test_a_client_that_goes_closes_the_events():
    closed = []

    async def events():
        try:
            yield event({})
            client.gone.set()
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    client = Client()
    assert await run(events(), client) == ["closed"]
    assert closed == [True]


async def test_a_client_that_goes_before_the_first_event_is_heard_of_too():
    async def events():
        yield event({})

    client = Client()
    client.gone.set()
    assert await run(events(), client) == ["closed"]


async def test_a_client_that_reads_nothing_is_given_up():
    async def events():
        while True:
            yield event({})

    client = Client(room=4)
    assert await run(events(), client, keep_alive_s=0.02, stalled_s=0.05) == ["closed"]
    assert len(client.messages) == 4

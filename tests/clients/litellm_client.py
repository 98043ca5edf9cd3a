"""What Aider and SWE-agents do through litellm; prints one JSON line. Run with the server's address."""

import json
import os
import sys
import warnings

warnings.simplefilter("ignore")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm  # noqa: E402 - it warns and reads the environment as it is imported

litellm.telemetry = False
common = {"model": "openai/demo", "api_base": sys.argv[1] + "/v1", "api_key": "dummy"}
hello = [{"role": "user", "content": "hi"}]
tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

whole = litellm.completion(**common, messages=hello, extra_body={"seed": 1})
chunks = litellm.completion(
    **common, messages=hello, stream=True, stream_options={"include_usage": True}, extra_body={"seed": 1}
)
streamed = litellm.stream_chunk_builder(list(chunks))
called = litellm.stream_chunk_builder(
    list(litellm.completion(**common, messages=hello, tools=tools, stream=True, extra_body={"seed": 2}))
)
try:
    litellm.completion(**common, messages=[{"role": "user", "content": "too long " * 2000}])
    too_long = "taken"
except litellm.ContextWindowExceededError:
    too_long = "ContextWindowExceededError"
call = called.choices[0].message.tool_calls[0]
print(  # noqa: T201 - the result
    json.dumps(
        {
            "texts": [each.choices[0].message.content for each in (whole, streamed)],
            "reasoning": [each.choices[0].message.reasoning_content for each in (whole, streamed)],
            "usage": [each.usage.completion_tokens for each in (whole, streamed)],
            "call": [call.function.name, call.function.arguments, called.choices[0].finish_reason],
            "too_long": too_long,
        }
    )
)

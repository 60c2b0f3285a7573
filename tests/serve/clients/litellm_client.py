"""litellm: chats, text completions and responses, and what its errors are told by."""

import asyncio
import json
import sys

import litellm
from pydantic import BaseModel

options = {"api_base": sys.argv[1], "api_key": "none", "num_retries": 0}
name = "smollm2-135m"
short = {"model": f"openai/{name}", "temperature": 0, **options}
talk = [{"role": "user", "content": "Say hello."}]


class Weather(BaseModel):
    place: str
    days: int


parameters = Weather.model_json_schema()
tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}

whole = litellm.completion(messages=talk, max_tokens=12, **short)
text = whole.choices[0].message.content
assert text
assert whole.usage.completion_tokens == 12
chunks = list(litellm.completion(messages=talk, max_tokens=12, stream=True, **short))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
same = asyncio.run(litellm.acompletion(messages=talk, max_tokens=12, **short))
assert same.choices[0].message.content == text

called = litellm.completion(
    messages=talk, tools=[tool], tool_choice="required", max_tokens=300, **short
)
(call,) = called.choices[0].message.tool_calls
Weather.model_validate_json(call.function.arguments)
streamed = list(
    litellm.completion(
        messages=talk, tools=[tool], tool_choice="required", max_tokens=300, stream=True, **short
    )
)
rebuilt = litellm.stream_chunk_builder(streamed)
assert json.loads(rebuilt.choices[0].message.tool_calls[0].function.arguments) == json.loads(
    call.function.arguments
)
typed = litellm.completion(messages=talk, response_format=Weather, max_tokens=300, **short)
Weather.model_validate_json(typed.choices[0].message.content)

plain = litellm.text_completion(
    **short | {"model": f"text-completion-openai/{name}"}, prompt="One, two,", max_tokens=4
)
assert plain.choices[0].text
response = litellm.responses(input=talk, max_output_tokens=12, **short)
said = response.output[0].content[0].text  # of 16 tokens, its least
assert said.startswith(text)
events = litellm.responses(input=talk, max_output_tokens=12, stream=True, **short)
assert "".join(getattr(event, "delta", "") for event in events) == said

try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 9000}], **short)
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("a prompt past the context was taken")

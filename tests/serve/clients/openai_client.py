"""OpenAI's Python client: each endpoint, whole and streamed."""

import json
import sys

from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
(model,) = [one.id for one in client.models.list()]
talk = [{"role": "user", "content": "Say hello."}]
short = {"model": model, "temperature": 0}


class Weather(BaseModel):
    place: str
    days: int


parameters = Weather.model_json_schema() | {"additionalProperties": False}
function = {"name": "weather", "description": "Tells the weather.", "parameters": parameters}

# Chats
whole = client.chat.completions.create(messages=talk, max_tokens=12, **short)
chunks = client.chat.completions.create(
    messages=talk, max_tokens=12, stream=True, stream_options={"include_usage": True}, **short
)
*deltas, last = chunks
text = "".join(chunk.choices[0].delta.content or "" for chunk in deltas)
assert text == whole.choices[0].message.content
assert last.usage.completion_tokens == whole.usage.completion_tokens == 12
with client.chat.completions.stream(messages=talk, stop=text[5:], **short) as stream:
    assert stream.get_final_completion().choices[0].message.content == text[:5]
tool = {"type": "function", "function": function}
called = client.chat.completions.create(
    messages=talk, tools=[tool], tool_choice="required", max_tokens=300, **short
)
(call,) = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls"
Weather.model_validate_json(call.function.arguments)
answer = called.choices[0].message
result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
after = client.chat.completions.create(messages=[*talk, answer, result], max_tokens=4, **short)
assert after.choices[0].message.content
typed = client.chat.completions.parse(
    messages=talk, response_format=Weather, max_tokens=300, **short
)
assert isinstance(typed.choices[0].message.parsed, Weather)

# Completions
plain = client.completions.create(prompt="One, two,", max_tokens=4, logprobs=1, **short)
assert len(plain.choices[0].logprobs.tokens) == 4
pieces = client.completions.create(prompt="One, two,", max_tokens=4, stream=True, **short)
assert "".join(piece.choices[0].text for piece in pieces) == plain.choices[0].text

# Responses
response = client.responses.create(input=talk, max_output_tokens=12, **short)
assert response.output_text == text
assert response.status == "incomplete"
with client.responses.stream(input=talk, **short) as events:
    found = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(found).startswith(text)
    assert events.get_final_response().output_text == "".join(found)
shown = client.responses.parse(input=talk, text_format=Weather, max_output_tokens=300, **short)
assert isinstance(shown.output_parsed, Weather)
forced = client.responses.create(
    input=talk,
    tools=[{"type": "function", "strict": True, **function}],
    tool_choice={"type": "function", "name": "weather"},
    max_output_tokens=300,
    **short,
)
(item,) = forced.output
assert set(json.loads(item.arguments)) == {"place", "days"}
outcome = {"type": "function_call_output", "call_id": item.call_id, "output": "Rain."}
assert client.responses.create(
    input=[*talk, item.to_dict(), outcome], max_output_tokens=4, **short
).output_text

# Refusals
try:
    client.chat.completions.create(
        messages=[{"role": "user", "content": "word " * 9000}], max_tokens=1, **short
    )
except BadRequestError as error:
    assert error.code == "context_length_exceeded"
    assert "maximum context length" in error.message
else:
    raise AssertionError("a prompt past the context was taken")
try:
    client.responses.create(model="other", input="Hello.")
except NotFoundError as error:
    assert error.param == "model"
else:
    raise AssertionError("an unknown model was taken")

"""langchain-openai: messages, tools and structured output, by chats and by responses."""

import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

options = {"base_url": sys.argv[1], "api_key": "none", "model": "smollm2-135m"}
options |= {"temperature": 0, "max_retries": 0}
talk = [SystemMessage("You are brief."), HumanMessage("Say hello.")]


class Weather(BaseModel):
    place: str
    days: int


@tool
def weather(place: str, days: int) -> str:
    """Tells the weather of a place."""
    return f"Rain in {place} for {days} days."


texts = set()
for by_responses in (False, True):
    model = ChatOpenAI(**options, use_responses_api=by_responses, max_tokens=300)
    answer = model.invoke(talk)
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata["input_tokens"] > 0
    pieces = list(model.stream(talk))
    assert len(pieces) > 2
    assert "".join(piece.text for piece in pieces) == answer.text
    texts.add(answer.text)
    calling = model.bind_tools([weather], tool_choice="any")
    called = calling.invoke(talk)
    (call,) = called.tool_calls
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind(max_tokens=8).invoke([*talk, called, result]).text
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Weather, method=method).invoke(talk)
        assert isinstance(found, Weather), method
assert len(texts) == 1
assert OpenAI(**options, max_tokens=4).invoke("One, two,")

"""smolagents: an agent that calls a tool. It may go on calling; its first call is what counts."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

found = []


@tool
def tide(place: str) -> str:
    """Tells when the tide is high.

    Args:
        place: the place.
    """
    found.append({"place": place})
    return f"High tide at {place}: 14:30."


options = {"api_base": sys.argv[1], "api_key": "none", "temperature": 0, "max_tokens": 200}
agent = ToolCallingAgent([tide], OpenAIModel("smollm2-135m", **options), max_steps=1)
agent.run("When is high tide at Rum?")
assert found
print(found[0])

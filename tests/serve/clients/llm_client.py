"""llm: prompts, conversations, schemas and tools, as its configuration file describes a server."""

import json
import os
import sys
import tempfile
from pathlib import Path

place = Path(tempfile.mkdtemp())
os.environ["LLM_USER_PATH"] = str(place)
name = "smollm2-135m"
features = {"supports_schema": True, "supports_tools": True}
about = {"model_id": "small", "model_name": name, "api_base": sys.argv[1], **features}
(place / "extra-openai-models.yaml").write_text(json.dumps([about]))  # JSON is YAML

import llm  # noqa: E402 (it reads the directory)
from pydantic import BaseModel  # noqa: E402

model = llm.get_model("small")
options = {"temperature": 0, "max_tokens": 12, "key": "none"}
whole = model.prompt("Say hello.", stream=False, **options)
text = whole.text()
assert text
assert whole.usage().output == 12
pieces = list(model.prompt("Say hello.", **options))
assert len(pieces) > 1
assert "".join(pieces) == text
talk = model.conversation()
assert talk.prompt("Say hello.", system="You are brief.", **options).text()
assert talk.prompt("Again.", **options).text()


class Weather(BaseModel):
    place: str
    days: int


found = model.prompt("Say hello.", schema=Weather, **options | {"max_tokens": 300}).text()
Weather.model_validate_json(found)


def weather(place: str) -> str:
    """Tells the weather of a place."""
    return f"Rain in {place}."


answer = model.prompt("Say hello.", tools=[weather], **options)
answer.text()
assert isinstance(answer.tool_calls(), list)

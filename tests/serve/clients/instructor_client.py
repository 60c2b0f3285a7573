"""instructor: objects of a class, by calls and by JSON schemas."""

import sys
from enum import Enum

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Kind(Enum):
    CAT = "cat"
    DOG = "dog"


class Pet(BaseModel):
    kind: Kind
    legs: int = Field(ge=0, le=9)


client = OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
asked = [{"role": "user", "content": "A dog with four legs."}]
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    create = instructor.from_openai(client, mode=mode).chat.completions.create
    options = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 200, "max_retries": 0}
    pet = create(response_model=Pet, messages=asked, **options)
    assert isinstance(pet, Pet)

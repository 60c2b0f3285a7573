"""Many clients for a while, some of whom leave: no request is lost, no answer is another's.

What each client does depends on a seed.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support.live_server import client, serving, small, until

from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits

BEGINNINGS = ["", "Once upon a time there was a lighthouse. ", "You answer in one sentence. " * 12]
PROMPTS = [f"{beginning}Question {i}: why?" for beginning in BEGINNINGS for i in range(4)]


def ended(engine):
    """How many requests ended, however they did."""
    figures = map(str.split, engine.metrics.text().decode().splitlines())
    return sum(float(value) for name, value, *_ in figures if "requests_total{" in name)


def load(tokenizer, clients, limits, *, seconds=math.inf, requests=sys.maxsize):
    """How many requests were answered, and how many were left by their clients, each of whom makes
    as many as given, one after the other, or goes on for some seconds."""
    model = small()
    model.generation_config.eos_token_id = None
    keys = Keys({f"key{i}": f"client{i % 3}" for i in range(clients)})
    counted, counting = {"answered": 0, "left": 0, "turned away": 0}, threading.Lock()

    with serving(model, tokenizer, limits=limits, keys=keys, key="key0") as (engine, talk):
        options = {"model": "tiny", "temperature": 0, "max_tokens": 40}
        expected = {
            prompt: talk.completions.create(prompt=prompt, **options).choices[0].text
            for prompt in PROMPTS
        }
        end = time.monotonic() + seconds

        def count(what):
            with counting:
                counted[what] += 1

        def go_on(number):
            draw = random.Random(f"load {number}")
            own = client(str(talk.base_url), f"key{number}")
            for _ in range(requests):
                if time.monotonic() > end:
                    break
                prompt, n = draw.choice(PROMPTS), draw.choice((1, 1, 1, 2))
                most, leave = draw.randint(1, 40), draw.random() < 0.3
                asked = options | {"prompt": prompt, "max_tokens": most, "n": n}
                try:
                    if draw.random() < 0.3:
                        texts = [c.text for c in own.completions.create(**asked).choices]
                    else:
                        texts = [""] * n
                        with own.completions.create(stream=True, **asked) as stream:
                            for pieces, chunk in enumerate(stream):
                                if leave and pieces == most // 2:
                                    break
                                texts[chunk.choices[0].index] += chunk.choices[0].text
                            else:
                                leave = False
                        if leave:
                            count("left")
                            continue
                except openai.RateLimitError:
                    count("turned away")
                    continue
                assert all(expected[prompt].startswith(text) for text in texts), (prompt, texts)
                assert all(text or most < 4 for text in texts)
                count("answered")

        with ThreadPoolExecutor(clients) as threads:
            for one in [threads.submit(go_on, number) for number in range(clients)]:
                one.result()
        until(lambda: not (engine._states or engine.batch.running or engine.batch.waiting))
        assert (engine.batch.live_bytes, engine.batch.promised_bytes) == (0, 0)
        assert "\nkvkeep_cache_bytes 0.0\n" in engine.metrics.text().decode()
        until(lambda: ended(engine) == len(PROMPTS) + sum(counted.values()))
        create = talk.completions.create
        assert create(prompt=PROMPTS[-1], **options).choices[0].text == expected[PROMPTS[-1]]
    return counted


def test_eight_clients_of_whom_some_leave(tokenizer):
    counted = load(tokenizer, 8, Limits(sequences=6), requests=3)
    assert counted["answered"] > 8
    assert counted["left"] > 1
    assert not counted["turned away"]


@pytest.mark.slow
def test_sixty_four_clients_for_five_minutes(tokenizer):
    limits = Limits(sequences=16, queue=2, cache_bytes=500_000)
    counted = load(tokenizer, 64, limits, seconds=300)
    assert counted["answered"] > 500
    assert counted["left"] > 100

"""Two servers of one model, which find in one Redis what the other computed."""

from __future__ import annotations

import copy
import subprocess
import sys
from contextlib import ExitStack

import openai
import pytest
from support.live_server import client, serving
from support.redis_server import Server

from kvkeep.store import PrefixStore, Redis

PROMPT = "The keeper of the lighthouse counts the ships. " * 40


def test_what_one_server_computed_the_other_finds(model, tokenizer, tmp_path):
    with Server(tmp_path) as redis, ExitStack() as stack:
        servers = [
            (one, PrefixStore(backend=Redis(redis.tcp))) for one in (model, copy.deepcopy(model))
        ]
        answers = []
        for own, store in servers:
            _, talk = stack.enter_context(serving(own, tokenizer, store=store))
            create = talk.completions.create
            answers.append(create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=8))
            store.flush()
        first, second = answers
        assert first.choices[0].text == second.choices[0].text
        found = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers]
        assert found == [0, len(tokenizer(PROMPT).input_ids) - 1]


@pytest.mark.slow
def test_what_one_server_computed_the_other_finds_and_goes_on_without_it(
    model, tokenizer, tmp_path
):
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    (tmp_path / "redis").mkdir()
    options = {"model": name, "temperature": 0, "max_tokens": 8}
    with ExitStack() as stack:
        redis = stack.enter_context(Server(tmp_path / "redis"))
        command = ["serve", "--model", name, "--port", "0", "--store", redis.tcp]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "kvkeep", *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for _ in range(2)
        ]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        first, second = (client(one.stdout.readline().split()[-1]) for one in processes)

        def ask(talk, prompt, **more):
            answer = talk.completions.create(prompt=prompt, **options | more)
            return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

        text, cached = ask(first, PROMPT)
        assert cached == 0
        again, cached = ask(second, PROMPT)
        assert (again, cached) == (text, len(tokenizer(PROMPT).input_ids) - 1)
        going, lost = (
            talk.completions.create(prompt=PROMPT, **options | {"max_tokens": most, "stream": True})
            for talk, most in ((second, 300), (first, 4000))
        )
        heads = [next(iter(stream)).choices[0].text for stream in (going, lost)]
        assert heads[0] == heads[1]
        processes[0].kill()
        with pytest.raises(openai.APIConnectionError):
            list(lost)
        assert len(list(going)) > 20
        ids = tokenizer(PROMPT).input_ids
        assert ask(second, [*ids, 5, 6])[1] == len(ids)  # of a text, the last could join the next

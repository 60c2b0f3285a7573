"""Two servers of one model, which find in one Redis what the other computed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import openai
import pytest
from support.live_server import client
from support.redis_server import Server


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

        prompt = "The keeper of the lighthouse counts the ships. " * 40
        text, cached = ask(first, prompt)
        assert cached == 0
        again, cached = ask(second, prompt)
        assert (again, cached) == (text, len(tokenizer(prompt).input_ids) - 1)
        going, lost = (
            talk.completions.create(prompt=prompt, **options | {"max_tokens": most, "stream": True})
            for talk, most in ((second, 300), (first, 4000))
        )
        heads = [next(iter(stream)).choices[0].text for stream in (going, lost)]
        assert heads[0] == heads[1]
        processes[0].kill()
        with pytest.raises(openai.APIConnectionError):
            list(lost)
        assert len(list(going)) > 20
        longer = prompt + text
        assert ask(second, longer)[1] > cached

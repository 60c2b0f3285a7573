"""The server's figures: that they add up, and whom they are shown."""

from __future__ import annotations

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.live_server import serving, until

from kvkeep.serve.keys import Keys
from kvkeep.serve.limits import Limits

HELLO = {"model": "tiny", "prompt": "Hello there.", "temperature": 0}


def get(talk, key=None):
    url = str(talk.base_url).replace("/v1/", "/metrics")
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx2.get(url, headers=headers, trust_env=False)


def figures(answer):
    """Each figure by its name, with the value of its only label."""
    assert answer.status_code == 200
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            assert len(sample.labels) <= 1
            found[" ".join((sample.name, *sample.labels.values()))] = sample.value
    return found


def test_figures_add_up(model, tokenizer):
    model.generation_config.eos_token_id = None
    with serving(model, tokenizer, limits=Limits(sequences=1, queue=0)) as (engine, talk):
        create = talk.completions.create
        usages = [create(max_tokens=9, **HELLO).usage for _ in range(2)]
        usages.append(create(max_tokens=4, n=2, **HELLO).usage)
        with pytest.raises(openai.BadRequestError):
            create(max_tokens=0, **HELLO)
        assert httpx2.post(f"{talk.base_url}completions", trust_env=False).status_code == 415
        before = figures(get(talk))
        assert before["kvkeep_requests_total answered"] == 3
        assert before["kvkeep_requests_total refused"] == 2
        assert before["kvkeep_prompt_tokens_total"] == sum(one.prompt_tokens for one in usages)
        assert before["kvkeep_generated_tokens_total"] == 9 + 9 + 8
        assert before["kvkeep_prompt_tokens_found_total"] == sum(
            one.prompt_tokens_details.cached_tokens for one in usages
        )
        assert before["kvkeep_time_to_first_token_seconds_count"] == 3
        assert before["kvkeep_time_between_tokens_seconds_count"] == 8 + 8 + 3 + 3
        assert before["kvkeep_store_bytes"] == engine.store.nbytes > 0
        for name in ("answers_running", "requests_waiting", "cache_bytes"):
            assert before[f"kvkeep_{name}"] == 0
        stream = create(max_tokens=4000, stream=True, **HELLO)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError):
            create(max_tokens=1, **HELLO)
        until(lambda: figures(get(talk))["kvkeep_cache_bytes"] > 0)
        assert figures(get(talk))["kvkeep_answers_running"] == 1
        stream.close()
        until(lambda: figures(get(talk))["kvkeep_requests_total left"] == 1)
        until(lambda: figures(get(talk))["kvkeep_cache_bytes"] == 0)
        engine.model.model.layers[0].mlp, kept = None, engine.model.model.layers[0].mlp
        with pytest.raises(openai.InternalServerError):
            create(max_tokens=1, **HELLO)
        engine.model.model.layers[0].mlp = kept
        after = figures(get(talk))
        assert after["kvkeep_requests_total unavailable"] == 1
        assert after["kvkeep_requests_total failed"] == 1
        assert sum(v for k, v in after.items() if k.startswith("kvkeep_requests_total ")) == 8


@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        ({"keys": Keys({"a": "ada", "b": "bob", "m": "metrics"})}, (401, 401, 403, 403, 200)),
        ({"keys": Keys({"a": "ada", "b": "ada"})}, (401, 401, 200, 200, 401)),
        ({"keys": Keys.single("a")}, (401, 401, 200, 401, 401)),
        ({"share": True}, (200,) * 5),
        ({"share": False}, (403,) * 5),
    ],
)
def test_figures_are_for_those_who_share_or_for_the_operator(model, tokenizer, options, statuses):
    with serving(model, tokenizer, **options) as (_, talk):
        given = [get(talk, key) for key in (None, "wrong", "a", "b", "m")]
        assert tuple(answer.status_code for answer in given) == statuses
        for answer in given:
            if answer.status_code == 403:
                assert "key named metrics" in answer.json()["error"]["message"]


def test_figures_name_nobody_and_quote_nothing(model, tokenizer):
    keys = Keys({"key-of-ada": "ada-the-tenant", "operator": "metrics"})
    with serving(model, tokenizer, keys=keys, key="key-of-ada") as (_, ada):
        ada.completions.create(**HELLO | {"prompt": "My secret."}, max_tokens=2, user="lovelace")
        text = get(ada, "operator").text
    for hidden in ("ada", "secret", "lovelace", "tiny"):
        assert hidden not in text

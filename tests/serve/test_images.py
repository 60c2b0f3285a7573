"""Images in requests: read by the model's processor, fetched only if the operator allows it."""

from __future__ import annotations

import http.server
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.live_server import asking, refusal, said, serving
from support.tiny_processor import PLACEHOLDERS, data_url, encoded, picture, tiny_llava
from transformers import AutoTokenizer

from kvkeep.errors import ModelError
from kvkeep.hf.models import load, processor_of
from kvkeep.serve.limits import Limits

OPTIONS = {"model": "tiny", "temperature": 0, "max_tokens": 8}


def part(url):
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def seeing(*urls, text="What is it?"):
    first, *more = [part(url) for url in urls]
    content = [{"type": "text", "text": "See: "}, first, {"type": "text", "text": text}, *more]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "."}]}]


@pytest.fixture(scope="module")
def sighted():
    model, processor = tiny_llava()
    with serving(model, processor) as (engine, talk):
        yield engine, talk, processor


def refused(create, **given):
    return refusal(lambda: create(**given, **OPTIONS))["message"]


def expected(sighted, images, text):
    """What the model's own `generate` says."""
    engine, _, processor = sighted
    given = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    found = engine.model.generate(**given, max_new_tokens=8, do_sample=False)
    tokens = found[0, given["input_ids"].shape[1] :]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True), given["input_ids"].shape[1]


def test_answers_are_those_of_the_models_own_generate(sighted):
    talk, answers = sighted[1].chat.completions, {}
    for seed in (1, 2):
        image = picture(seed)
        answer = talk.create(messages=seeing(data_url(image)), **OPTIONS)
        text = "[user]See: <image>What is it?.[assistant]"
        assert (said(answer), answer.usage.prompt_tokens) == expected(sighted, [image], text)
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        answers[seed] = said(answer)
    assert len(set(answers.values())) == 2
    both = talk.create(
        messages=seeing(data_url(picture(1)), data_url(picture(2), "JPEG")), **OPTIONS
    )
    assert both.usage.prompt_tokens > 2 * PLACEHOLDERS
    streamed = talk.create(messages=seeing(data_url(picture(1))), stream=True, n=2, **OPTIONS)
    found = ["", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            found[choice.index] += choice.delta.content or ""
    assert found == [answers[1]] * 2


def test_images_and_texts_together(sighted):
    """Answers at once are those of each request alone, and texts still reuse prefixes."""
    talk = sighted[1].chat.completions
    asked = [seeing(data_url(picture(seed))) for seed in range(3)]
    asked += [asking(text) for text in ("One.", "Two.", "Three.")]
    alone = [said(talk.create(messages=messages, **OPTIONS)) for messages in asked]
    with ThreadPoolExecutor() as threads:
        doing = [threads.submit(talk.create, messages=one, **OPTIONS) for one in asked * 2]
        assert [said(one.result()) for one in doing] == alone * 2
    again = talk.create(messages=asking("One."), **OPTIONS)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_images_in_responses_and_tokens(sighted):
    talk, url = sighted[1], data_url(picture(1))
    content = [
        {"type": "input_text", "text": "See: "},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "What is it?."},
    ]
    answer = talk.responses.create(
        model="tiny",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=8,
    )
    chat = talk.chat.completions.create(messages=seeing(url), **OPTIONS)
    assert answer.output_text == said(chat)
    body = {"model": "tiny", "messages": seeing(url)}
    found = talk.post(
        "http://" + talk.base_url.netloc.decode() + "/tokenize", body=body, cast_to=object
    )
    assert found["count"] == chat.usage.prompt_tokens


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png;base64,AAAA", "is not valid"),
        ("data:image/png;base64,%%%", "is not valid"),
        ("data:text/plain;base64,AAAA", "is not valid"),
        (data_url(picture(1))[:200], "is not valid"),
        ("https://a.example/a.png", "--allow-images-from"),
        ("http://127.0.0.1/a.png", "--allow-images-from"),
        ("file:///etc/passwd", "an unsupported URL"),
        ("http://[", "an unsupported URL"),
    ],
)
def test_what_is_no_image_here_is_refused(sighted, url, reason):
    error = refusal(lambda: sighted[1].chat.completions.create(messages=seeing(url), **OPTIONS))
    assert reason in error["message"]
    assert error["param"] == "messages"


def test_places_where_no_image_may_be(sighted):
    create = sighted[1].chat.completions.create
    url = data_url(picture(1))
    (message,) = seeing(url)
    for role in ("system", "assistant"):
        assert "only the user's may" in refused(create, messages=[message | {"role": role}])
    wrong = [{"role": "user", "content": [{"type": "image_url", "text": "a"}]}]
    assert "give image_url" in refused(create, messages=wrong)
    last = [{"role": "user", "content": [part(url)]}]
    bare = {"add_generation_prompt": False}
    assert "ends with an image" in refused(create, messages=last, extra_body=bare)
    text = seeing(url, text="<image>")
    assert "processor" in refused(create, messages=text)


def test_a_small_file_of_many_pixels_is_refused(sighted, monkeypatch):
    monkeypatch.setattr("kvkeep.serve.prompts.images._MOST_PIXELS", 1000)
    create = sighted[1].chat.completions.create
    for urls in ([picture(1, 40, 26)], [picture(1), picture(2)]):
        messages = seeing(*map(data_url, urls))
        assert "pixels" in refused(create, messages=messages)
    assert said(create(messages=seeing(data_url(picture(1))), **OPTIONS))


def test_a_model_of_texts_refuses_images(served):
    url = data_url(picture(1))
    error = refusal(lambda: served[1].chat.completions.create(messages=seeing(url), **OPTIONS))
    assert "tiny reads text only" in error["message"]
    assert error["param"] == "messages"
    item = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    error = refusal(lambda: served[1].responses.create(model="tiny", input=[item]))
    assert error["param"] == "input"


@pytest.fixture
def host():
    """A host of images: of one, of a redirection to it, and of too much."""
    image = encoded(picture(1))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("location", "/image")
            self.end_headers()
            self.wfile.write(image if self.path == "/image" else bytes(10**6))

        def log_message(self, *given):
            pass

    asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()
        thread.join()


def test_images_are_fetched_from_allowed_hosts(host):
    url, asked = host
    model, processor = tiny_llava()
    limits = Limits(image_hosts=("127.0.0.1",), image_bytes=10**5)
    with serving(model, processor, limits=limits) as (_, talk):
        create = talk.chat.completions.create
        fetched = said(create(messages=seeing(f"{url}/image"), **OPTIONS))
        assert fetched == said(create(messages=seeing(data_url(picture(1))), **OPTIONS))
        for path, reason in {"moved": "302", "much": "exceed"}.items():
            messages = seeing(f"{url}/{path}")
            assert reason in refused(create, messages=messages)
        assert asked == ["/image", "/moved", "/much"]
        other = seeing(f"{url}/image".replace("127.0.0.1", "localhost"))
        assert "'localhost'" in refused(create, messages=other)
        assert len(asked) == 3


def test_a_model_that_sees_is_loaded_with_its_processor(tmp_path):
    """A model that sees, loaded as `kvkeep serve` loads it."""
    model, processor = tiny_llava()
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, tokenizer = load(str(tmp_path), images=True)
    assert isinstance(tokenizer, type(AutoTokenizer.from_pretrained(tmp_path)))
    found = processor_of(loaded)
    text, image = "a <image> b", picture(1)
    for name, x in processor(text=[text], images=[[image]], return_tensors="pt").items():
        assert torch.equal(x, found(text=[text], images=[[image]], return_tensors="pt")[name])
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelError, match="no image processor"):
        processor_of(loaded)

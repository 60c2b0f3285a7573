"""Sessions: every turn feeds what is new only, and a kept one goes on where it stopped."""

from __future__ import annotations

import pytest
import torch
from support.demo_stand_in import LAYERS

import kvkeep
from kvkeep.errors import SavedCacheError, SpecError, StateError
from kvkeep.hf import session as module
from kvkeep.hf.generate import PromptError
from kvkeep.hf.models import load
from kvkeep.hf.session import ModelNames, Session, delete, info, sessions

SPECS = ["keep_all", "window:48,sinks=4+int8", "h2o:64@fixed"]
SHORT = {"max_new_tokens": 6}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    """Sessions of the test's own; the model stays where it was fetched."""
    monkeypatch.setattr(module, "home", lambda: tmp_path)


@pytest.fixture(scope="module")
def demo(stand_in_home):
    """A fast model with the demo model's tokenizer."""
    return load(f"{stand_in_home}/models/smollm2-135m", "float32", "cpu")


@pytest.fixture
def talk(demo):
    opened = []

    def begin(name=None, **options):
        for other in opened:
            other.close()
        opened.append(Session(*demo, name=name, names=ModelNames("smollm2-135m"), **options))
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def fed(monkeypatch):
    """The lengths of what each generate() really fed."""
    lengths = []
    update = kvkeep.Cache.update

    def counted(self, k, v, layer_idx, *args, **kwargs):
        if layer_idx == 0:
            lengths.append(k.shape[2])
        return update(self, k, v, layer_idx, *args, **kwargs)

    monkeypatch.setattr(kvkeep.Cache, "update", counted)
    return lengths


def test_a_turn_feeds_what_is_new_and_equals_reading_it_all(talk, demo, monkeypatch):
    chat = talk()
    lengths = fed(monkeypatch)
    chat.ask("Name a colour.", **SHORT)
    first = chat.cache.fed
    chat.ask("And another one?", **SHORT)
    assert sum(lengths) == chat.cache.fed
    assert lengths[0] > 20 > max(lengths[1:]) or max(lengths[1:]) < first
    ids = torch.tensor([chat._ids])
    chat.close()
    with torch.no_grad():
        said = demo[0](ids).logits[0, -7:-1].argmax(dim=-1)
    assert said.tolist() == ids[0, -6:].tolist()
    whole = demo[1].apply_chat_template(chat.messages, tokenize=False)
    assert demo[1].decode(ids[0, : first - 6]) in whole


@pytest.mark.parametrize("spec", SPECS)
def test_goes_on_where_it_stopped(talk, spec):
    chat = talk("a", cache=spec, system="You are brief.")
    chat.ask("Name a river in Europe, please, and say one thing of it.", **SHORT)
    chat.save()
    expected = chat.ask("Where does it end?", **SHORT).text
    again = talk("a")
    assert again.spec == str(kvkeep.CacheSpec.parse(spec))
    assert [m["role"] for m in again.messages] == ["system", "user", "assistant"]
    assert again.ask("Where does it end?", **SHORT).text == expected


@pytest.mark.parametrize(
    "specs",
    [
        kvkeep.CacheSpec.parse("h2o:64"),
        {"full_attention": "keep_all+int8"},
        {"full_attention": kvkeep.CacheSpec.parse("keep_all")},
        ["keep_all"] + [kvkeep.CacheSpec.parse("window:48,sinks=4")] * (LAYERS - 1),
    ],
    ids=["object", "types", "objects of types", "layers"],
)
def test_specs_in_every_form(talk, specs):
    chat = talk("a", cache=specs)
    chat.ask("Name a river.", **SHORT)
    chat.save()
    expected = chat.ask("Where does it end?", **SHORT).text
    kept = [str(spec) for spec in chat.cache.specs]
    again = talk("a")
    assert again.spec == chat.spec == info("a").spec
    assert again.ask("Where does it end?", **SHORT).text == expected
    again.save()
    again = talk("a", reread=True)
    assert [str(spec) for spec in again.cache.specs] == kept
    with pytest.raises(SpecError, match="no policy 'keep_some'"):
        talk("b", cache={"full_attention": "keep_some"})
    with pytest.raises(SpecError, match="spec 5; give"):
        talk("b", cache=5)


@pytest.mark.parametrize("spec", SPECS)
def test_undo(talk, spec):
    chat = talk("a", cache=spec)
    chat.ask("Count to ten.", **SHORT)
    chat.save()
    expected = chat.ask("Now backwards.", **SHORT).text
    assert chat.undo() == {"role": "user", "content": "Now backwards."}
    chat.ask("Something else, which is rather longer, so that it would be seen.", **SHORT)
    chat.undo()
    assert chat.ask("Now backwards.", **SHORT).text == expected
    again = talk("a")
    again.undo()
    assert again.messages == []
    again.save()  # nothing is left to keep
    assert sessions() == []
    with pytest.raises(StateError, match="no turn to undo"):
        again.undo()
    assert again.ask("Count to ten.", **SHORT).text == chat.messages[1]["content"]


def test_interrupted(talk):
    chat = talk(cache="h2o:64")
    chat.ask("Count to ten.", **SHORT)
    messages, columns = chat.messages, chat.cache.fed

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("Go on.", on_text=interrupt, **SHORT)
    assert (chat.messages, chat.cache.fed) == (messages, columns)
    expected = talk(cache="h2o:64")
    expected.ask("Count to ten.", **SHORT)
    assert chat.ask("Go on.", **SHORT).text == expected.ask("Go on.", **SHORT).text


def test_what_cannot_be_rolled_back_is_read_again_and_saved(talk):
    chat = talk("a", cache="h2o:24")
    for question in ("Name a colour.", "And another."):
        chat.ask(question, **SHORT)
    chat.save()
    again = talk("a")
    again.undo()
    assert again.cache.fed == 0
    again.save()
    assert again.cache.fed > 20
    assert len(info("a").messages) == 2
    assert talk("a").ask("One more.", **SHORT).text


def test_saving_that_was_interrupted_can_be_done_again(talk, demo):
    chat = talk("a", cache="h2o:24")
    for question in ("Name a colour.", "And another."):
        chat.ask(question, **SHORT)
    chat.save()
    chat = talk("a")
    chat.undo()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = demo[0].model.layers[1].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            chat.save()
    finally:
        hook.remove()
    chat.save()
    assert len(info("a").messages) == 2
    assert chat.ask("One more.", **SHORT).text


def test_a_fork_overwrites_no_session_that_came_meanwhile(talk, monkeypatch):
    chat = talk("a")
    chat.ask("Hello.", **SHORT)
    lock = module._locked

    def late(name):
        """Another process saves the session, and closes it, just before the lock is taken."""
        module.path_of(name).write_bytes(b"another's")
        return lock(name)

    monkeypatch.setattr(module, "_locked", late)
    with pytest.raises(StateError, match="already"):
        chat.fork("b")
    assert chat.name == "a"
    assert module.path_of("b").read_bytes() == b"another's"
    monkeypatch.undo()


def test_failing_leaves_nothing_behind(talk, demo):
    chat = talk("a")
    with pytest.raises(StateError, match="empty"):
        chat.fork("b")
    assert chat.name == "a"
    chat.ask("Hello.", **SHORT)
    chat.save()
    chat.close()
    weight = demo[0].lm_head.weight.data
    weight[0, 0] += 1
    try:
        with pytest.raises(SavedCacheError, match="another model"):
            Session(*demo, name="a")
        assert talk("a", reread=True).messages == chat.messages
    finally:
        weight[0, 0] -= 1


def test_fork_list_and_delete(talk, tmp_path):
    (tmp_path / "sessions").mkdir()
    (tmp_path / "sessions" / "my notes.kv").write_text("no session")
    chat = talk("a")
    chat.ask("Hello.", **SHORT)
    chat.save()
    chat.fork("b")
    chat.ask("More.", **SHORT)
    chat.save()
    assert [(one.name, len(one.messages)) for one in sessions()] == [("a", 2), ("b", 4)]
    assert info("b").tokens == chat.cache.fed
    with pytest.raises(StateError, match="already"):
        chat.fork("a")
    with pytest.raises(StateError, match="open in another"):
        delete("b")
    delete("a")
    assert [one.name for one in sessions()] == ["b"]
    with pytest.raises(SavedCacheError, match="no session 'a'"):
        delete("a")


def test_bad_input(talk, demo):
    chat = talk("a")
    with pytest.raises(PromptError, match="nothing to answer"):
        chat.ask("  ")
    with pytest.raises(PromptError, match="the model takes 8192"):
        chat.ask("word " * 9000)
    with pytest.raises(StateError, match="empty"):
        chat.save()
    with pytest.raises(PromptError, match=r"session name '\.\./a'"):
        chat.fork("../a")
    with pytest.raises(StateError, match="open in another process"):
        Session(*demo, name="a")
    with pytest.raises(StateError, match="has no name"):
        talk().save()


def _with_notes(path, **notes):
    """The file with other notes, sealed again, as whoever may write there can."""
    from dataclasses import asdict

    from safetensors.torch import load_file, save_file

    from kvkeep.files.headers import sealed
    from kvkeep.files.snapshot import Saved

    header = asdict(Saved(path).header)
    header["notes"] |= notes
    save_file(load_file(path), path, sealed("kvkeep", header))


NO_SESSIONS = [
    {"messages": "["},
    {"messages": "{}"},
    {"messages": "[1]"},
    {"messages": '[{"role": "user"}]'},
    {"messages": '[{"role": 1, "content": "x"}]'},
    {"messages": "[" * 50_000},
    {"marks": "[[1]]"},
    {"marks": "[[-1, 0]]"},
    {"marks": "[[0, 1e400]]"},
    {"marks": "[[99999999999999999999, 0]]"},
]


def test_notes_that_are_no_sessions(talk, demo, tmp_path):
    """One bad file is refused by its name, and hides no other."""
    chat = talk("good")
    chat.ask("Hello.", max_new_tokens=2)
    chat.save()
    chat.fork("bad")
    chat.close()
    path = tmp_path / "sessions" / "bad.kv"
    whole = path.read_bytes()
    for notes in NO_SESSIONS:
        path.write_bytes(whole)
        _with_notes(path, **notes)
        listed = [one.name for one in sessions()]
        assert listed == (["good"] if "messages" in notes else ["bad", "good"]), notes
        with pytest.raises(SavedCacheError):
            Session(*demo, name="bad")
    talk("good")


def test_what_lies_among_sessions(talk, tmp_path):
    import os
    import stat

    chat = talk("good")
    chat.ask("Hello.", max_new_tokens=2)
    chat.save()
    place = tmp_path / "sessions"
    os.mkfifo(place / "fifo.kv")
    (place / "folder.kv").mkdir()
    (place / "gone.kv").symlink_to(tmp_path / "nothing")
    (place / "loop.kv").symlink_to(place / "loop.kv")
    (place / "junk.kv").write_bytes(b"\xff" * 5000)
    (place / "deep.kv").write_bytes((60_000).to_bytes(8, "little") + b"[" * 60_000)
    (place / "a\nb.kv").write_text("x")
    assert [one.name for one in sessions()] == ["good"]
    assert stat.S_IMODE((place / "good.kv").stat().st_mode) == 0o600
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    chat.close()
    for name in ("fifo", "gone", "loop", "junk"):
        delete(name)
    with pytest.raises(SavedCacheError, match="cannot be deleted"):
        delete("folder")
    (place / ".good.lock").unlink()
    (place / ".good.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StateError, match="cannot be locked"):
        delete("good")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    "name", ["..", ".", "", "../a", "a/../../b", "/etc/x", "a\0b", "a\n", "-a", "x" * 65, "ä", ".a"]
)
def test_names_that_lead_elsewhere(name):
    for call in (info, delete, module.path_of):
        with pytest.raises(PromptError, match="session name"):
            call(name)

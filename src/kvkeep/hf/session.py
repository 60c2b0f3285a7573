"""Sessions: conversations that are saved in files together with their caches."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.arguments import suggests
from kvkeep.cache import Frozen
from kvkeep.errors import (
    CapacityError,
    KVKeepError,
    RollbackError,
    SavedCacheError,
    SpecError,
    StateError,
)
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.files.cache_header import Header
from kvkeep.files.snapshot import Saved
from kvkeep.generate import Answer
from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import as_cache
from kvkeep.hf.generate import PromptError, follow
from kvkeep.hf.notes import Message, marks_in, messages_in
from kvkeep.hf.sampling_params import sampling_params
from kvkeep.home import home
from kvkeep.host import Specs
from kvkeep.host.progress import OnStart
from kvkeep.host.saving import load
from kvkeep.host.specs import file_in, from_saved
from kvkeep.spec import CacheSpec, PerType, as_spec, parse_specs

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDING = ".kv"
_MOST_UNDONE = 8
"""Number of turns that can be undone without a new prefill if a policy cannot crop; the slots of
each stay in memory."""


class ModelNames(NamedTuple):
    """The names by which a model and its adapter were loaded; see `kvkeep.hf.models.load`."""

    model: str = ""
    adapter: str = ""


_UNNAMED = ModelNames()


@dataclass(frozen=True)
class SessionInfo:
    """The description of a session in its file. `tokens` counts columns fed; `bytes` is the size of
    the file."""

    name: str
    model: str
    adapter: str
    spec: str
    messages: list[Message]
    tokens: int
    bytes: int


def path_of(name: str) -> Path:
    """The path of a session's file.

    Raises:
        PromptError: the name is not valid.
    """
    if not _NAME.fullmatch(name):
        raise PromptError(
            f"session name {name!r} is not valid; give at most 64 letters, digits, dots, dashes "
            "and underscores, with a letter or digit first"
        )
    return home() / "sessions" / (name + _ENDING)


def sessions() -> list[SessionInfo]:
    """All sessions that can be read, by name."""
    found = []
    for path in sorted((home() / "sessions").glob(f"*{_ENDING}")):
        with suppress(KVKeepError):  # some files may not be sessions
            found.append(info(path.name.removesuffix(_ENDING)))
    return found


def info(name: str) -> SessionInfo:
    """Read the description of a session from its file.

    Raises:
        SavedCacheError: the session does not exist, or its file cannot be read.
    """
    path = _existing(name)
    saved = Saved(path, verify=False)
    header = saved.header
    return SessionInfo(
        name,
        header.notes.get("model", ""),
        header.notes.get("adapter", ""),
        _spec(header, path),
        messages_in(header, path),
        header.layers[0].columns,
        saved.nbytes,
    )


def delete(name: str) -> None:
    """Delete a session.

    Raises:
        SavedCacheError: the session does not exist, or its file cannot be deleted.
        StateError: another process has the session open.
    """
    path = _existing(name)
    lock = _locked(name)
    try:
        path.unlink()
    except OSError as error:
        raise SavedCacheError(f"session {name!r} cannot be deleted: {error}") from error
    finally:
        lock.release()


def _existing(name: str) -> Path:
    path = path_of(name)
    if not os.path.lexists(path):
        raise SavedCacheError(f"no session {name!r}; see `kvkeep sessions`")
    return path


def _locked(name: str) -> FileLock:
    path = path_of(name)
    place = path.with_name(f".{name}.lock")
    try:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
            raise OSError(f"{place} is not a regular file")
        lock = FileLock(place, mode=PRIVATE)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StateError(
            f"session {name!r} is open in another process; close it there, or open another"
        ) from error
    except OSError as error:
        raise StateError(
            f"session {name!r} cannot be locked: {error}; check the permissions of {path.parent}"
        ) from error
    return lock


def _name_taken(name: str) -> StateError:
    return StateError(f"session {name!r} exists already; delete it, or use another name")


def _spec(header: Header, path: Path) -> str:
    """The cache spec of a session; the text in its notes, or else the specs of its layers."""
    try:
        return _text(header.notes.get("cache") or header.specs)
    except SpecError as error:
        raise SavedCacheError(f"{path} has no valid spec: {error}") from error


def has_spec(session: SessionInfo, spec: str) -> bool:
    """Whether a session has this spec; the path of its scorer may differ."""
    with suppress(SpecError, SavedCacheError):  # specs by layer have no common text
        return spec == _text(from_saved(session.spec, file_in(spec), session.name))
    return False


def _text(specs: Specs) -> str:
    """Specs as text; if layers have different specs, all specs are listed."""
    if isinstance(specs, str):
        return str(parse_specs(specs))
    if isinstance(specs, Mapping):
        return str(PerType({kind: as_spec(spec) for kind, spec in specs.items()}))
    if not isinstance(specs, Sequence):
        return str(as_spec(specs))
    texts = [str(as_spec(spec)) for spec in specs]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


class _Mark(NamedTuple):
    """The state before a turn: columns fed, number of token ids, and a frozen cache if the cache's
    policies cannot crop."""

    columns: int
    ids: int
    frozen: Frozen[Cache] | None


class Session:
    """A conversation with a model. Each turn feeds only the new tokens.

    Args:
        model, tokenizer: the model and its tokenizer; the model is attached until `close`.
        cache: the cache's spec for a new conversation; see `kvkeep.Cache`. A saved conversation
            keeps its spec; with policy kvzap, the scorer's path is taken from `cache`, because
            paths in files are never opened.
        name: name of the session to save to or continue; None: the conversation is not saved.
        names: names of the model and the adapter for `kvkeep.hf.models.load`, stored in the
            session's file.
        system: system message of a new conversation.
        reread: compute the cache of a saved conversation again instead of loading it; necessary
            with another model.

    Raises:
        SavedCacheError: the session's file is damaged, or was made with another model.
        StateError: another process has the session open.
    """

    @suggests(now=dict.fromkeys(("model_name", "adapter"), "names=ModelNames(model, adapter)"))
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: Specs = "keep_all",
        name: str | None = None,
        names: ModelNames = _UNNAMED,
        system: str | None = None,
        reread: bool = False,
        compile: bool | None = None,
    ) -> None:
        self.model, self.tokenizer, self._compile = model, tokenizer, compile
        self.names = names
        self.messages: list[Message] = []
        self.name: str | None = None
        self._lock: FileLock | None = None
        self._ids: list[int] = []  # token ids of the whole conversation, as they were fed
        self._marks: list[_Mark] = []  # the state before each turn
        self._attached: Attachment | None = None
        self._specs, self.spec = cache, _text(cache)
        try:
            self._open(name, system, reread=reread)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str | None, system: str | None, *, reread: bool) -> None:
        if name is not None:
            self._lock, self.name = _locked(name), name
        kept = None if name is None or not path_of(name).exists() else path_of(name)
        if kept is not None:
            header = Saved(kept, verify=False).header
            self.messages = messages_in(header, kept)
        elif system is not None:
            self.messages = [{"role": "system", "content": system}]
        scorer = file_in(self._specs)
        try:
            if kept is not None:
                self._specs = from_saved(header.notes.get("cache") or header.specs, scorer, kept)
                self.spec = _text(self._specs)
            self._attached = attach(self.model, self._specs, compile=self._compile)
            self.cache = Cache(self.model, self._specs)
        except (SpecError, CapacityError) as error:
            if kept is None:
                raise
            raise SavedCacheError(f"{kept} cannot be loaded: {error}") from error
        if kept is None or reread:
            return
        given: list[Tensor | None] = []
        self.cache = load(
            kept, self.model, tokenizer=self.tokenizer, scorer=scorer, tokens=given.append
        )
        if given[0] is None:
            raise SavedCacheError(f"{kept} has no token ids; open the session with reread=True")
        self._ids = given[0][0].tolist()
        most = (self.cache.fed, len(self._ids))
        self._marks = [_Mark(*mark, None) for mark in marks_in(header, kept, *most)]

    @property
    def context(self) -> tuple[int, int | None]:
        """Tokens fed, and the model's limit (None: unknown)."""
        return self.cache.fed, getattr(self.cache.config, "max_position_embeddings", None)

    def ask(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        on_text: Callable[[str], None] = lambda _: None,
        on_start: OnStart = lambda cache, tokens: None,
    ) -> Answer:
        """Add a user's message, and generate the model's answer.

        Raises:
            PromptError: the text is empty, or does not fit in the model's context; nothing has
                changed.
        """
        if not text.strip():
            raise PromptError("the message is empty, so there is nothing to answer; give some text")
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._continued(messages)
        most = self.context[1]
        if most is not None and len(ids) + 1 > most:
            raise PromptError(
                f"{len(ids)} tokens, but the model takes {most}; undo a turn, or start a new "
                "session"
            )
        # The chat template may now render earlier messages differently.
        if ids[: self.cache.fed] != self._ids[: self.cache.fed]:
            self.cache.reset()
            self._marks = []
        frozen = None if self._can_crop else self.cache.freeze()
        self._marks.append(_Mark(self.cache.fed, len(self._ids), frozen))
        self._marks[:-_MOST_UNDONE] = [
            mark._replace(frozen=None) for mark in self._marks[:-_MOST_UNDONE]
        ]
        room = max_new_tokens if most is None else min(max_new_tokens, most - len(ids))
        try:
            params = sampling_params(
                self.model, len(ids), max_new_tokens=room, temperature=temperature, top_p=top_p
            )
            on_start(self.cache, len(ids))
            prompt = torch.tensor([ids])
            result = follow(self.model, self.tokenizer, prompt, self.cache, params, on_text=on_text)
        except BaseException:  # an interrupt may come at any time, even during a forward
            self._return_to(self._marks.pop())
            raise
        self._ids = result.ids.tolist()
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return result

    def undo(self) -> Message:
        """Remove the last turn; returns its user message.

        Raises:
            StateError: there is no turn.
        """
        if len(self.messages) < 2 or self.messages[-2]["role"] != "user":
            raise StateError("there is no turn to undo")
        self._return_to(self._marks.pop() if self._marks else _Mark(0, 0, None))
        asked = self.messages[-2]
        self.messages = self.messages[:-2]
        return asked

    def fork(self, name: str) -> None:
        """Continue under another name; the session saved under the old name is unchanged.

        Raises:
            StateError: a session of that name exists.
        """
        if path_of(name).exists():
            raise _name_taken(name)
        before, lock = self.name, _locked(name)
        try:
            if path_of(name).exists():  # another process created it before this one got the lock
                raise _name_taken(name)
            self.name = name
            self.save()
        except BaseException:
            self.name = before
            lock.release()
            raise
        self._release()
        self._lock = lock

    def save(self) -> None:
        """Save the conversation and its cache. If all turns were undone, the file is deleted.

        Raises:
            StateError: the session has no name, or the conversation is empty.
            SavedCacheError: the file cannot be written.
        """
        if self.name is None:
            raise StateError("this conversation has no name; give it one with fork(name)")
        if not self.cache.fed and self.messages and self.messages[-1]["role"] == "assistant":
            self._reread()
        if not self.cache.fed and path_of(self.name).exists():
            path_of(self.name).unlink()
            return
        marks = [(mark.columns, mark.ids) for mark in self._marks]
        self.cache.save(
            path_of(self.name),
            tokens=torch.tensor([self._ids]),
            tokenizer=self.tokenizer,
            notes={
                **self.names._asdict(),
                "cache": "" if self._by_layer else self.spec,
                "messages": json.dumps(self.messages),
                "marks": json.dumps(marks),
            },
            private=True,
        )

    def close(self) -> None:
        """Detach the model, and release the session for other processes."""
        if self._attached is not None:
            detach(self.model)
            self._attached = None
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _return_to(self, mark: _Mark) -> None:
        """Restore the state before a turn. If that is impossible, the cache is reset, and the next
        call computes it again."""
        try:
            if mark.frozen is not None:
                self.cache = mark.frozen.fork()
            elif mark.columns:
                self.cache.rewind(mark.columns)
            else:
                self.cache.reset()
        except (RollbackError, StateError):  # an eviction may have been interrupted
            self.cache.reset()
            self._marks = []
        self._ids = self._ids[: mark.ids] if self.cache.fed else []

    @property
    def _by_layer(self) -> bool:
        """Whether specs are given for each layer; then the file stores no common spec."""
        return not isinstance(self._specs, str | CacheSpec | Mapping)

    @property
    def _can_crop(self) -> bool:
        return not self.cache.carried and all(
            layer.policy.rollback and not layer.policy.evicts for layer in self.cache.layers
        )

    @torch.inference_mode()
    def _reread(self) -> None:
        """Feed the conversation to the empty cache again, up to its last answer."""
        tokenizer: Any = self.tokenizer
        said = self._rendered(self.messages[:-1]) + self.messages[-1]["content"]
        self._ids = tokenizer(said, add_special_tokens=False).input_ids
        fed = torch.tensor([self._ids], device=self.model.device)
        try:
            self.model(fed, **as_cache(self.model, self.cache), logits_to_keep=1)
        except BaseException:  # some layers may have been fed; the next save feeds all again
            self.cache.reset()
            self._ids = []
            raise

    def _continued(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation: the ids fed so far, followed by the ids of the new part. If
        the template now renders the earlier part differently, the whole text is tokenised again."""
        tokenizer: Any = self.tokenizer
        whole = self._rendered(messages)
        if self._ids and self.cache.fed:
            before = self._rendered(self.messages[:-1]) + self.messages[-1]["content"]
            if whole.startswith(before):
                rest = whole[len(before) :]
                if self._ids[-1] in tokenizer.all_special_ids:  # the token that ended the answer
                    rest = rest.removeprefix(tokenizer.decode([self._ids[-1]]))
                following: list[int] = tokenizer(rest, add_special_tokens=False).input_ids
                return self._ids + following
        ids: list[int] = tokenizer(whole, add_special_tokens=False).input_ids
        return ids

    def _rendered(self, messages: list[Message]) -> str:
        tokenizer: Any = self.tokenizer
        if tokenizer.chat_template is None:
            return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: "
        text: str = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return text

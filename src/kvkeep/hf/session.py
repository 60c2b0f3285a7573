"""Sessions: conversations that are kept in files, with the cache that holds them."""

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
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.cache import Frozen
from kvkeep.errors import KVKeepError, RollbackError, SavedCacheError, StateError
from kvkeep.extras import needed_by
from kvkeep.files.atomic import PRIVATE, PRIVATE_DIRECTORY
from kvkeep.files.cache_header import Header
from kvkeep.files.snapshot import Saved
from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache
from kvkeep.hf.generate import Generation, PromptError, follow
from kvkeep.hf.load import load
from kvkeep.hf.models import home
from kvkeep.hf.notes import Message, marks_in, messages_in
from kvkeep.hf.specs import Specs
from kvkeep.spec import CacheSpec, PerType, as_spec, parse_specs

with needed_by("A session", "cli"):
    from filelock import FileLock, Timeout

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDING = ".kv"
_MOST_UNDONE = 8
"""Turns that can be undone where a policy cannot roll back, each of which keeps its slots."""


@dataclass(frozen=True)
class SessionInfo:
    """What a session's file says of it."""

    name: str
    model: str
    adapter: str
    spec: str
    messages: list[Message]
    tokens: int
    bytes: int


def path_of(name: str) -> Path:
    """Where a session is kept.

    Raises:
        PromptError: no name for a file.
    """
    if not _NAME.fullmatch(name):
        raise PromptError(
            f"session name {name!r}: give up to 64 letters, digits, dots, dashes and underscores"
        )
    return home() / "sessions" / (name + _ENDING)


def sessions() -> list[SessionInfo]:
    """All sessions that can be read, by name."""
    found = []
    for path in sorted((home() / "sessions").glob(f"*{_ENDING}")):
        with suppress(KVKeepError):  # not all that lies there is a session
            found.append(info(path.name.removesuffix(_ENDING)))
    return found


def info(name: str) -> SessionInfo:
    """What a session's file says of it.

    Raises:
        SavedCacheError: there is none, or it cannot be read.
    """
    path = path_of(name)
    saved = Saved(path, verify=False)
    header = saved.header
    return SessionInfo(
        name,
        header.notes.get("model", ""),
        header.notes.get("adapter", ""),
        _spec(header),
        messages_in(header, path),
        header.layers[0].columns,
        saved.nbytes,
    )


def delete(name: str) -> None:
    """Delete a session.

    Raises:
        SavedCacheError: there is none, or it cannot be deleted.
        StateError: another process has it open.
    """
    path = path_of(name)
    if not os.path.lexists(path):
        raise SavedCacheError(f"no session {name!r}; see `kvkeep sessions`")
    lock = _locked(name)
    try:
        path.unlink()
    except OSError as error:
        raise SavedCacheError(f"session {name!r} cannot be deleted: {error}") from error
    finally:
        lock.release()


def _locked(name: str) -> FileLock:
    path = path_of(name)
    place = path.with_name(f".{name}.lock")
    try:
        path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)  # it is private
        if os.path.lexists(place) and not stat.S_ISREG(place.lstat().st_mode):
            raise OSError(f"{place} is no file")
        lock = FileLock(place, mode=PRIVATE)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StateError(f"session {name!r} is open in another process") from error
    except OSError as error:
        raise StateError(
            f"session {name!r} cannot be locked: {error}; see who may write to {path.parent}"
        ) from error
    return lock


def _taken(name: str) -> StateError:
    return StateError(f"there is a session {name!r} already; delete it, or use another name")


def _spec(header: Header) -> str:
    """What a session keeps; the specs of its layers may be those of their types."""
    return header.notes.get("cache") or _text(header.specs)


def _text(specs: Specs) -> str:
    """Specs as text; of specs for single layers, which have none together, all of them."""
    if isinstance(specs, str):
        return str(parse_specs(specs))
    if isinstance(specs, Mapping):
        return str(PerType({kind: as_spec(spec) for kind, spec in specs.items()}))
    if not isinstance(specs, Sequence):
        return str(as_spec(specs))
    texts = [str(as_spec(spec)) for spec in specs]
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


class _Mark(NamedTuple):
    """Where a turn began: columns fed, ids known, and the cache if it cannot be rolled back."""

    columns: int
    ids: int
    frozen: Frozen[Cache] | None


class Session:
    """A conversation with a model. Every turn feeds what is new, nothing again.

    Args:
        model, tokenizer: attached until `close`.
        cache: what to keep, for a new conversation; see `kvkeep.Cache`.
        name: where it is kept; None keeps it in memory only.
        model_name, adapter: by which they can be loaded again; see `kvkeep.hf.models.load`.
        system: a system message, for a new conversation.
        reread: read a kept conversation again instead of loading its cache, as another model must.

    Raises:
        SavedCacheError: what is kept is not whole, or of another model.
        StateError: another process has the session open.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        cache: Specs = "keep_all",
        name: str | None = None,
        model_name: str = "",
        adapter: str = "",
        system: str | None = None,
        reread: bool = False,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.model_name, self.adapter = model_name, adapter
        self.messages: list[Message] = []
        self.name: str | None = None
        self._lock: FileLock | None = None
        self._ids: list[int] = []  # of the whole conversation, as it was fed
        self._marks: list[_Mark] = []  # before each turn
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
            self.messages, self.spec = messages_in(header, kept), _spec(header)
            self._specs = header.notes.get("cache") or header.specs
        elif system is not None:
            self.messages = [{"role": "system", "content": system}]
        self._attached = attach(self.model, self._specs)
        self.cache = Cache(self.model, self._specs)
        if kept is None or reread:
            return
        given: list[Tensor | None] = []
        self.cache = load(kept, self.model, tokenizer=self.tokenizer, tokens=given.append)
        if given[0] is None:
            raise SavedCacheError(f"{kept} has no tokens; read it again with reread")
        self._ids = given[0][0].tolist()
        most = (self.cache.fed, len(self._ids))
        self._marks = [_Mark(*mark, None) for mark in marks_in(header, kept, *most)]

    @property
    def context(self) -> tuple[int, int | None]:
        """Tokens fed, and the most that the model takes."""
        return self.cache.fed, getattr(self.cache.config, "max_position_embeddings", None)

    def ask(
        self,
        text: str,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        on_text: Callable[[str], None] = lambda _: None,
    ) -> Generation:
        """Say something, and return what the model answers.

        Raises:
            PromptError: no text, or more than the model's context has room for; nothing changed.
        """
        if not text.strip():
            raise PromptError("there is nothing to answer; give some text")
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._continued(messages)
        most = self.context[1]
        if most is not None and len(ids) + 1 > most:
            raise PromptError(
                f"{len(ids)} tokens, but the model takes {most}; undo a turn, or start anew"
            )
        if ids[: self.cache.fed] != self._ids[: self.cache.fed]:  # the template changed the past
            self.cache.reset()
            self._marks = []
        frozen = None if self._can_crop else self.cache.freeze()
        self._marks.append(_Mark(self.cache.fed, len(self._ids), frozen))
        self._marks[:-_MOST_UNDONE] = [
            mark._replace(frozen=None) for mark in self._marks[:-_MOST_UNDONE]
        ]
        room = max_new_tokens if most is None else min(max_new_tokens, most - len(ids))
        try:
            result = follow(
                self.model,
                self.tokenizer,
                torch.tensor([ids], device=self.model.device),
                self.cache,
                max_new_tokens=room,
                temperature=temperature,
                top_p=top_p,
                on_text=on_text,
            )
        except BaseException:  # the user may interrupt, in the middle of a forward too
            self._return_to(self._marks.pop())
            raise
        self._ids = result.ids[0].tolist()
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        return result

    def undo(self) -> Message:
        """Take back the last turn; returns what was asked.

        Raises:
            StateError: there is none.
        """
        if len(self.messages) < 2 or self.messages[-2]["role"] != "user":
            raise StateError("there is no turn to undo")
        self._return_to(self._marks.pop() if self._marks else _Mark(0, 0, None))
        asked = self.messages[-2]
        self.messages = self.messages[:-2]
        return asked

    def fork(self, name: str) -> None:
        """Go on under another name; what was saved under the old one stays.

        Raises:
            StateError: there is a session of that name.
        """
        if path_of(name).exists():
            raise _taken(name)
        before, lock = self.name, _locked(name)
        try:
            if path_of(name).exists():  # another process made it before this one had the lock
                raise _taken(name)
            self.name = name
            self.save()
        except BaseException:
            self.name = before
            lock.release()
            raise
        self._release()
        self._lock = lock

    def save(self) -> None:
        """Keep the conversation and its cache. Where all was taken back, nothing is kept.

        Raises:
            StateError: it has no name, or nothing was said yet.
            SavedCacheError: it cannot be written.
        """
        if self.name is None:
            raise StateError("this conversation has no name; fork it to one")
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
                "model": self.model_name,
                "adapter": self.adapter,
                "cache": "" if self._by_layer else self.spec,
                "messages": json.dumps(self.messages),
                "marks": json.dumps(marks),
            },
            private=True,
        )

    def close(self) -> None:
        """Detach the model, and let other processes open the session."""
        if self._attached is not None:
            detach(self.model)
            self._attached = None
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _return_to(self, mark: _Mark) -> None:
        """Where the cache cannot, it forgets all, which is then read again when it is needed."""
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
        """Whether each layer has a spec of its own, which the file says of each."""
        return not isinstance(self._specs, str | CacheSpec | Mapping)

    @property
    def _can_crop(self) -> bool:
        return all(
            layer.policy.rollback and layer.policy.budget is None for layer in self.cache.layers
        )

    @torch.inference_mode()
    def _reread(self) -> None:
        """Feed the conversation again, up to its last answer."""
        tokenizer: Any = self.tokenizer
        said = self._rendered(self.messages[:-1]) + self.messages[-1]["content"]
        self._ids = tokenizer(said, add_special_tokens=False).input_ids
        fed = torch.tensor([self._ids], device=self.model.device)
        try:
            self.model(fed, past_key_values=self.cache, logits_to_keep=1)
        except BaseException:  # some layers may have been fed: the next save reads it all again
            self.cache.reset()
            self._ids = []
            raise

    def _continued(self, messages: list[Message]) -> list[int]:
        """Ids of a conversation: those that were fed, and after them the new part's. All of them
        anew if the template does not leave the earlier part as it was."""
        tokenizer: Any = self.tokenizer
        whole = self._rendered(messages)
        if self._ids and self.cache.fed:
            before = self._rendered(self.messages[:-1]) + self.messages[-1]["content"]
            if whole.startswith(before):
                rest = whole[len(before) :]
                if self._ids[-1] in tokenizer.all_special_ids:  # what ended the answer
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

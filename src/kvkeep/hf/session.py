"""Sessions: conversations that are kept in files, with the cache that holds them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvkeep.cache import Frozen
from kvkeep.errors import SavedCacheError, StateError
from kvkeep.hf.attach import Attachment, attach, detach
from kvkeep.hf.cache import Cache
from kvkeep.hf.generate import Generation, PromptError, follow
from kvkeep.hf.models import home
from kvkeep.hf.saved import load
from kvkeep.snapshot import Header, Saved

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ENDING = ".kv"
_MOST_UNDONE = 8
"""Turns that can be undone where a policy cannot roll back, each of which keeps its slots."""

Message = dict[str, str]


@dataclass(frozen=True)
class SessionInfo:
    """What a session's file says of it."""

    name: str
    model: str
    specs: list[str]
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
        try:
            found.append(info(path.name.removesuffix(_ENDING)))
        except SavedCacheError:
            continue
    return found


def info(name: str) -> SessionInfo:
    """What a session's file says of it.

    Raises:
        SavedCacheError: there is none, or it cannot be read.
    """
    path = path_of(name)
    header = Saved(path, verify=False).header
    return SessionInfo(
        name,
        header.notes.get("model", ""),
        list(dict.fromkeys(header.specs)),
        _messages(header),
        header.layers[0].columns,
        path.stat().st_size,
    )


def delete(name: str) -> None:
    """Delete a session.

    Raises:
        SavedCacheError: there is none.
    """
    path = path_of(name)
    if not path.exists():
        raise SavedCacheError(f"no session {name!r}; see `kvkeep sessions`")
    path.unlink()


def _messages(header: Header) -> list[Message]:
    return [dict(message) for message in json.loads(header.notes.get("messages", "[]"))]


class _Mark(NamedTuple):
    """Where a turn began: columns fed, ids known, and the cache if it cannot be rolled back."""

    columns: int
    ids: int
    frozen: Frozen[Cache] | None


class Session:
    """A conversation with a model. Every turn feeds what is new, nothing again.

    Args:
        model, tokenizer: attached until `close`.
        cache: what to keep, for a new conversation.
        name: where it is kept; None keeps it in memory only.
        model_name: by which it can be loaded again.
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
        cache: str = "keep_all",
        name: str | None = None,
        model_name: str = "",
        system: str | None = None,
        reread: bool = False,
    ) -> None:
        self.model, self.tokenizer, self.model_name = model, tokenizer, model_name
        self.messages: list[Message] = []
        self.name: str | None = None
        self._lock: FileLock | None = None
        self._ids: list[int] = []  # of the whole conversation, as it was fed
        self._marks: list[_Mark] = []  # before each turn
        if name is not None:
            self._take(name)
        kept = None if name is None or not path_of(name).exists() else path_of(name)
        if kept is not None:
            header = Saved(kept, verify=False).header
            self.messages, cache = _messages(header), header.specs[0]
            marks = json.loads(header.notes.get("marks", "[]"))
            self._marks = [_Mark(columns, ids, None) for columns, ids in marks]
        elif system is not None:
            self.messages = [{"role": "system", "content": system}]
        self.spec = cache
        self._attached: Attachment | None = attach(model, cache)
        if kept is None or reread:
            self.cache = Cache(model, cache)
            self._marks = []
        else:
            given: list[Tensor | None] = []
            self.cache = load(kept, model, tokenizer=tokenizer, tokens=given.append)
            if given[0] is None:
                raise SavedCacheError(f"{kept} has no tokens; read it again with reread")
            self._ids = given[0][0].tolist()

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
            self._start_from(self._marks.pop())
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
        mark = self._marks.pop() if self._marks else _Mark(0, 0, None)
        back = self.cache.fed - mark.columns
        if mark.frozen is None and mark.columns and back <= self.cache.rollback_limit:
            self.cache.crop(-back)
            self._ids = self._ids[: mark.ids]
        else:
            self._start_from(mark)
        asked = self.messages[-2]
        self.messages = self.messages[:-2]
        return asked

    def fork(self, name: str) -> None:
        """Go on under another name; what was saved under the old one stays.

        Raises:
            StateError: there is a session of that name.
        """
        if path_of(name).exists():
            raise StateError(
                f"there is a session {name!r} already; delete it, or take another name"
            )
        self._take(name)
        self.save()

    def save(self) -> None:
        """Keep the conversation and its cache.

        Raises:
            StateError: it has no name, or nothing was said.
            SavedCacheError: it cannot be written.
        """
        if self.name is None:
            raise StateError("this conversation has no name; fork it to one")
        marks = [(mark.columns, mark.ids) for mark in self._marks]
        self.cache.save(
            path_of(self.name),
            tokens=torch.tensor([self._ids]),
            tokenizer=self.tokenizer,
            notes={
                "model": self.model_name,
                "messages": json.dumps(self.messages),
                "marks": json.dumps(marks),
            },
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

    def _start_from(self, mark: _Mark) -> None:
        """From nothing, if the mark has no cache: all is read again when something is asked."""
        if mark.frozen is None:
            self.cache.reset()
            self._marks, self._ids = [], []
        else:
            self.cache = mark.frozen.fork()
            self._ids = self._ids[: mark.ids]

    @property
    def _can_crop(self) -> bool:
        return all(
            layer.policy.rollback and layer.policy.budget is None for layer in self.cache.layers
        )

    def _take(self, name: str) -> None:
        path = path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise StateError(f"session {name!r} is open in another process") from error
        self._release()
        self._lock, self.name = lock, name

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

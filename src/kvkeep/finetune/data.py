"""Texts and conversations of a JSON Lines file, as token ids and labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.finetune.options import seed_of

IGNORED = -100
"""The label of a token that is not learned."""


Made = TypeVar("Made")


class DataError(KVKeepError, ValueError):
    """A file of texts, or a line of it, that cannot be trained on."""


class Tokens(NamedTuple):
    """A text or a piece of one: token ids (n,), and labels (n,), a token's own id or -100."""

    ids: Tensor
    labels: Tensor

    @property
    def learned(self) -> int:
        """How many labels are learned; the first token is not predicted."""
        return int((self.labels[1:] != IGNORED).sum())


def read(path: Path, tokenizer: Any) -> list[Tokens]:
    """The documents of a JSON Lines file: `{"text": ...}` or `{"messages": [...]}` on each line.

    All tokens of a text are learned, and the assistant's tokens of a conversation.

    Raises:
        DataError: the file cannot be read or is empty, or a line has another form.
    """
    return objects(path, lambda given: _document(given, tokenizer))


def objects(path: Path, made: Callable[[dict[str, Any]], Made]) -> list[Made]:
    """What is made of the object on each line of a JSON Lines file.

    Raises:
        DataError: the file cannot be read or is empty, or a line is no object; and what `made`
            raises, with the number of the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a JSON Lines file") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(
            f'{path} is empty; write a line such as {{"text": "..."}} for each document'
        )
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(made(_object(line)))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error.__cause__
    return found


def pieces(documents: Iterable[Tokens], length: int) -> list[Tokens]:
    """Documents cut into pieces of at most `length` tokens. Pieces with nothing to learn, such as
    those of a single token, are left out."""
    found = []
    for ids, labels in documents:
        cut = zip(torch.split(ids, length), torch.split(labels, length), strict=True)
        found += [piece for piece in (Tokens(*both) for both in cut) if piece.learned]
    return found


def digest(texts: Iterable[Tokens]) -> str:
    """The XXH3 hash of tokens and labels."""
    found = xxhash.xxh3_128()
    for text in texts:
        for x in text:
            found.update(len(x).to_bytes(8, "little") + x.numpy().tobytes())
    result: str = found.hexdigest()
    return result


def _object(line: bytes) -> dict[str, Any]:
    try:
        given = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f'not JSON ({error}); write one object, such as {{"text": "..."}}, on each line'
        ) from error
    if not isinstance(given, dict):
        raise DataError(f'{given!r:.40}; give an object, such as {{"text": "..."}}')
    return given


def formed(path: Path) -> list[str | list[dict[str, Any]]]:
    """The texts and the messages of a file, for a check of it that needs no tokenizer.

    Raises:
        DataError: see `read`.
    """
    return objects(path, _formed)


def _formed(given: dict[str, Any]) -> str | list[dict[str, Any]]:
    if ("text" in given) == ("messages" in given):
        raise DataError(
            f'an object of {sorted(given)}; give an object with either "text" or "messages"'
        )
    if "text" in given:
        return text_of(given["text"], '"text"')
    return _messages(given["messages"])


def _document(given: dict[str, Any], tokenizer: Any) -> Tokens:
    found = _formed(given)
    if isinstance(found, str):
        ids = encoded(tokenizer, found, special=True)
        return Tokens(ids, ids)
    return _conversation(tokenizer, found)


def text_of(value: Any, name: str) -> str:
    """A field of a line, if it is text that is not empty.

    Raises:
        DataError: it is anything else.
    """
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name} is {value!r:.40}; give text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name} has half of a surrogate pair ({error}); write whole characters"
        ) from error
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise DataError(
            f'"messages" is {value!r:.40}; give a list of {{"role": ..., "content": ...}}'
        )
    for index, message in enumerate(value):
        name = f"message {index}"
        if not isinstance(message, dict):
            raise DataError(f'{name} is {message!r:.40}; give {{"role": ..., "content": ...}}')
        for field in ("role", "content"):
            text_of(message.get(field), f'"{field}" of {name}')
    if all(message["role"] != "assistant" for message in value):
        raise DataError("no message of the assistant, so nothing to learn; add one")
    return value


def _conversation(tokenizer: Any, messages: list[dict[str, Any]]) -> Tokens:
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            'the model\'s tokenizer has no chat template; give {"text": ...}, or use a chat model'
        )
    ids = _rendered(tokenizer, messages)
    labels = torch.full_like(ids, IGNORED)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = _rendered(tokenizer, messages[:index], prompt=True)
            answered = _rendered(tokenizer, messages[: index + 1])
            for shorter, longer in ((prompt, answered), (answered, ids)):
                if len(shorter) > len(longer) or not shorter.equal(longer[: len(shorter)]):
                    raise DataError(
                        f"with the model's chat template, the text before the end of message "
                        f"{index} depends on what follows, so the assistant's tokens cannot be "
                        "found; give each answer a line of its own, which ends with it, or the "
                        'whole as {"text": ...}'
                    )
            labels[len(prompt) : len(answered)] = ids[len(prompt) : len(answered)]
    return Tokens(ids, labels)


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool = False) -> Tensor:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    except Exception as error:  # templates are programs
        raise DataError(
            f"the model's chat template refuses the first {len(messages)} messages: "
            f"{' '.join(str(error).split())}; change them"
        ) from error
    return encoded(tokenizer, text, special=False)


def encoded(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    """The token ids of a text, (n,); `special`: with the tokens that the tokenizer puts around
    texts."""
    # verbose=False: no warning about a text longer than the model's context; it will be cut.
    ids = tokenizer(text, add_special_tokens=special, verbose=False).input_ids
    return torch.tensor(ids, dtype=torch.int64)


class Batch(NamedTuple):
    """Pieces padded on the right, (B, T)."""

    ids: Tensor
    labels: Tensor
    mask: Tensor


def batched(texts: list[Tokens], rows: int) -> Iterator[Batch]:
    """Batches of `rows` texts; the last may have fewer."""
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]

        def padded(rows: list[Tensor], value: int) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        yield Batch(
            padded([t.ids for t in some], 0),
            padded([t.labels for t in some], IGNORED),
            padded([torch.ones_like(t.ids) for t in some], 0),
        )


def equalised(batches: list[Batch], count: int) -> list[Batch]:
    """`count` batches of one shape, which learn the same: rows and columns of padding are added,
    and batches with nothing to learn."""
    rows = max(len(batch.ids) for batch in batches)
    columns = max(batch.ids.shape[1] for batch in batches)

    def padded(batch: Batch, learned: bool) -> Batch:
        right = (0, columns - batch.ids.shape[1])
        ids, mask = (torch.nn.functional.pad(x, right) for x in (batch.ids, batch.mask))
        labels = torch.full((rows, columns), IGNORED)
        if learned:
            own = batch.labels
            labels[: own.shape[0], : own.shape[1]] = own
        # What fills the rows is text as well, since a row of padding alone has no first token.
        fill = [0] * (rows - len(ids))
        return Batch(torch.cat([ids, ids[fill]]), labels, torch.cat([mask, mask[fill]]))

    spare = [padded(batches[0], False)] * (count - len(batches))
    return [padded(batch, True) for batch in batches] + spare


@lru_cache(maxsize=2)
def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch's `count` pieces: a permutation that depends on seed and epoch."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()

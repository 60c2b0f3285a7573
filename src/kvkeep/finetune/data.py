"""Texts and conversations of a JSON Lines file, as token ids and labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch import Tensor

from kvkeep.errors import KVKeepError
from kvkeep.finetune.options import seed_of
from kvkeep.train.losses import IGNORED

Made = TypeVar("Made")


class DataError(KVKeepError, ValueError):
    """A file of texts, or a line of it, cannot be used for training."""


class Tokens(NamedTuple):
    """A text or a piece of a text: token ids (n,), and labels (n,): a token's own id, or -100."""

    ids: Tensor
    labels: Tensor

    @property
    def learned(self) -> int:
        """The number of labels with a loss; the first token is not predicted."""
        return int((self.labels[1:] != IGNORED).sum())


def read(path: Path, tokenizer: Any) -> list[Tokens]:
    """Read the documents of a JSON Lines file. Each line is `{"text": ...}`, `{"messages": [...]}`
    or `{"prompt": ..., "completion": ...}`; the last two may also have `tools`.

    All tokens of a text are learned; of a conversation, the tokens of the assistant's messages
    unless their `weight` is 0; of a prompt with a completion, the completion.

    Raises:
        DataError: the file cannot be read or is empty, or a line has another form.
    """
    return objects(path, lambda given: _document(given, tokenizer))


def objects(path: Path, made: Callable[[dict[str, Any]], Made]) -> list[Made]:
    """Apply `made` to the object on each line of a JSON Lines file.

    Raises:
        DataError: the file cannot be read or is empty, a line is not an object, or `made` raises an
            error, to which the line number is added.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a JSON Lines file") from error
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise DataError(f'{path} is empty; write {{"text": "..."}} on a line for each document')
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(made(_object(line)))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error.__cause__
    return found


def pieces(documents: Iterable[Tokens], length: int) -> list[Tokens]:
    """Documents cut into pieces of at most `length` tokens. Pieces without a label to learn, such
    as single tokens, are dropped."""
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
        what = f"not JSON ({error})"
        raise DataError(f'{what}; write {{"text": "..."}}, for example, on each line') from error
    if not isinstance(given, dict):
        raise DataError(f'{given!r:.40}; give an object, such as {{"text": "..."}}')
    return given


class Chat(NamedTuple):
    """A conversation.

    Args:
        messages: messages for a chat template, without weights; arguments of calls are objects.
        learned: whether each message is learned.
        tools: functions that the model may call, for a chat template; None: none.
    """

    messages: list[dict[str, Any]]
    learned: list[bool]
    tools: list[dict[str, Any]] | None


class Pair(NamedTuple):
    """A text and its continuation; the continuation is learned."""

    prompt: str
    completion: str


def formed(path: Path) -> list[str | Chat | Pair]:
    """The documents of a file before tokenisation, to check the file without a tokenizer.

    Raises:
        DataError: see `read`.
    """
    return objects(path, _formed)


_FORMS = (
    ({"text"}, set[str]()),
    ({"messages"}, {"tools", "parallel_tool_calls"}),
    ({"prompt", "completion"}, {"tools"}),
)
"""The required keys of a line, and its optional keys."""


def _formed(given: dict[str, Any]) -> str | Chat | Pair:
    """A line's document. Unknown keys raise an error, so that no data is silently ignored."""
    needed, more = next((form for form in _FORMS if form[0] <= given.keys()), (set(), set()))
    if not needed or (unknown := given.keys() - needed - more):
        extra = f" (not supported: {', '.join(sorted(unknown))})" if needed else ""
        raise DataError(
            f'an object of {sorted(given)}{extra}; give an object with either "text" or "messages" '
            'or "prompt" and "completion", the last two also with "tools"'
        )
    if "text" in given:
        return text_of(given["text"], '"text"')
    tools = _tools(given.get("tools"))
    if "messages" in given:
        messages, learned = _messages(given["messages"])
        return Chat(messages, learned, tools)
    prompt, completion = given["prompt"], given["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if tools:
            raise DataError('"tools" with texts; give "prompt" and "completion" as messages')
        return Pair(_valid(prompt, '"prompt"'), text_of(completion, '"completion"'))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise DataError('"prompt" and "completion" are not both texts or both lists of messages')
    messages, learned = _messages(prompt + completion)
    answered = [index >= len(prompt) and x for index, x in enumerate(learned)]
    if not any(answered):
        raise DataError('"completion" has no message of the assistant to learn; add one')
    return Chat(messages, answered, tools)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if value is not None and not (
        isinstance(value, list) and all(isinstance(tool, dict) for tool in value)
    ):
        raise DataError(f'"tools" is {value!r:.40}; give a list of {{"type": "function", ...}}')
    return value or None


def _document(given: dict[str, Any], tokenizer: Any) -> Tokens:
    found = _formed(given)
    if isinstance(found, Chat):
        return _conversation(tokenizer, found)
    if isinstance(found, str):
        ids = encoded(tokenizer, found, special=True)
        return Tokens(ids, ids)
    prompt, ids = (
        encoded(tokenizer, text, special=False) for text in (found.prompt, "".join(found))
    )
    # A token that spans the end of the prompt and the start of the completion is learned.
    same = ids[: len(prompt)] == prompt[: len(ids)]
    first = int(same.cumprod(0).sum())
    labels = ids.clone()
    labels[:first] = IGNORED
    return Tokens(ids, labels)


def text_of(value: Any, name: str) -> str:
    """A field of a line, which must be a text that is not empty.

    Raises:
        DataError: the field is not such a text.
    """
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{name} is {value!r:.40}; give text that is not empty")
    return _valid(value, name)


def _valid(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        what = f"{name} has half of a surrogate pair ({error})"
        raise DataError(f"{what}; write whole characters") from error
    return value


_KEYS = {"role", "content", "name", "weight", "tool_calls", "tool_call_id", "reasoning_content"}
"""The keys of a message. The chat template decides which of them the model sees."""


def _messages(value: Any) -> tuple[list[dict[str, Any]], list[bool]]:
    """Messages for a chat template, and whether each message is learned."""
    if not isinstance(value, list) or not value:
        wanted = 'give a list of {"role": ..., "content": ...}'
        raise DataError(f'"messages" is {value!r:.40}; {wanted}')
    messages, learned = [], []
    for index, message in enumerate(value):
        name = f"message {index}"
        if not isinstance(message, dict):
            raise DataError(f'{name} is {message!r:.40}; give {{"role": ..., "content": ...}}')
        if unknown := sorted(message.keys() - _KEYS):
            raise DataError(f"{name} has unsupported keys: {', '.join(unknown)}; remove them")
        role = text_of(message.get("role"), f'"role" of {name}')
        kept = {key: x for key, x in message.items() if key != "weight" and x is not None}
        calls = message.get("tool_calls")
        if calls:
            if not isinstance(calls, list):
                raise DataError(f'"tool_calls" of {name} is {calls!r:.40}; give a list')
            kept["tool_calls"] = [_call(call, f"a call of {name}") for call in calls]
            kept.setdefault("content", "")
        content = kept.get("content")
        if isinstance(content, str) and (role != "assistant" or calls):  # content may be empty
            _valid(content, f'"content" of {name}')
        else:
            text_of(content, f'"content" of {name}')
        messages.append(kept)
        weight = message.get("weight")
        if isinstance(weight, bool) or weight not in (None, 0, 1):
            raise DataError(f'"weight" of {name} is {weight!r:.40}; give 0 or 1')
        learned.append(weight != 0 and role == "assistant")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("no message of the assistant, so nothing to learn; add one")
    if not any(learned):
        raise DataError('every message of the assistant has "weight" 0; give one the weight 1')
    return messages, learned


def _call(call: Any, name: str) -> dict[str, Any]:
    """A call with its arguments as an object, as templates expect; OpenAI sends JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f'{name} is {call!r:.40}; give {{"function": {{"name": ...}}}}')
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{name} has arguments that are not JSON ({error})") from error
    if not isinstance(arguments or {}, dict):
        raise DataError(f"{name} has arguments {arguments!r:.40}; give an object")
    return {**call, "function": {**function, "arguments": arguments or {}}}


def _conversation(tokenizer: Any, chat: Chat) -> Tokens:
    messages, _, tools = chat
    if not getattr(tokenizer, "chat_template", None):
        what = "the model's tokenizer has no chat template"
        raise DataError(f'{what}; give {{"text": ...}}, or use a chat model')
    ids = _rendered(tokenizer, messages, tools)
    labels = torch.full_like(ids, IGNORED)
    for index in range(len(messages)):
        if chat.learned[index]:
            prompt = _rendered(tokenizer, messages[:index], tools, prompt=True)
            answered = _rendered(tokenizer, messages[: index + 1], tools)
            for shorter, longer in ((prompt, answered), (answered, ids)):
                if len(shorter) > len(longer) or not shorter.equal(longer[: len(shorter)]):
                    raise DataError(
                        f"with the model's chat template, the text of message {index} depends on "
                        "what follows; give each answer a line of its own, which ends with it"
                    )
            labels[len(prompt) : len(answered)] = ids[len(prompt) : len(answered)]
    return Tokens(ids, labels)


def _rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    prompt: bool = False,
) -> Tensor:
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, tokenize=False
        )
    except Exception as error:  # templates are programs that raise errors of all classes
        what = f"the model's chat template refuses the first {len(messages)} messages"
        raise DataError(f"{what}: {' '.join(str(error).split())}; change them") from error
    return encoded(tokenizer, text, special=False)


def encoded(tokenizer: Any, text: str, *, special: bool) -> Tensor:
    """The token ids of a text, (n,); `special`: with the special tokens around a text."""
    # verbose=False: no warning that a text exceeds the model's context; it will be cut.
    ids = tokenizer(text, add_special_tokens=special, verbose=False).input_ids
    return torch.tensor(ids, dtype=torch.int64)


class Batch(NamedTuple):
    """Texts padded on the right, (B, T)."""

    ids: Tensor
    labels: Tensor
    mask: Tensor


def batched(texts: list[Tokens], rows: int) -> Iterator[Batch]:
    """Batches of `rows` texts; the last may have fewer."""
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    for start in range(0, len(texts), rows):
        ids, labels = map(list, zip(*texts[start : start + rows], strict=True))
        mask = pad([torch.ones_like(row) for row in ids])
        yield Batch(pad(ids), pad(labels, padding_value=IGNORED), mask)


def equalised(batches: list[Batch], count: int) -> list[Batch]:
    """`count` batches of equal shape with the same labels to learn: rows and columns of padding are
    added, and batches without labels."""
    rows = max(len(batch.ids) for batch in batches)
    columns = max(batch.ids.shape[1] for batch in batches)

    def padded(batch: Batch, learned: bool) -> Batch:
        right = (0, columns - batch.ids.shape[1])
        ids, mask = (torch.nn.functional.pad(x, right) for x in (batch.ids, batch.mask))
        labels = torch.full((rows, columns), IGNORED)
        if learned:
            own = batch.labels
            labels[: own.shape[0], : own.shape[1]] = own
        # Padding rows repeat a text, because a row of padding alone has no first token.
        fill = [0] * (rows - len(ids))
        return Batch(torch.cat([ids, ids[fill]]), labels, torch.cat([mask, mask[fill]]))

    spare = [padded(batches[0], False)] * (count - len(batches))
    return [padded(batch, True) for batch in batches] + spare


@lru_cache(maxsize=2)
def order(count: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch's `count` pieces: a permutation that depends on seed and epoch."""
    generator = torch.Generator().manual_seed(seed_of(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()

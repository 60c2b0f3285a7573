"""attach and detach: route a LitGPT model's attention through kvkeep's caches, and undo this."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from litgpt.model import GPT
from torch import Tensor

from kvkeep.context import within
from kvkeep.errors import ShapeError, StateError, UnsupportedError
from kvkeep.graph.custom_ops import ON_HOST, Ticket, operator, ticket_of
from kvkeep.host import ModelCache, Specs, host_of
from kvkeep.host.compress import compresses
from kvkeep.host.saving import save
from kvkeep.layer.layer import LayerCache
from kvkeep.linears import route as route_linears
from kvkeep.linears import unroute as unroute_linears
from kvkeep.litgpt.decoder import FORWARD, Forward, Traced, require_positions, route, unroute

_ATTRIBUTE = "_kvkeep_attachment"


@dataclass(eq=False, repr=False)
class Attachment:
    """The result of `attach`. As a context manager it detaches the model on exit.

    `cache` is the cache of forwards with `input_pos`. Assign another cache, such as a fork or the
    result of a `PrefixStore`, to continue from it.
    """

    model: GPT
    spec: Specs
    cache: ModelCache
    linears: int
    _forward: Callable[..., Any] | None
    _mask: Tensor | None
    _traced: Traced
    _tickets: list[LayerTicket] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"kvkeep: {len(self.cache.layers)} layers of GPT, {self.spec}"

    def save(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write the cache to a file; for the options see `kvkeep.host.saving.save`. To continue
        from the file, set `attachment.cache = kvkeep.load(path, gpt)`."""
        save(self.cache, path, self.model, **options)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        detach(self.model)


def attach(gpt: GPT, spec: Specs, *, linears: bool = True) -> Attachment:
    """Make forwards of `gpt` with `input_pos` use a kvkeep cache. `set_kv_cache` is not needed, and
    the dense mask of LitGPT's own cache is not allocated.

    A forward at position 0 begins a new cache; a forward at the next position continues it; a
    forward at an earlier position first removes the tokens from that position on. Forwards without
    `input_pos`, such as in training, run as before.

    Raises:
        StateError: the model is already attached.
        UnsupportedError: kvkeep does not support its attention; the model is left unchanged.
        SpecError: the spec does not exist or does not fit the model.
    """
    if attachment_of(gpt) is not None:
        raise StateError("this GPT is attached already; call kvkeep.detach(gpt) first")
    cache, traced = host_of(gpt).new_cache(spec), Traced()
    route(gpt, traced)
    given = gpt.__dict__.get("forward")
    count = route_linears(gpt) if linears else 0
    attachment = Attachment(gpt, spec, cache, count, given, gpt.mask_cache, traced)
    attachment._tickets += [
        LayerTicket(partial(_layers, attachment), i, partial(_enter, attachment))
        for i in range(len(cache))
    ]
    gpt.__dict__[_ATTRIBUTE] = attachment
    own = MethodType(type(gpt).forward, gpt) if given is None else given
    gpt.__dict__["forward"] = partial(_forward, gpt, own)
    gpt.__dict__["set_kv_cache"] = gpt.__dict__["clear_kv_cache"] = partial(_renew, attachment)
    gpt.mask_cache = _no_mask(gpt, gpt.cos.device)
    return attachment


def detach(gpt: GPT) -> None:
    """Undo `attach`.

    Raises:
        StateError: the model is not attached.
    """
    attachment = attachment_of(gpt)
    if attachment is None:
        raise StateError(
            "this GPT is not attached, so there is nothing to detach; leave out this call"
        )
    unroute(gpt)
    if attachment.linears:
        unroute_linears(gpt)
    gpt.mask_cache = attachment._mask
    for name in (_ATTRIBUTE, "set_kv_cache", "clear_kv_cache", "forward"):
        gpt.__dict__.pop(name, None)
    if attachment._forward is not None:
        gpt.__dict__["forward"] = attachment._forward


def attachment_of(gpt: GPT) -> Attachment | None:
    """The attachment of a model; None if the model is not attached."""
    found: Attachment | None = gpt.__dict__.get(_ATTRIBUTE)
    return found


def _no_mask(gpt: GPT, device: torch.device) -> Tensor:
    """A one-element placeholder for LitGPT's mask, which kvkeep's attention does not read."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    return one.expand(1, 1, gpt.config.block_size, 1)


def _renew(attachment: Attachment, *args: object, **options: object) -> None:
    """Begin a new cache; replaces `set_kv_cache` and `clear_kv_cache` of an attached model."""
    attachment.cache = host_of(attachment.model).new_cache(attachment.spec)


def _forward(
    gpt: GPT,
    own: Callable[..., Any],
    idx: Tensor,
    input_pos: Tensor | None = None,
    input_pos_maxp1: int | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Replaces the model's `own` forward: with `input_pos`, uses the attachment's cache."""
    if input_pos is None:
        return own(idx, None, input_pos_maxp1, *args, **kwargs)
    attachment: Attachment = getattr(gpt, _ATTRIBUTE)
    if torch.compiler.is_compiling():
        tickets = attachment._tickets
        position = tickets[0].begin(idx, input_pos)
        # Derived from these positions, so that the graph starts with that operation.
        place = position.long() if input_pos.dim() == 2 else position[0].long()
        attachment._traced.forward = Forward(tickets, position)
        out = own(idx, place.clamp(min=0), None, *args, **kwargs)
        attachment._traced.forward = None
        return out
    if gpt.mask_cache.device != input_pos.device:  # the model was moved
        gpt.mask_cache = _no_mask(gpt, input_pos.device)
    position = _enter(attachment, idx, input_pos)
    with within(FORWARD, Forward(attachment.cache.layers, position)):
        return own(idx, input_pos.clamp(min=0), None, *args, **kwargs)


def _enter(attachment: Attachment, ids: Tensor, at: Tensor) -> Tensor:
    """Begin a forward of the attachment's cache; return the positions for its layers."""
    position = _placed(attachment, ids, at)
    attachment.cache.begin(ids.shape[1])
    return position


def _layers(attachment: Attachment) -> Sequence[LayerCache]:
    return attachment.cache.layers


def _placed(attachment: Attachment, ids: Tensor, at: Tensor) -> Tensor:
    """Positions of ids (B, n) for the layers of a cache, which holds the tokens before them.

    Args:
        at: `input_pos` as given, (n,) or (B, n).

    Raises:
        ShapeError: `at` does not give each token one position, positions do not ascend by one, or
            they exceed the model's positions.
        StateError: the cache lacks tokens before the first position.
        RollbackError: the cache cannot remove the tokens from the first position on.
        UnsupportedError: the spec compresses a text, which the model's own forwards do not support.
    """
    if ids.dim() != 2 or at.shape not in (ids.shape[1:], ids.shape):
        raise ShapeError(
            f"input_pos {tuple(at.shape)} for token ids {tuple(ids.shape)}; give (n,) or (B, n), "
            "and token ids (B, n), of one text ids[None]"
        )
    require_positions(attachment.model, int(at.max()) + 1)
    if at.dim() == 2 and bool((at >= 0).all()) and bool((at == at[:1]).all()):
        at = at[0]
    if bool((at.clamp(min=0).amin(dim=-1) == 0).all()):
        _require_no_compression(attachment)
        if attachment.cache.fed:
            _renew(attachment)
    elif at.dim() == 1 and not attachment.cache.layers[0].padded:
        _return_to(attachment.cache, int(at[0]))
    cache = attachment.cache
    real = at >= 0 if at.dim() == 2 else None
    wanted = cache.layers[0].next_positions(ids.shape[1], at.device, real)
    if not wanted.expand(at.shape).equal(at.to(torch.int32)):
        raise ShapeError(
            f"input_pos {at.tolist()} does not follow the {cache.fed} columns of the cache, which "
            f"continue at {wanted.tolist()}; positions ascend by one in each row, and padding is -1"
        )
    return wanted


def _require_no_compression(attachment: Attachment) -> None:
    """Raise UnsupportedError if the spec compresses a text by a second reading."""
    if compresses(host_of(attachment.model).new_cache(attachment.spec)):
        raise UnsupportedError(
            f"{attachment.spec} compresses a text by reading it a second time, but a LitGPT "
            "model's own forwards read it only once; give token ids to "
            "kvkeep.PrefixStore().read(gpt, ids, spec=...), set attachment.cache to its cache, and "
            "go on from input_pos = cache.fed; or attach with another policy, such as h2o"
        )


def _return_to(cache: ModelCache, columns: int) -> None:
    """Remove the tokens of a cache from a column on."""
    if columns > cache.fed:
        raise StateError(
            f"input_pos begins at {columns}, but the cache was fed {cache.fed} tokens; feed the "
            "tokens in between first"
        )
    if columns < cache.fed:
        cache.rewind(columns)


Layers = Callable[[], Sequence[Any]]
Begin = Callable[[Tensor, Tensor], Tensor]


class LayerTicket(Ticket):
    """A ticket for a layer of the cache that is current when the graph runs; the first layer's
    ticket also begins a forward.

    Args:
        layers: returns the layers of the current cache.
        begin: begins a forward of ids (B, n) at `input_pos`; returns the positions, (n,) or (B, n),
            with -1 for padding.
    """

    def __init__(self, layers: Layers, index: int, begin: Begin) -> None:
        super().__init__(lambda: layers()[index])
        self.begin_now = begin

    def begin(self, ids: Tensor, at: Tensor) -> Tensor:
        """Positions, int32 (1, n), or (B, n) if `at` has two dimensions."""
        return cast(Tensor, _begin_litgpt(self.number, ids, at))


@operator(
    "begin_litgpt(Tensor(a!) ticket, Tensor ids, Tensor at) -> Tensor",
    lambda ticket, ids, at: at.new_empty((1, *at.shape)[-2:], dtype=torch.int32),
    ON_HOST,
)
def _begin_litgpt(ticket: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    own: Any = ticket_of(ticket)
    placed: Tensor = own.begin_now(ids, at)
    return placed.expand(at.shape if at.dim() == 2 else (1, len(at))).to(torch.int32).clone()

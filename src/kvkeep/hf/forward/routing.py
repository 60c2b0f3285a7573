"""Routes the attention of one model to kvkeep.

transformers chooses the attention and the masks of a module by `module.config`, and several models
may share a config. So the modules of an attached model get a view of their config: it shares the
config's dictionary of attributes, but names another attention implementation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast

from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvkeep.hf.config import ATTENTION_PREFIX, decoder_config
from kvkeep.hf.forward.attention import attention_over
from kvkeep.hf.forward.masks import mask_over

_ROUTING, _IMPLEMENTATION = "_kvkeep_routing", "_attn_implementation_internal"


class Routing:
    """The differences between a view and its config.

    Args:
        config: the model's original config.
        name: kvkeep's attention implementation; None: the config's own implementation, for the
            config of a model that contains the decoder.
        text: the view of the decoder's config, for the config of a model that contains the decoder.
    """

    def __init__(self, config: PreTrainedConfig, name: str | None, text: Any = None) -> None:
        self.config, self.name, self.text = config, name, text
        self.original: str = config._attn_implementation
        """The implementation for attention without a kvkeep cache."""


def registered(original: str) -> str:
    """The name of the implementation that uses kvkeep's caches, and calls `original` for other
    keys."""
    # transformers treats a name that contains "flash" as a kernel to import.
    name = ATTENTION_PREFIX + original.replace("flash", "fa")
    AttentionInterface.register(name, attention_over(original))
    AttentionMaskInterface.register(name, mask_over(original))
    return name


def route_attention(model: PreTrainedModel, name: str) -> None:
    """Give the modules of a model views of their configs, which name `name` as the decoder's
    attention implementation."""
    text, outer = decoder_config(model.config), model.config
    views = {id(text): _view(text, Routing(text, name))}
    if outer is not text:
        views[id(outer)] = _view(outer, Routing(outer, None, views[id(text)]))
    for module, config in _configs(model):
        if id(config) in views:
            module.config = views[id(config)]


def unroute_attention(model: PreTrainedModel) -> None:
    """Undo `route_attention`. Views that other objects still hold then name the config's own
    implementation."""
    for module, config in _configs(model):
        routing: Routing | None = getattr(config, _ROUTING, None)
        if routing is not None:
            module.config = cast(Any, routing.config)
            routing.name = routing.text = None


def _configs(model: PreTrainedModel) -> Iterator[tuple[nn.Module, Any]]:
    found = ((module, module.__dict__.get("config")) for module in model.modules())
    return (pair for pair in found if isinstance(pair[1], PreTrainedConfig))


def _view(config: PreTrainedConfig, routing: Routing) -> Any:
    text = routing.config.get_text_config(decoder=True)
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
    return _with(type(config), keys, config.__dict__, routing)


def _with(base: Any, keys: Iterable[str], values: dict[str, Any], routing: Routing) -> Any:
    view: Any = object.__new__(_view_class(base, *keys))
    view.__dict__ = values
    setattr(view, _ROUTING, routing)
    return view


@cache
def _view_class(base: Any, *keys: str) -> Any:
    """The class of views of configs of class `base`; its attributes `keys` hold the decoder's
    config."""

    def implementation(view: Any) -> Any:
        routing = view._kvkeep_routing
        return routing.original if routing.name is None else routing.name

    def set_implementation(view: Any, value: Any) -> None:
        routing = view._kvkeep_routing
        if value != routing.name:  # code may save and restore the name
            routing.original = value
            view.__dict__[_IMPLEMENTATION] = value

    def text_at(key: str) -> property:
        def text(view: Any) -> Any:
            routed = view._kvkeep_routing.text
            return view.__dict__[key] if routed is None else routed

        def set_text(view: Any, value: Any) -> None:
            view.__dict__[key] = value

        return property(text, set_text)

    def reduce(view: Any, _: Any) -> tuple[Any, ...]:
        return _copied, (base, keys, dict(view.__dict__), view._kvkeep_routing)

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members: dict[str, Any] = names | {key: text_at(key) for key in keys}
    members |= {
        "__slots__": (_ROUTING,),
        "__init__": base.__init__,
        "__reduce_ex__": reduce,
        _IMPLEMENTATION: property(implementation, set_implementation),
    }
    return type(base.__name__, (base,), members)


def _copied(base: Any, keys: Iterable[str], values: dict[str, Any], routing: Routing) -> Any:
    """A copy of a view, with its own dictionary of attributes."""
    if routing.name is not None:
        registered(routing.original)  # a pickle may be read in another process
    return _with(base, keys, values, routing)

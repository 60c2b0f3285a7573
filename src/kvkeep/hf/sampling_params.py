"""Converts options of transformers' `generate` to sampling parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvkeep.errors import UnsupportedError
from kvkeep.generate import SamplingParams
from kvkeep.hf.attach import unwrapped

_PLAIN = {
    "cache_implementation": None,
    "compile_config": None,
    "guidance_scale": 1,
    "max_time": None,
    "num_return_sequences": 1,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_logits": False,
    "output_scores": False,
    "prefill_chunk_size": None,
    "token_healing": False,
}
"""Fields of a generation config of which only this value, or None, is supported."""


def sampling_params(
    model: PreTrainedModel, tokens: int, *, seed: int | None = None, **options: Any
) -> SamplingParams:
    """The sampling parameters with which `generate(**options)` would continue a prompt of `tokens`
    tokens, given the model's generation config. If `temperature` is given without `do_sample`, 0
    means greedy, any other value sampling.

    Raises:
        UnsupportedError: an option is not supported, such as beams; or no `max_new_tokens`.
    """
    if "temperature" in options and "do_sample" not in options:
        options["do_sample"] = options["temperature"] > 0
        if not options["do_sample"]:
            del options["temperature"]
    given = options.pop("logits_processor", None)
    library: Any = unwrapped(model)
    config, own = library._prepare_generation_config(None, **options)
    changed = [name for name, x in _PLAIN.items() if getattr(config, name, None) not in (None, x)]
    unserved = [*own, *changed]
    if unserved or config.get_generation_mode() not in (
        GenerationMode.GREEDY_SEARCH,
        GenerationMode.SAMPLE,
    ):
        raise UnsupportedError(
            f"{', '.join(unserved) or config.get_generation_mode().value} is not supported here; "
            "leave it out, or call the model's generate()"
        )
    if config.max_new_tokens is None:
        raise UnsupportedError("max_new_tokens is not set; give a number")
    config.max_length = tokens + config.max_new_tokens
    library._prepare_special_tokens(config, device=library.device)
    processors = library._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=tokens,
        logits_processor=LogitsProcessorList(given or []),
        device=library.device,
    )
    ends, stop = config._eos_token_tensor, config.stop_strings or ()
    return SamplingParams(
        config.max_new_tokens,
        temperature=1.0 if config.do_sample else 0.0,  # a processor applies the temperature
        seed=seed,
        processors=[_AsInGenerate(processors)] if processors else (),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        end_tokens=frozenset() if ends is None else frozenset(ends.tolist()),
    )


@dataclass
class _AsInGenerate:
    """Logits processors of transformers, which get a float32 copy of the logits."""

    processors: Callable[..., Any]

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        changed: Tensor = self.processors(ids, logits.to(torch.float32, copy=True))
        return changed

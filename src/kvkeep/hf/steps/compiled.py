"""Decode steps of an attached model as a compiled program: `attach(model, compile=True)`.

A program has one `kvkeep::step` for each layer, and one `kvkeep::linears` for all linear layers
with the same input; torch fuses the small operations between them. One program serves all caches of
the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from kvkeep.hf.cache import Cache
from kvkeep.hf.cache_argument import cache_in
from kvkeep.hf.forward.packed import NUMBERS, RowsCache
from kvkeep.hf.forward.placing import as_counted
from kvkeep.hf.forward.weights import drops_weights
from kvkeep.hf.inputs import check_fed
from kvkeep.hf.steps import saved_steps
from kvkeep.hf.steps.replaced_forward import ReplacedForward
from kvkeep.hf.steps.step import Step, step_name
from kvkeep.host.packed import Packed
from kvkeep.layer.packed_states import take_back, with_spare_rows
from kvkeep.layer.recurrent import NoStates

if TYPE_CHECKING:  # torch's compiler is slow to import
    from kvkeep.hf.steps.compiling import Compiler


class CompiledSteps(ReplacedForward):
    """The `forward` of a model whose steps are compiled.

    A call with one token a row, without padding and gradients, and with a kvkeep cache that holds a
    prompt, runs in a compiled program. All other calls run the model's own forward.

    Args:
        model: the attached model.
        compile: whether to compile a step when it first runs, once for each number of rows; False:
            use only programs found on disk.
    """

    def __init__(self, model: PreTrainedModel, compile: bool) -> None:
        super().__init__(model)
        self.compile = compile
        self._steps: dict[tuple[int, int], Step | None] = {}  # by number of inputs, number of rows
        self._compiler: Compiler | None = None
        self._rows: RowsCache | None = None
        self._packing = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledSteps, (self.model, self.compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.own(*args, **kwargs)
        given = self.by_name(args, kwargs)
        cache = cache_in(given)
        if not isinstance(cache, Cache) or not self._fits(given, cache):
            return self.own(*args, **kwargs)
        ids = given["input_ids"]
        check_fed(self.model, {"input_ids": ids}, cache.fed)
        cache.carried.begin(cache.fed)
        cache.begin(ids.shape[1])
        out = self._run({"input_ids": ids}, cache)
        return self.own(*args, **kwargs) if out is None else out

    def run_packed(self, tokens: Packed) -> Tensor | None:
        """The logits (sequences, V) of a packed forward of one token of each sequence. None, with
        nothing changed: no program can compute them."""
        count = tokens.sequences
        rows = next((number for number in NUMBERS if number >= count), None)
        if rows is None or tokens.ids.shape[1] > count or torch.is_grad_enabled():
            return None
        if drops_weights(self.model) or self.gives_more:
            return None
        states = with_spare_rows(tokens.states, rows) if tokens.states.parts else NoStates()
        if states is None:
            return None
        if not self._packing.acquire(blocking=False):  # another thread packs sequences
            return None
        try:
            if self._rows is None:
                self._rows = RowsCache(Cache(self.model))
            self._rows.use(tokens.layers, states)
            position = as_counted(self.model, tokens.positions)
            given = {
                name: pad(x[0], (0, rows - count))[:, None]
                for name, x in (("input_ids", tokens.ids), ("position_ids", position))
            }
            out = self._run(given, self._rows)
            if out is None:
                return None
            if states:
                take_back(tokens.states, states)
            return cast(Tensor, out.logits[:count, -1])
        finally:
            if self._rows is not None:
                self._rows.use([None] * len(self._rows), NoStates())
            self._packing.release()

    def _run(self, given: dict[str, Tensor], cache: Cache | RowsCache) -> Any:
        """The model's output for token ids (B, 1), and positions if given. None, with nothing
        changed: there is no program for them."""
        # Inference tensors would need separate graphs.
        with torch.inference_mode(False), torch.no_grad():
            given = {name: x.to(torch.int64).contiguous() for name, x in given.items()}
            place = len(given), len(given["input_ids"])
            step = self._step_at(place, given)
            if step is not None:
                return step.run([*given.values()], cache)
            if not self.compile:
                return None
            if self._compiler is None:
                from kvkeep.hf.steps.compiling import Compiler  # noqa: PLC0415 - torch's compiler is slow to import

                self._compiler = Compiler(self.model, self.own)
            out, self._steps[place] = self._compiler.run(given, cache)
            return out

    def _step_at(self, place: tuple[int, int], given: Mapping[str, Tensor]) -> Step | None:
        """The compiled step for inputs of these names and shapes; None: it is not compiled, or the
        model has changed since."""
        step = self._steps.get(place)
        if step is not None:
            if step.fits():
                return step
            self._steps.clear()
            self._compiler = None  # its graphs fit the model before the change
        elif place in self._steps:  # not found on disk before
            return None
        self._steps[place] = step = self._load(given)
        return step

    def _load(self, given: Mapping[str, Tensor]) -> Step | None:
        name = step_name(self.model, given)
        found = None if name is None else saved_steps.find(name)
        return None if found is None else Step.loaded(self.model, *found)

    def _fits(self, given: dict[str, Any], cache: Cache) -> bool:
        """Whether a call is a step that a program can compute."""
        if not self.is_step(given):
            return False
        if torch.is_grad_enabled() or drops_weights(self.model) or not cache.compiles:
            return False
        mask, fed = given.get("attention_mask"), cache.fed
        if mask is not None and not (
            isinstance(mask, Tensor)
            and mask.dim() == 2
            and mask.shape[1] in (1, fed + 1)
            and bool(mask.all())
        ):
            return False
        for name in ("position_ids", "cache_position"):
            place = given.get(name)
            if place is not None and not (isinstance(place, Tensor) and bool((place == fed).all())):
                return False
        return True

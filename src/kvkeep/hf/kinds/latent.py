"""Steps of models that cache a latent, from which they compute keys and values themselves.

Such a model (DeepSeek's MLA) gives `update` the latents of new tokens, and makes keys and values of
all that `update` returns. So a step has two halves: `update` writes the slots, and the attention
function attends, to what the model made of them, and lets the policy observe and evict.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import local
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvkeep.attention import Attend, Held, Options, Segment, View, dispatch
from kvkeep.codec import Plain
from kvkeep.errors import SpecError, UnsupportedError
from kvkeep.features import Feature, Lacks, unsupported
from kvkeep.hf.handover import Handed
from kvkeep.hf.kinds.base import Kind
from kvkeep.hf.masks import MaskRequest
from kvkeep.layer.packed import SequencePart
from kvkeep.layer.step import StepInputs
from kvkeep.planes import POSITION
from kvkeep.policy import Need, Observation
from kvkeep.spec import CacheSpec

_of_thread = local()  # `step` refers to the step that the last `update` began

_EXPANDS = "expands a latent cache itself"


class Latent(Kind):
    """DeepSeek's MLA: one latent for all heads, which the model expands to keys and values."""

    begins_steps: ClassVar[bool] = True
    lacks: ClassVar[Lacks] = {
        **unsupported(
            _EXPANDS, Feature.COMPILED, Feature.GRAPHED, Feature.EXPORTED, Feature.TRAINED
        ),
        **unsupported(_EXPANDS, Feature.NARROWED, Feature.REREAD),
        Feature.DRAFTS: "expands the latents of all drafts at once",
        Feature.MOVED: "keeps a latent, whose positions are not moved",
        Feature.SIZES: "keeps a latent, whose size its heads do not tell",
    }

    def has(self, text: PreTrainedConfig) -> bool:
        return getattr(text, "kv_lora_rank", None) is not None

    def require_specs(self, specs: Sequence[CacheSpec]) -> None:
        """Raise SpecError if a policy reads what a cache of latents does not hold."""
        for spec in dict.fromkeys(specs):
            policy = spec.policy
            why, remedy = "", "use h2o, snapkv, tova, keydiff or window"
            if policy.weighs_values:
                why = "weighs values"
            elif Need.ROTARY in policy.needs or Need.QUERIES in policy.needs:
                why = "computes attention of its own"
            elif policy.ragged:
                why = "divides slots among heads"
            elif policy.step is not None:
                why, remedy = "divides a chunk into steps", f"leave out step={policy.step}"
            if why:
                raise SpecError(
                    f"policy {policy.name} {why}, but the model caches a latent, one for all "
                    f"heads, of which it makes keys and values itself; {remedy}"
                )

    def begin_step(
        self, cache: Any, parts: Sequence[SequencePart], keys: Tensor, values: Tensor
    ) -> tuple[Handed, tuple[Tensor, Tensor]]:
        """Write the latents of new tokens, and return those of all that are held."""
        step = LatentStep(parts, keys, values, cache.noted_positions(keys.shape[2]))
        return step, step.latents


class LatentStep(Handed):
    """A step of a layer that holds latents, one kv head for all query heads.

    Args:
        parts: the layer of the cache, and its tokens; in a packed forward, of each sequence.
        latent, rotated: of the new tokens, (B, 1, n, R) each: the latent, and the rotary part of
            the key.
        position: the tokens' positions; see `LayerCache.extend`.
    """

    written = True
    _begun: list[tuple[View, Held]] | None  # until then

    def __init__(
        self, parts: Sequence[SequencePart], latent: Tensor, rotated: Tensor, position: Tensor
    ) -> None:
        super().__init__(parts[0].layer, None)
        self.position, self._parts, self._begun = position, parts, []
        for part in parts:
            own = position[..., part.first : part.first + part.tokens]
            view = part.layer.extend(part.of(latent), part.of(rotated), own)
            held = view.in_order(latent.dtype, rotated.dtype, moved=False, centre=part.layer.centre)
            self._begun.append((view, held))
        _of_thread.step = ref(self)

    @property
    def latents(self) -> tuple[Tensor, Tensor]:
        """What `update` returns: `latent` and `rotated` of all tokens held, (B, 1, S, R) each, in
        any order; valid until the step ends. Those of several sequences lie side by side."""
        assert self._begun is not None
        if len(self._begun) == 1:
            return self._begun[0][1][:2]
        latent = torch.cat([held.keys for _, held in self._begun], dim=2)
        return latent, torch.cat([held.values for _, held in self._begun], dim=2)

    def run(self, inputs: StepInputs, attend: Attend | None = None) -> Tensor:
        """Attend to keys and values (B, Hq, S, D) that the model made of all `latents`, and settle.

        Raises:
            UnsupportedError: they are not as many.
        """
        assert self._begun is not None
        k, v = inputs.k, inputs.v
        counts = [held.keys.shape[2] for _, held in self._begun]
        if k.shape[2] != sum(counts):
            raise UnsupportedError(
                f"the model attends to {k.shape[2]} tokens where its cache gave it {sum(counts)} "
                "latents; use the cache with kvkeep.detach(model)"
            )
        found, first = [], 0
        for begun, part, count in zip(self._begun, self._parts, counts, strict=True):
            own = slice(first, first + count)
            given = inputs._replace(q=part.of(inputs.q), k=k[:, :, own], v=v[:, :, own])
            found.append(_attended(begun, part, given, attend))
            first += count
        self.taken, self._begun = True, None
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)


def _attended(
    begun: tuple[View, Held], part: SequencePart, inputs: StepInputs, attend: Attend | None
) -> Tensor:
    """Attention of a sequence's queries to the keys and values of all its tokens; its layer then
    settles."""
    (view, held), layer = begun, part.layer
    policy = layer.policy
    made = Segment({"k": inputs.k, "v": inputs.v, POSITION: held.position}, Plain(), Plain())
    view = view._replace(segments=(made,))
    needs_mass = Need.MASS in policy.needs
    options = Options(inputs.scale, inputs.softcap, inputs.sinks, needs_mass, policy.observed)
    out, mass = (attend or dispatch)(inputs.q, view, options)
    if mass is not None:
        mass = held.as_slots(mass.mean(dim=1, keepdim=True))
    layer.settle(Observation(mass, scale=inputs.scale), packs=attend is None)
    return out


def begun_step(mask: object) -> LatentStep | None:
    """The step that waits for attention with this mask: the positions of its tokens, int32
    (1|B, 1, 1, n), or a copy on another device. None: there is none."""
    found: ref[LatentStep] | None = getattr(_of_thread, "step", None)
    step = None if found is None else found()
    if step is None or step.taken or not isinstance(mask, Tensor):
        return None
    asked: MaskRequest | None = getattr(mask, "kvkeep", None)
    if asked is not None:
        return step if asked.position is step.position and asked.until is None else None
    own = step.position.view(-1, 1, 1, step.position.shape[-1]).to(mask.device)
    return step if mask.dtype == own.dtype and mask.equal(own) else None

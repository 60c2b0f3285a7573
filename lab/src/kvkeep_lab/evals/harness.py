"""lm-evaluation-harness through kvkeep's caches: `kvkeep`, its `hf` model with a spec.

python -m kvkeep_lab.evals.harness run --model kvkeep --model_args pretrained=DIR ...
"""

from __future__ import annotations

from typing import Any

from kvkeep.errors import UnsupportedError
from kvkeep.host import DEFAULT_SPEC, Specs, host_of
from kvkeep.policy import Policy
from kvkeep.version import __version__
from kvkeep_lab.extras import needed_by

with needed_by("The model kvkeep of lm-evaluation-harness", "lm-eval"):
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM


@register_model("kvkeep")
class KVKeepLM(HFLM):  # type: ignore[misc]
    """A model of transformers for lm-evaluation-harness, attached with a spec. The spec is in the
    results: among the model's arguments, and as `kvkeep_cache`.

    Loglikelihoods are computed in one forward for each batch of texts, so a policy that evicts must
    do it within a text: `window`, and other policies with `step=`. Prompts of generation tasks are
    read as by an attached model's `generate()`, so there every policy works.

    Args:
        pretrained: a directory, a hub name, or a model that is not attached.
        cache: the spec of all caches.
        linears: see `kvkeep.attach`.
        options: of `lm_eval.models.huggingface.HFLM`, such as `batch_size`, `device`, `dtype` and
            `peft`.

    Raises:
        SpecError: the spec does not exist or does not fit the model.
        StateError: the model is attached already.
        UnsupportedError: kvkeep does not support the model; or loglikelihoods are asked for that
            would be those of `keep_all`.
    """

    def __init__(
        self, pretrained: Any, cache: Specs = DEFAULT_SPEC, *, linears: bool = True, **options: Any
    ) -> None:
        super().__init__(pretrained, **options)
        host = host_of(self.model)
        host.attach(cache, linears=linears)
        self._spec = str(cache)
        policies = [layer.policy for layer in host.new_cache(cache).layers]
        self._late = next((one.name for one in policies if _evicts_late(one)), None)

    def _loglikelihood_tokens(self, *args: Any, **options: Any) -> list[tuple[float, bool]]:
        if self._late is not None:
            raise UnsupportedError(
                f"{self._late} without a step evicts only after a whole text, so loglikelihoods "
                "would be those of keep_all; give a step, such as h2o:512,step=64, or a window, "
                "such as window:512,sinks=4"
            )
        found: list[tuple[float, bool]] = super()._loglikelihood_tokens(*args, **options)
        return found

    def get_model_info(self) -> dict[str, Any]:
        """What the results say of the model."""
        info: dict[str, Any] = super().get_model_info()
        return info | {"kvkeep_cache": self._spec, "kvkeep_version": __version__}


def _evicts_late(policy: Policy) -> bool:
    evicts = policy.evicts or policy.compression is not None
    return evicts and policy.reach is None and policy.step is None


if __name__ == "__main__":
    cli_evaluate()

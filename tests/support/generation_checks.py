"""What transformers' tests of generation ask of a cache, with every tiny model attached.

Each check runs a model as it is and attached, and compares what it returns: answers, logits, and
the shapes of all that comes with them. Run as a program, it writes the table in
docs/transformers.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, set_seed

import kvkeep
from kvkeep.errors import KVKeepError

sys.path.append(str(Path(__file__).parents[1]))
from support.tiny_models import FAMILIES, tiny

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
NEW, COLUMNS = 6, 7
GREEDY: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
Found = dict[str, Any]
"""What a model returned: tensors, which may differ by rounding, and data, which may not."""


def prompt(rows: int, pads: int = 0) -> dict[str, Tensor]:
    """Rows of which each has `pads` columns of padding on the left."""
    ids = torch.randint(3, 90, (rows, COLUMNS), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[:, :pads] = 0
    return {"input_ids": ids, "attention_mask": mask}


def answered(output: Any) -> Found:
    """A call's tokens and logits, and the shapes of its cache."""
    cache, columns = output.past_key_values, output.sequences.shape[1] - 1
    found = {"sequences": output.sequences.tolist(), "logits": torch.stack(output.logits)}
    return found | {"cache": held(cache, columns)}


def held(cache: Any, columns: int) -> list[Any]:
    """The number of layers and tokens, and each layer's shapes; those with a window may hold one
    token more than others."""
    shapes: list[Any] = [len(cache), cache.get_seq_length() == columns]
    for k, v, window in cache:
        alike = k is not None and window is None
        shapes.append((k.shape, v.shape) if alike else (k is None, window is None))
    return shapes


def greedy(model: PreTrainedModel) -> Found:
    return answered(model.generate(**prompt(2), **GREEDY))


def padded(model: PreTrainedModel) -> Found:
    return answered(model.generate(**prompt(2, pads=3), **GREEDY))


def sampled(model: PreTrainedModel) -> Found:
    set_seed(0)
    options = GREEDY | {"do_sample": True, "top_k": 20, "num_return_sequences": 2}
    return answered(model.generate(**prompt(2, pads=3), **options))


def beams(model: PreTrainedModel) -> Found:
    options = GREEDY | {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 2.0}
    return answered(model.generate(**prompt(2, pads=3), **options))


def assisted(model: PreTrainedModel) -> Found:
    """With the model itself, and with another one, whose drafts are refused."""
    drafter = tiny(_family_of[model])
    drafter.get_output_embeddings().weight.data = model.get_output_embeddings().weight.flip(0)
    found: Found = {}
    for name, assistant in (("itself", model), ("another", drafter)):
        for pads in (0, 3):
            output = model.generate(**prompt(1, pads), **GREEDY, assistant_model=assistant)
            found |= {f"{name} {pads} {key}": x for key, x in answered(output).items()}
    return found


def lookup(model: PreTrainedModel) -> Found:
    return answered(model.generate(**prompt(1, pads=3), **GREEDY, prompt_lookup_num_tokens=2))


def outputs(model: PreTrainedModel) -> Found:
    """Attention weights and hidden states, by their shapes."""
    asked = {"output_attentions": True, "output_hidden_states": True}
    output = model.generate(**prompt(2, pads=3), **GREEDY | asked)
    weights = [[tuple(x.shape[:3]) for x in step] for step in output.attentions]
    hidden = [[tuple(x.shape) for x in step] for step in output.hidden_states]
    return answered(output) | {"attentions": weights, "hidden": hidden}


def continued(model: PreTrainedModel) -> Found:
    """An answer in two calls is that of one."""
    first = model.generate(**prompt(1), **GREEDY)
    again = {"input_ids": first.sequences, "past_key_values": first.past_key_values}
    second = model.generate(**again, **GREEDY)
    whole = model.generate(**prompt(1), **GREEDY | {"max_new_tokens": 2 * NEW})
    assert second.sequences.equal(whole.sequences)
    return answered(second)


def embedded(model: PreTrainedModel) -> Found:
    ids = prompt(2, pads=3)
    given = {"inputs_embeds": model.get_input_embeddings()(ids["input_ids"])}
    output = model.generate(**ids, **given, **GREEDY)
    return {"sequences": output.sequences.tolist(), "logits": torch.stack(output.logits)}


def uncached(model: PreTrainedModel) -> Found:
    """The answer without a cache is that with one."""
    plain = model.generate(**prompt(2, pads=3), **GREEDY, use_cache=False)
    cached = model.generate(**prompt(2, pads=3), **GREEDY)
    assert plain.sequences.equal(cached.sequences)
    return {"logits": torch.stack(cached.logits)}


def left_padding(model: PreTrainedModel) -> Found:
    """The logits of a row do not depend on its padding."""
    ids, pads = prompt(2)["input_ids"], torch.full((2, 5), 2)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(ids)], dim=1)
    place = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = model(ids).logits[:, -1]
        beside = model(torch.cat([pads, ids], 1), attention_mask=mask, position_ids=place).logits
    torch.testing.assert_close(beside[:, -1], alone, atol=1e-4, rtol=1e-3)
    return {"logits": beside[:, -1]}


CHECKS: dict[str, Callable[[PreTrainedModel], Found]] = {
    "greedy": greedy,
    "a batch padded on the left": padded,
    "sampling, two answers": sampled,
    "beams": beams,
    "a draft model": assisted,
    "prompt lookup": lookup,
    "attention weights, hidden states": outputs,
    "an answer in two calls": continued,
    "`inputs_embeds`": embedded,
    "the same without a cache": uncached,
    "the same without padding": left_padding,
}

_family_of: dict[PreTrainedModel, str] = {}


def difference(expected: Found, found: Found) -> str:
    """What differs by more than rounding; empty if nothing does."""
    for name, x in expected.items():
        other = found[name]
        if isinstance(x, Tensor):
            close = x.shape == other.shape and torch.allclose(x, other, atol=1e-3, rtol=1e-3)
            if not close:
                return f"{name} differ"
        elif x != other:
            return f"{name}: {other} instead of {x}"
    return ""


def outcomes(family: str) -> dict[str, str]:
    """For each check, why it fails in a family; empty if it passes, `-` if it does not run without
    kvkeep either."""
    found = {}
    for name, check in CHECKS.items():
        model = tiny(family)
        _family_of[model] = family
        if check is outputs:  # torch's fused attention gives no weights
            model.set_attn_implementation("eager")
        try:
            expected = check(model)
        except Exception:  # of any kind: the check cannot be made
            found[name] = "-"
            continue
        with kvkeep.attach(model):
            try:
                found[name] = difference(expected, check(model))
            except (KVKeepError, AssertionError, ValueError, RuntimeError) as error:
                found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


def table(found: dict[str, dict[str, str]]) -> str:
    """The outcomes of all families, as Markdown."""
    lines = ["| check | families | pass attached |", "|---|---|---|"]
    for name in CHECKS:
        ran = [one[name] for one in found.values() if one[name] != "-"]
        lines.append(f"| {name} | {len(ran)} | {ran.count('')} |")
    return "\n".join(lines)


def in_page() -> str:
    """The table in the page."""
    found = re.search(r"\| check \| families .*?(?=\n\n)", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[0]


def main() -> None:
    found = {family: outcomes(family) for family in tqdm(FAMILIES)}
    PAGE.write_text(PAGE.read_text().replace(in_page(), table(found)))
    for family, one in found.items():
        for name, why in one.items():
            if why:
                tqdm.write(f"{family}, {name}: {why}")


if __name__ == "__main__":
    main()

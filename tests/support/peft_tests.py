"""PEFT's own tests of generation, with every model attached to kvkeep.

A tool to run by hand; pytest does not collect it. It needs the tests of the installed version: a
checkout of PEFT, or its source archive with an empty `tests/__init__.py`; and the packages that
these tests import:

    pip install --no-deps parameterized diffusers
    pip download --no-deps --no-binary :all: peft==VERSION
    python tests/support/peft_tests.py PATH/TO/peft

The tests load small models from a hub; here they find models of the same names and classes, with
random weights, in a directory like the hub's cache. See `transformers_tests` for the table and the
options.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.short_tokenizer import short_tokenizer
from support.transformers_tests import HEAD, compared, run

TESTS = "tests/test_decoder_models.py"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FEW_HEADS = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": (
        "OPT",
        SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2", GPT),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2", GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": ("GPTJ", GPT | {"rotary_dim": 4}),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("Llama", FEW_HEADS),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("Mistral", FEW_HEADS),
    "peft-internal-testing/tiny-dummy-qwen2": ("Qwen2", FEW_HEADS),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": ("Gemma3", FEW_HEADS | {"head_dim": 8}),
}


def model_of(kind: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A model of random weights."""
    text = "TextConfig" if kind == "Gemma3" else "Config"
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = getattr(transformers, kind + text)(vocab_size=len(short_tokenizer()), **sizes, **ids)
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


def make_hub(place: Path) -> None:
    """Write the models and a tokenizer to a directory as the hub's cache."""
    torch.manual_seed(0)
    for name, (kind, sizes) in MODELS.items():
        own = place / ("models--" + name.replace("/", "--"))
        snapshot = own / "snapshots" / "0000"
        (own / "refs").mkdir(parents=True)
        (own / "refs" / "main").write_text("0000")
        model_of(kind, sizes).save_pretrained(snapshot)
        short_tokenizer().save_pretrained(snapshot)


def main() -> None:
    parser = argparse.ArgumentParser(description="PEFT's tests with models attached")
    parser.add_argument("checkout", type=Path, help="a checkout of PEFT")
    parser.add_argument("--keyword", default="generate")
    parser.add_argument("--spec", default="keep_all")
    options, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as hub:
        make_hub(Path(hub))
        offline = {"HF_HUB_CACHE": hub, "HF_HUB_OFFLINE": "1"}
        reports = [
            run(options.checkout, TESTS, options.keyword, spec, ["-o", "addopts=", *extra], offline)
            for spec in (None, options.spec)
        ]
    print(HEAD)
    print(*compared(TESTS, reports), sep="\n")


if __name__ == "__main__":
    main()

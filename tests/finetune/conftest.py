"""What tests of trainers share."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer():
    """Words w0 to w95, each a token of its number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    found = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w2"))
    found.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="w0", eos_token="w1", padding_side="left"
    )

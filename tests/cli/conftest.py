"""What tests of commands share."""

from __future__ import annotations

import pytest
from support import finetune_inputs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a model with its tokenizer."""
    directory = tmp_path_factory.mktemp("base")
    finetune_inputs.model().save_pretrained(directory)
    finetune_inputs.tokenizer().save_pretrained(directory)
    return directory

"""What tests of commands share."""

from __future__ import annotations

import finetuning
import pytest


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The directory of a model with its tokenizer."""
    directory = tmp_path_factory.mktemp("base")
    finetuning.model().save_pretrained(directory)
    finetuning.tokenizer().save_pretrained(directory)
    return directory

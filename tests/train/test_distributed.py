"""Two processes, each with half of the texts, find the gradients that one finds with them all."""

from __future__ import annotations

import pytest
import torch
from support.autograd_gradients import error, gradients
from support.distributed_gradient import CHUNK, SPEC, batch, model_of, run

from kvkeep.train import backward


@pytest.mark.slow  # by default, tests/finetune/test_processes.py trains so
@pytest.mark.parametrize("way", ["fsdp2", "ddp"])
@pytest.mark.parametrize("tied", [True, False])
def test_two_processes_find_the_gradients_of_one(way, tied, tmp_path):
    value, (once, twice) = run(way, tied, str(tmp_path))
    model = model_of(tied)
    ids, labels, mask = batch()
    expected = backward(model, ids, labels, cache=SPEC, chunk=CHUNK, attention_mask=mask)
    torch.testing.assert_close(value, expected)
    names = [name for name, _ in model.named_parameters()]
    ours = torch.cat([gradient.flatten() for gradient in _ordered(once, names)])
    again = torch.cat([gradient.flatten() for gradient in _ordered(twice, names)])
    theirs = gradients(model)
    assert error(ours, theirs) < 1e-10
    assert error(again, 2 * theirs) < 1e-10


def _ordered(found, names):
    by_name = {name.removeprefix("module."): x for name, x in found.items()}
    assert sorted(by_name) == sorted(names)
    return [by_name[name] for name in names]

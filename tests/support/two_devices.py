"""Run a LitGPT model whose layers lie on two devices, on a machine that has none.

torch's fake tensors have a device and a shape but no data, and raise where an operation is given
tensors of different devices. Run as a program, because the device is registered for the process.
"""

from __future__ import annotations

from functools import partial

import torch
from litgpt.generate.sequentially import move_block_input, move_block_output
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import kvkeep
from kvkeep.host import host_of
from kvkeep.litgpt.decoder import Forward, logits, run, running
from support.tiny_litgpt import tiny_gpt

_setup_privateuseone_for_python_backend("pretended")
FIRST, SECOND = torch.device("pretended", 0), torch.device("pretended", 1)


def place(module, device):
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, x in held.items():
                if x is not None:
                    held[name] = torch.empty(x.shape, dtype=x.dtype, device=device)


class Step:
    """Stands for a layer's step."""

    def __init__(self, device):
        self.device, self.ran = device, 0

    def run(self, inputs):
        places = {x.device for x in inputs[:4]}
        assert places == {self.device}, places
        self.ran += 1
        return torch.empty_like(inputs.q)


def main() -> None:
    gpt, devices = tiny_gpt("gemma3"), [FIRST, FIRST, SECOND]
    with FakeTensorMode():
        place(gpt, FIRST)
        place(last := gpt.transformer.h[2], SECOND)
        # As LitGPT's `sequential` does.
        last.register_forward_pre_hook(partial(move_block_input, SECOND))
        last.register_forward_hook(partial(move_block_output, FIRST))
        host, ids = host_of(gpt), torch.zeros(2, 5, dtype=torch.int64, device=FIRST)
        assert host.devices() == [one.device for one in host.geometries()] == devices
        steps = [Step(device) for device in devices]
        position = torch.arange(5, device=FIRST, dtype=torch.int32)

        with kvkeep.attach(gpt):
            gpt._forward_pre_hooks.clear()  # they read positions, which have no data here
            for at in (position, position.expand(2, -1)):
                assert logits(gpt, run(gpt, ids, Forward(steps, at))).device == FIRST
                with running(gpt, Forward(steps, at)):  # by LitGPT's own forward
                    assert gpt(ids, at.long()).device == FIRST
    assert [step.ran for step in steps] == [4, 4, 4]


if __name__ == "__main__":
    main()

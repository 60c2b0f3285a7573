"""LitGPT models whose layers lie on different devices, on a machine that has one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_litgpt import tiny_gpt

import kvkeep
from kvkeep.host import host_of
from kvkeep.host.saving import save
from kvkeep.litgpt.host import LitGPTHost

TESTS = Path(__file__).parents[1]


def test_a_cache_is_loaded_to_the_device_of_each_layer(tmp_path, monkeypatch):
    gpt, devices = tiny_gpt(), [torch.device(x) for x in ("cpu", "meta")]
    with kvkeep.attach(gpt), torch.no_grad():
        host_of(gpt).feed(torch.arange(20)[None], cache := host_of(gpt).new_cache())
    save(cache, tmp_path / "a.kv", gpt)
    monkeypatch.setattr(LitGPTHost, "devices", lambda self: devices)
    loaded = kvkeep.load(tmp_path / "a.kv", gpt)
    assert [layer.held().keys.device for layer in loaded.layers] == devices


@pytest.mark.slow  # a process of its own
def test_each_layer_computes_on_its_device():
    command, env = [sys.executable, "support/two_devices.py"], os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(command, env=env, cwd=TESTS, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr


def test_an_attached_model_may_be_moved():
    """Its stand-in for a mask lies where the positions are."""
    gpt, ids = tiny_gpt(), torch.arange(20)[None]
    with kvkeep.attach(gpt), torch.no_grad():
        expected = gpt(ids, torch.arange(20))
        gpt.mask_cache = gpt.mask_cache.to("meta")  # as if attached there
        assert gpt(ids, torch.arange(20)).equal(expected)
        assert gpt.mask_cache.device == ids.device

"""Several texts that follow each other in one row are refused, not computed as one."""

from __future__ import annotations

import pytest
import torch
from support.tiny_models import tiny

import kvkeep
from kvkeep.errors import UnsupportedError


@pytest.fixture(scope="module")
def attached():
    model = tiny("llama")
    with kvkeep.attach(model):
        yield model


def ids(rows: int = 1, n: int = 7) -> torch.Tensor:
    return torch.randint(2, 96, (rows, n), generator=torch.Generator().manual_seed(3))


PACKED = {
    "two texts": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}, "token 3, with 0"),
    "a text of one token": ({"position_ids": torch.tensor([[0, 0, 1, 2, 3, 4, 5]])}, "token 1"),
    "a later part": ({"position_ids": torch.tensor([[5, 6, 7, 2, 3, 4, 5]])}, "token 3, with 2"),
    "three parts": (
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(3, 1, 7)},
        "token 3, with 0",
    ),
    "lengths": ({"cu_seq_lens_q": torch.tensor([0, 3, 7])}, "cu_seq_lens_q names 2 texts"),
    "numbers": ({"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]])}, "seq_idx names more than one"),
}


@torch.no_grad()
@pytest.mark.parametrize(("given", "reason"), PACKED.values(), ids=PACKED)
def test_packed_texts_are_refused_before_anything_is_fed(attached, given, reason):
    cache = kvkeep.Cache(attached)
    for call in (
        lambda: attached(ids(), past_key_values=cache, **given),
        lambda: attached.model(ids(), past_key_values=cache, **given),
        lambda: attached(ids(), **given),
    ):
        with pytest.raises(UnsupportedError, match=f"{reason}.*its own row"):
            call()
    assert cache.fed == 0


def test_a_chunked_prompt_of_packed_texts_is_refused_as_a_whole(attached):
    cache = kvkeep.Cache(attached)
    place = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(UnsupportedError, match="restart at token 3"):
        attached.generate(
            ids(),
            position_ids=place,
            past_key_values=cache,
            prefill_chunk_size=3,
            max_new_tokens=2,
        )
    assert cache.fed == 0


SINGLE = {
    "padding in front": ([[1, 1, 1, 0, 1, 2, 3]], [[0, 0, 0, 1, 1, 1, 1]]),
    "padding within": ([[0, 1, 1, 1, 2, 3, 4]], [[1, 1, 0, 0, 1, 1, 1]]),
    "padding at zero": ([[0, 1, 0, 0, 2, 3, 4]], [[1, 1, 0, 0, 1, 1, 1]]),
    "gaps": ([[0, 1, 9, 10, 11, 40, 41]], None),
    "shared": ([[3, 4, 4, 4, 5, 6, 7]], None),
}


@torch.no_grad()
@pytest.mark.parametrize(("place", "mask"), SINGLE.values(), ids=SINGLE)
def test_one_text_is_computed(attached, place, mask):
    given = {"position_ids": torch.tensor(place)}
    if mask is not None:
        given["attention_mask"] = torch.tensor(mask)
    real = torch.ones(1, 7, dtype=torch.bool) if mask is None else given["attention_mask"] > 0
    cache = kvkeep.Cache(attached)
    logits = attached(ids(), past_key_values=cache, **given).logits
    mask4 = (torch.ones(7, 7).tril().bool() & real[:, None, None]) | torch.eye(7).bool()
    expected = attached(
        ids(), attention_mask=mask4, position_ids=given["position_ids"], use_cache=False
    ).logits
    torch.testing.assert_close(logits[real], expected[real], atol=2e-5, rtol=2e-4)


@torch.no_grad()
def test_packed_texts_without_a_cache_stay_with_the_model(attached):
    place = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    logits = attached(ids(), position_ids=place, use_cache=False).logits
    for part in (slice(0, 3), slice(3, 7)):
        alone = attached(ids()[:, part], use_cache=False).logits
        torch.testing.assert_close(logits[:, part], alone, atol=2e-5, rtol=2e-4)

"""Tiny random models that read images or sound beside text, each with prompts of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

VOCABULARY, MEDIUM, START, END, FIRST_TEXT = 96, 90, 91, 92, 5
"""Token ids: the placeholder of an image or of sound, what stands around it, and the first of those
that texts are made of."""

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_channels": 3,
    "image_size": 16,
    "patch_size": 4,
}


class Multimodal(NamedTuple):
    """A tiny model, how many placeholders one image or sound has in a prompt, and what the model is
    given of as many of them as asked. `types`: the argument that marks placeholders in a prompt."""

    model: Any
    placeholders: int
    media: Callable[[torch.Generator, int], dict[str, Any]]
    types: str = ""

    def prompt(
        self, rows: int = 1, *, seed: int = 0, text: int = 1, pads: int = 0
    ) -> dict[str, Any]:
        """A prompt whose every row is a text, one medium, and another text; the first row is padded
        on its left.

        Args:
            seed: what the media are drawn from.
            text: what the texts are drawn from.
            pads: columns of padding.
        """
        drawn = torch.Generator().manual_seed(text)
        ids = torch.randint(FIRST_TEXT, MEDIUM, (rows, pads + 16), generator=drawn)
        start = pads + 5
        medium = torch.tensor([START, *[MEDIUM] * self.placeholders, END])
        ids = torch.cat([ids[:, :start], medium.expand(rows, -1), ids[:, start:]], dim=1)
        mask = torch.ones_like(ids)
        mask[0, :pads] = 0
        ids = torch.where(mask == 0, 1, ids)
        found = {"input_ids": ids, "attention_mask": mask}
        if self.types:
            found[self.types] = (ids == MEDIUM).int()
        return found | self.media(torch.Generator().manual_seed(seed), rows)


def build(name: str) -> Multimodal:
    """One of `FAMILIES`, with weights large enough that attention and text vary."""
    torch.default_generator.manual_seed(0)
    found = FAMILIES[name]()
    found.model.eval()
    with torch.no_grad():
        for weight in found.model.parameters():
            if weight.dim() >= 2:
                weight.normal_(0.0, 1.5 * min(weight.shape[0], weight[0].numel()) ** -0.5)
    return found


def without_media(prompt: dict[str, Any]) -> dict[str, Any]:
    """The token ids and padding of a prompt."""
    return {name: prompt[name] for name in ("input_ids", "attention_mask")}


# -- images ---------------------------------------------------------------------------------


def _images(size: int = 16, *more: int, **fixed: Any) -> Callable[..., dict[str, Any]]:
    """One image for each row: pixel_values (rows, ..., 3, size, size)."""

    def media(drawn: torch.Generator, rows: int) -> dict[str, Any]:
        pixels = torch.randn(rows, *more, 3, size, size, generator=drawn)
        return {"pixel_values": pixels} | {
            name: torch.tensor([value] * rows) for name, value in fixed.items()
        }

    return media


def _patches(width: int, grid: tuple[int, int, int]) -> Callable[..., dict[str, Any]]:
    """Images as patches side by side, each row of the batch with one image of t x h x w patches."""

    def media(drawn: torch.Generator, rows: int) -> dict[str, Any]:
        count = rows * grid[0] * grid[1] * grid[2]
        return {
            "pixel_values": torch.randn(count, width, generator=drawn),
            "image_grid_thw": torch.tensor([grid] * rows),
        }

    return media


def _clip() -> dict[str, Any]:
    return {"model_type": "clip_vision_model", **_TOWER}


def _siglip(**own: Any) -> dict[str, Any]:
    return {"model_type": "siglip_vision_model", **_TOWER, "vision_use_head": False} | own


def _llama(kind: str = "llama", **own: Any) -> dict[str, Any]:
    return {"model_type": kind, **_TEXT} | own


def _mrope(section: tuple[int, int, int], **own: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {name: x for name, x in _TEXT.items() if name != "head_dim"} | {
        "rope_parameters": rope | own
    }


_VISION_TOKENS = {
    "image_token_id": MEDIUM,
    "video_token_id": VOCABULARY - 2,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_GRID = (1, 4, 8)  # 32 patches, merged to 8 placeholders of 2 x 4


_PATCH_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 24,
    "patch_size": 4,
}
"""The vision tower of models that take an image as a grid of patches."""


def _of_patches(model: Any) -> Multimodal:
    return Multimodal(model, 8, _patches(3 * 2 * 4 * 4, _GRID), types="mm_token_type_ids")


def _qwen2_vl() -> Multimodal:
    config = transformers.Qwen2VLConfig(
        text_config=_mrope((1, 1, 2)),
        vision_config={
            "depth": 2,
            "embed_dim": 16,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 4,
        },
        **_VISION_TOKENS,
    )
    model = transformers.Qwen2VLForConditionalGeneration(config)
    return _of_patches(model)


def _qwen2_5_vl() -> Multimodal:
    config = transformers.Qwen2_5_VLConfig(
        text_config=_mrope((1, 1, 2)),
        vision_config=_PATCH_TOWER
        | {
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **_VISION_TOKENS,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return _of_patches(model)


def _qwen3_vl() -> Multimodal:
    config = transformers.Qwen3VLConfig(
        text_config=_mrope((2, 1, 1), mrope_interleaved=True) | {"head_dim": 8},
        vision_config=_PATCH_TOWER
        | {
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **_VISION_TOKENS,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    return _of_patches(model)


def _qwen3_5() -> Multimodal:
    text = _mrope((2, 1, 1), mrope_interleaved=True, partial_rotary_factor=1.0) | {
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    }
    config = transformers.Qwen3_5Config(
        text_config=text,
        vision_config=_PATCH_TOWER
        | {
            "num_position_embeddings": 64,
        },
        **_VISION_TOKENS,
    )
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    return _of_patches(model)


def _glm4v() -> Multimodal:
    config = transformers.Glm4vConfig(
        text_config=_mrope((1, 1, 2)),
        vision_config=_PATCH_TOWER
        | {
            "image_size": 32,
        },
        image_token_id=MEDIUM,
        video_token_id=VOCABULARY - 2,
        image_start_token_id=START,
        image_end_token_id=END,
        video_start_token_id=VOCABULARY - 3,
        video_end_token_id=VOCABULARY - 4,
    )
    model = transformers.Glm4vForConditionalGeneration(config)
    return _of_patches(model)


def _llava() -> Multimodal:
    config = transformers.LlavaConfig(
        text_config=_llama(), vision_config=_clip(), image_token_index=MEDIUM
    )
    return Multimodal(transformers.LlavaForConditionalGeneration(config), 16, _images())


def _llava_next() -> Multimodal:
    config = transformers.LlavaNextConfig(
        text_config=_llama("mistral"),
        vision_config=_clip(),
        image_token_index=MEDIUM,
        image_grid_pinpoints=[[16, 16], [16, 32]],
    )
    # 16 of the whole image, 16 of its only part, and a mark at the end of each of its 4 lines.
    media = _images(16, 2, image_sizes=[16, 16])
    return Multimodal(transformers.LlavaNextForConditionalGeneration(config), 36, media)


def _llava_onevision() -> Multimodal:
    config = transformers.LlavaOnevisionConfig(
        text_config=_llama("qwen2"),
        vision_config=_siglip(),
        image_token_index=MEDIUM,
        video_token_index=VOCABULARY - 2,
        image_grid_pinpoints=[[16, 16], [16, 32]],
    )
    media = _images(16, 2, image_sizes=[16, 16])
    return Multimodal(transformers.LlavaOnevisionForConditionalGeneration(config), 36, media)


def _idefics2() -> Multimodal:
    config = transformers.Idefics2Config(
        text_config=_llama("mistral", sliding_window=None),
        vision_config=_TOWER,
        perceiver_config={
            "hidden_size": 32,
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 2,
            "resampler_head_dim": 8,
            "num_key_value_heads": 1,
        },
        image_token_id=MEDIUM,
    )
    return Multimodal(transformers.Idefics2ForConditionalGeneration(config), 4, _images(16, 1))


def _idefics3() -> Multimodal:
    config = transformers.Idefics3Config(
        text_config=_llama(), vision_config=_TOWER, image_token_id=MEDIUM, scale_factor=2
    )
    return Multimodal(transformers.Idefics3ForConditionalGeneration(config), 4, _images(16, 1))


def _smolvlm() -> Multimodal:
    config = transformers.SmolVLMConfig(
        text_config=_llama(), vision_config=_TOWER, image_token_id=MEDIUM, scale_factor=2
    )
    return Multimodal(transformers.SmolVLMForConditionalGeneration(config), 4, _images(16, 1))


def _paligemma() -> Multimodal:
    config = transformers.PaliGemmaConfig(
        text_config=_llama("gemma"),
        vision_config=_siglip(projection_dim=32),
        image_token_index=MEDIUM,
        projection_dim=32,
        hidden_size=32,
        vocab_size=VOCABULARY,
    )
    return Multimodal(transformers.PaliGemmaForConditionalGeneration(config), 16, _images())


def _gemma3() -> Multimodal:
    text = {**_TEXT, "sliding_window": 8, "num_hidden_layers": 2}
    config = transformers.Gemma3Config(
        text_config=text | {"layer_types": ["sliding_attention", "full_attention"]},
        vision_config=_siglip(),
        image_token_index=MEDIUM,
        boi_token_index=START,
        eoi_token_index=END,
        mm_tokens_per_image=4,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    return Multimodal(model, 4, _images(), types="token_type_ids")


def _mistral3() -> Multimodal:
    config = transformers.Mistral3Config(
        text_config=_llama("mistral", sliding_window=None),
        vision_config={"model_type": "pixtral", **_TOWER, "head_dim": 8},
        image_token_index=MEDIUM,
        spatial_merge_size=2,
    )
    media = _images(16, image_sizes=[16, 16])
    return Multimodal(transformers.Mistral3ForConditionalGeneration(config), 4, media)


def _pixtral() -> Multimodal:
    config = transformers.LlavaConfig(
        text_config=_llama("mistral", sliding_window=None),
        vision_config={"model_type": "pixtral", **_TOWER, "head_dim": 8},
        image_token_index=MEDIUM,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    media = _images(16, image_sizes=[16, 16])
    return Multimodal(transformers.LlavaForConditionalGeneration(config), 16, media)


def _internvl() -> Multimodal:
    config = transformers.InternVLConfig(
        text_config=_llama("qwen2"),
        vision_config=_TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=MEDIUM,
        image_seq_length=4,
    )
    return Multimodal(transformers.InternVLForConditionalGeneration(config), 4, _images())


def _mllama() -> Multimodal:
    config = transformers.MllamaConfig(
        text_config={
            **_TEXT,
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
            "bos_token_id": 2,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
            "max_num_tiles": 1,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 32,
            "supported_aspect_ratios": [[1, 1]],
        },
        image_token_index=MEDIUM,
    )
    return Multimodal(transformers.MllamaForConditionalGeneration(config), 1, _images(16, 1, 1))


def _blip2() -> Multimodal:
    config = transformers.Blip2Config(
        vision_config={**_TOWER, "num_attention_heads": 2},
        qformer_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "encoder_hidden_size": 16,
        },
        text_config={
            "model_type": "opt",
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "word_embed_proj_dim": 32,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "eos_token_id": None,
        },
        num_query_tokens=4,
        image_token_index=MEDIUM,
    )
    return Multimodal(transformers.Blip2ForConditionalGeneration(config), 4, _images())


# -- sound ----------------------------------------------------------------------------------


def _voxtral() -> Multimodal:
    config = transformers.VoxtralConfig(
        text_config=_llama(),
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_mel_bins": 8,
            "max_source_positions": 16,
        },
        audio_token_id=MEDIUM,
    )

    def media(drawn: torch.Generator, rows: int) -> dict[str, Any]:
        return {"input_features": torch.randn(rows, 8, 32, generator=drawn)}

    return Multimodal(transformers.VoxtralForConditionalGeneration(config), 4, media)


def _qwen2_audio() -> Multimodal:
    config = transformers.Qwen2AudioConfig(
        text_config=_llama("qwen2"),
        audio_config={
            "num_mel_bins": 8,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "d_model": 16,
            "max_source_positions": 16,
        },
        audio_token_index=MEDIUM,
    )

    def media(drawn: torch.Generator, rows: int) -> dict[str, Any]:
        return {
            "input_features": torch.randn(rows, 8, 32, generator=drawn),
            "feature_attention_mask": torch.ones(rows, 32, dtype=torch.int64),
        }

    return Multimodal(transformers.Qwen2AudioForConditionalGeneration(config), 8, media)


def _granite_speech() -> Multimodal:
    config = transformers.GraniteSpeechConfig(
        text_config=_llama("granite"),
        encoder_config={
            "input_dim": 8,
            "num_layers": 2,
            "hidden_dim": 16,
            "num_heads": 2,
            "dim_head": 8,
            "output_dim": 6,
            "context_size": 8,
            "max_pos_emb": 16,
            "conv_kernel_size": 3,
        },
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 24,
            "encoder_hidden_size": 16,
            "cross_attention_frequency": 1,
        },
        audio_token_index=MEDIUM,
        has_lora_adapter=False,
        downsample_rate=2,
        window_size=4,
    )

    def media(drawn: torch.Generator, rows: int) -> dict[str, Any]:
        return {"input_features": torch.randn(rows, 16, 8, generator=drawn)}

    return Multimodal(transformers.GraniteSpeechForConditionalGeneration(config), 8, media)


FAMILIES: dict[str, Callable[[], Multimodal]] = {
    "blip_2": _blip2,
    "gemma3": _gemma3,
    "glm4v": _glm4v,
    "granite_speech": _granite_speech,
    "idefics2": _idefics2,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "paligemma": _paligemma,
    "pixtral": _pixtral,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
    "voxtral": _voxtral,
}

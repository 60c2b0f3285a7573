"""A tiny model that sees, with a processor that reads images as its own do."""

from __future__ import annotations

import base64
import copy
import io

import numpy
import transformers
from PIL import Image

from support.short_tokenizer import SIZE, short_tokenizer
from support.tiny_multimodal import _TEXT, _TOWER

TEMPLATE = (  # of lists only, as LLaVA's
    "{% for m in messages %}[{{ m.role }}]{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
PLACEHOLDERS = 16  # of an image
EDGE = 16


def tiny_llava():
    """The model, of random weights, and its processor."""
    tokenizer = copy.deepcopy(short_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = tokenizer.convert_tokens_to_ids("<image>")
    text = {"model_type": "llama", **_TEXT, "vocab_size": SIZE + 8, "eos_token_id": 2}
    config = transformers.LlavaConfig(
        text_config=text | {"max_position_embeddings": 1024},
        vision_config={"model_type": "clip_vision_model", **_TOWER},
        image_token_index=image,
    )
    size = {"height": EDGE, "width": EDGE}
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": EDGE}, crop_size=size)
    processor = transformers.LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    tokenizer.chat_template = TEMPLATE
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for weight in model.parameters():
        if weight.dim() >= 2:
            weight.data.normal_(0.0, 1.5 * min(weight.shape[0], weight[0].numel()) ** -0.5)
    model.generation_config.eos_token_id = 2
    return model, processor


def picture(seed, width=20, height=30):
    """An image of random pixels."""
    drawn = numpy.random.default_rng(seed)
    return Image.fromarray(drawn.integers(0, 256, (height, width, 3), dtype=numpy.uint8))


def encoded(image, kind="PNG"):
    """The bytes of an image's file."""
    held = io.BytesIO()
    image.save(held, kind)
    return held.getvalue()


def data_url(image, kind="PNG"):
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(image, kind)).decode()}"

"""A tiny model in a GGUF file, for tests that read one."""

from __future__ import annotations

import gguf
import numpy as np

WIDTH, HEADS, KV_HEADS, LAYERS = 32, 4, 2, 2


def write(path, seed=0):
    """A Llama of random weights, whose tokens are bytes."""
    letters = [chr(x) for x in (*range(33, 127), *range(161, 173), *range(174, 256))]
    letters += [chr(256 + n) for n in range(256 - len(letters))]  # GPT-2's names of bytes
    tokens = ["<|end|>", *letters, "ab"]
    draw = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(letters) + 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    narrow, wide = WIDTH * KV_HEADS // HEADS, 2 * WIDTH
    shapes = {"token_embd": (len(tokens), WIDTH), "output": (len(tokens), WIDTH)}
    norms = ["output_norm"]
    for i in range(LAYERS):
        norms += [f"blk.{i}.attn_norm", f"blk.{i}.ffn_norm"]
        shapes |= {f"blk.{i}.attn_{x}": (WIDTH, WIDTH) for x in ("q", "output")}
        shapes |= {f"blk.{i}.attn_{x}": (narrow, WIDTH) for x in "kv"}
        shapes |= {f"blk.{i}.ffn_{x}": (wide, WIDTH) for x in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (WIDTH, wide)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.1, shape).astype(np.float32))
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

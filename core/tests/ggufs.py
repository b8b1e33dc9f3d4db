"""GGUF files made by hand for the tests, and what they mean: scalar dequantisation and float64 models of their own.

The models compute with the tensors as they lie in the file, in the way llama.cpp does (interleaved rotary pairs
for llama, norm weights with 1 added for gemma3), so that a converter's mistakes cannot cancel out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "BF16": (30, 1, 2), "Q3_K": (11, 256, 110), "IQ4_NL": (20, 32, 18),
}  # fmt: skip
"""Name -> ggml number, weights and bytes of a block."""


# -- the container -----------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Type number and bytes of a metadata value; int is UINT32 (INT32 when negative or in a list), float FLOAT32."""
    if isinstance(item, bool):
        return struct.pack("<IB", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item) if item >= 0 else struct.pack("<Ii", 5, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if all(type(element) is int for element in item):  # as llama.cpp wants them
        return struct.pack("<IIQ", 9, 5, len(item)) + struct.pack(f"<{len(item)}i", *item)
    return (
        struct.pack("<I", 9) + value(item[0])[:4] + struct.pack("<Q", len(item)) + b"".join(value(e)[4:] for e in item)
    )


@dataclass
class Made:
    """A file to be written: metadata, and tensors as name -> (shape with rows first, type name, bytes)."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str, bytes]] = field(default_factory=dict)
    version: int = 3

    def bytes(self) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        head += b"".join(text(key) + value(item) for key, item in self.metadata.items())
        data = b""
        for name, (shape, kind, content) in self.tensors.items():
            axes = struct.pack(f"<{len(shape)}Q", *shape[::-1])
            head += text(name) + struct.pack("<I", len(shape)) + axes + struct.pack("<IQ", TYPES[kind][0], len(data))
            data += content + b"\0" * (-len(content) % 32)
        return head + b"\0" * (-len(head) % 32) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path

    def floats(self, name: str) -> np.ndarray:
        """A tensor in float64."""
        shape, kind, content = self.tensors[name]
        return dequantise(kind, content).reshape(shape)


# -- tensors -----------------------------------------------------------------------------------------------


def random_blocks(kind: str, shape: tuple[int, ...], seed: int, scale: float = 0.02) -> bytes:
    """Random data of a type: every code occurs; weights are about `scale` in size."""
    rng = np.random.default_rng(seed)
    _, weights, nbytes = TYPES[kind]
    count = math.prod(shape) // weights
    if weights == 1:
        return from_floats(kind, rng.standard_normal(shape) * scale)
    blocks = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)

    def half(at: int, low: float, high: float) -> None:
        values = rng.uniform(low, high, count) * rng.choice([-1, 1], count)
        blocks[:, at : at + 2] = values.astype("<f2").view(np.uint8).reshape(count, 2)

    largest = {"Q4_0": 8, "Q4_1": 16, "Q5_0": 16, "Q5_1": 32, "Q8_0": 128, "Q4_K": 960, "Q5_K": 1900, "Q6_K": 4000}
    step = 2 * scale / largest.get(kind, 8)
    half(208 if kind == "Q6_K" else 0, step / 2, step)
    if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        half(2, scale / 2 / (63 if "K" in kind else 1), scale / (63 if "K" in kind else 1))
    return blocks.tobytes()


def from_floats(kind: str, values: Any) -> bytes:
    values = np.asarray(values, np.float32)
    if kind == "F32":
        return values.astype("<f4").tobytes()
    if kind == "F16":
        return values.astype("<f2").tobytes()
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def dequantise(kind: str, data: bytes) -> np.ndarray:
    """Float64 weights, one block and one weight at a time, as ggml's reference functions do it."""
    if kind in ("F32", "F16"):
        return np.frombuffer(data, "<f4" if kind == "F32" else "<f2").astype(np.float64)
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    nbytes = TYPES[kind][2]
    decode = {"Q4_K": _k_block, "Q5_K": _k_block, "Q6_K": _q6_k}.get(kind, _small_block)
    return np.array([w for at in range(0, len(data), nbytes) for w in decode(kind, data[at : at + nbytes])])


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def _small_block(kind: str, block: bytes) -> list[float]:
    d = _half(block, 0)
    if kind == "Q8_0":
        return [d * q for q in struct.unpack_from("<32b", block, 2)]
    five, least = kind[1] == "5", kind[3] == "1"
    at = 4 if least else 2
    high = struct.unpack_from("<I", block, at)[0] if five else 0
    low = block[at + 4 * five :]
    codes = [low[i] & 15 for i in range(16)] + [low[i] >> 4 for i in range(16)]
    codes = [code + 16 * (high >> i & 1) for i, code in enumerate(codes)]
    return [d * code + _half(block, 2) if least else d * (code - (16 if five else 8)) for code in codes]


def _k_block(kind: str, block: bytes) -> list[float]:
    d, least, packed = _half(block, 0), _half(block, 2), block[4:16]
    high, low = (block[16:48], block[48:]) if kind == "Q5_K" else (b"", block[16:])
    found = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
            minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
        for i in range(32):
            code = low[group // 2 * 32 + i] >> 4 * (group % 2) & 15
            code += 16 * (high[i] >> group & 1) if high else 0
            found.append(d * scale * code - least * minimum)
    return found


def _q6_k(kind: str, block: bytes) -> list[float]:
    scales, d = struct.unpack_from("<16b", block, 192), _half(block, 208)
    found = []
    for w in range(256):
        part, i = divmod(w, 128)
        low = block[part * 64 + i % 64] >> (4 if i >= 64 else 0) & 15
        high = block[128 + part * 32 + i % 32] >> 2 * (i // 32) & 3
        found.append(d * scales[w // 16] * ((low | high << 4) - 32))
    return found


# -- vocabularies ------------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def byte_vocabulary(extra: int = 3) -> dict[str, Any]:
    """Metadata of a byte-level tokenizer with a few merges and control tokens; `extra` unused tokens at the end."""
    from mlx_spec.testing.tokenizer import byte_characters

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "1 2", "r l"]
    tokens = [*control, *byte_characters(), *(m.replace(" ", "") for m in merges)]
    types = [3] * len(control) + [1] * (len(tokens) - len(control)) + [5] * extra
    tokens += [f"[PAD{len(tokens) + i}]" for i in range(extra)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


# -- models ------------------------------------------------------------------------------------------------

Kinds = dict[str, str]
LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 96,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 160,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 24,
    "llama.attention.value_length": 24,
    "llama.rope.dimension_count": 24,
    "llama.rope.freq_base": 5000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
GEMMA3 = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 3,
    "gemma3.context_length": 64,
    "gemma3.embedding_length": 64,
    "gemma3.feed_forward_length": 96,
    "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1,
    "gemma3.attention.key_length": 32,
    "gemma3.attention.value_length": 32,
    "gemma3.attention.sliding_window": 5,
    "gemma3.attention.sliding_window_pattern": 2,
    "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    "gemma3.rope.freq_base": 80000.0,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 4.0,
}


def make(
    base: dict[str, Any], kinds: Kinds | str = "F32", *, tied: bool = True, biases: str = "", seed: int = 1
) -> Made:
    """A model of one of the two architectures with random weights.

    kinds: type of all linear layers, or by name in a block ("attn_q", ..., "token_embd", "output").
    biases: names in a block that have one, separated by spaces.
    """
    name = base["general.architecture"]
    own = {key.removeprefix(f"{name}."): item for key, item in base.items()}
    metadata = base | byte_vocabulary()
    rows = len(metadata["tokenizer.ggml.tokens"]) + 2  # the embedding has more rows than there are tokens
    hidden, inner, head = own["embedding_length"], own["feed_forward_length"], own["attention.key_length"]
    q, kv = own["attention.head_count"] * head, own["attention.head_count_kv"] * head
    linears = {
        "attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    norms = {"attn_norm": hidden, "ffn_norm": hidden}
    if name == "gemma3":
        norms |= {"attn_q_norm": head, "attn_k_norm": head, "post_attention_norm": hidden, "post_ffw_norm": hidden}
    made = Made(metadata)

    def add(full: str, shape: tuple[int, ...], kind: str, scale: float) -> None:
        made.tensors[full] = (shape, kind, random_blocks(kind, shape, seed * 1000 + len(made.tensors), scale))

    def kind_of(part: str) -> str:
        return kinds if isinstance(kinds, str) else kinds.get(part, "F32")

    add("token_embd.weight", (rows, hidden), kind_of("token_embd"), 0.5)
    for i in range(own["block_count"]):
        for part, shape in linears.items():
            add(f"blk.{i}.{part}.weight", shape, kind_of(part), 0.2)
            if part in biases.split():
                add(f"blk.{i}.{part}.bias", shape[:1], "F32", 0.3)
        for part, width in norms.items():
            _norm(made, f"blk.{i}.{part}.weight", width, seed + i)
    _norm(made, "output_norm.weight", hidden, seed + 99)
    if not tied:
        add("output.weight", (rows, hidden), kind_of("output"), 0.5)
    return made


def _norm(made: Made, name: str, width: int, seed: int) -> None:
    values = np.random.default_rng([seed, len(name)]).uniform(0.5, 1.5, width)
    made.tensors[name] = ((width,), "F32", from_floats("F32", values))


def logits(made: Made, ids: Sequence[int]) -> np.ndarray:
    """Logits (T, V) in float64."""
    name = made.metadata["general.architecture"]
    own = {key.removeprefix(f"{name}."): item for key, item in made.metadata.items()}
    gemma = name == "gemma3"
    weights = {key: made.floats(key) for key in made.tensors}
    eps, heads, kv_heads, head = (
        own["attention.layer_norm_rms_epsilon"],
        own["attention.head_count"],
        own["attention.head_count_kv"],
        own["attention.key_length"],
    )

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[key]

    def linear(x: np.ndarray, key: str) -> np.ndarray:
        return x @ weights[f"{key}.weight"].T + weights.get(f"{key}.bias", 0.0)

    x = weights["token_embd.weight"][list(ids)] * (math.sqrt(own["embedding_length"]) if gemma else 1)
    count = len(ids)
    behind = np.arange(count)[:, None] - np.arange(count)
    for i in range(own["block_count"]):
        b = f"blk.{i}."
        h = norm(x, b + "attn_norm.weight")
        q, k, v = (linear(h, b + p).reshape(count, -1, head) for p in ("attn_q", "attn_k", "attn_v"))
        local = gemma and (i + 1) % own["attention.sliding_window_pattern"] != 0
        if gemma:
            q, k = norm(q, b + "attn_q_norm.weight"), norm(k, b + "attn_k_norm.weight")
        q, k = (_rope(made, own, y, local, gemma, weights.get("rope_freqs.weight")) for y in (q, k))
        k, v = (np.repeat(y, heads // kv_heads, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(head)
        hidden = (behind < 0) | (local & (behind >= own.get("attention.sliding_window", 0)))
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        mixed = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
        out = linear(mixed, b + "attn_output")
        x = x + (norm(out, b + "post_attention_norm.weight") if gemma else out)
        h = norm(x, b + "ffn_norm.weight")
        gate, up = linear(h, b + "ffn_gate"), linear(h, b + "ffn_up")
        out = linear((_gelu(gate) if gemma else gate / (1 + np.exp(-gate))) * up, b + "ffn_down")
        x = x + (norm(out, b + "post_ffw_norm.weight") if gemma else out)
    x = norm(x, "output_norm.weight")
    return x @ weights.get("output.weight", weights["token_embd.weight"]).T


def _rope(made: Made, own: dict[str, Any], y: np.ndarray, local: bool, gemma: bool, factors: Any) -> np.ndarray:
    """y (T, H, D): halves are paired in gemma3, neighbours in llama."""
    width = y.shape[-1]
    angle = np.arange(len(y))[:, None] * (10000.0 if local else own["rope.freq_base"]) ** (
        -np.arange(0, width, 2) / width
    )
    if factors is not None:
        angle = angle / factors
    if own.get("rope.scaling.type") == "linear" and not local:
        angle = angle / own["rope.scaling.factor"]
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    a, b = (y[..., : width // 2], y[..., width // 2 :]) if gemma else (y[..., 0::2], y[..., 1::2])
    turned = a * cos - b * sin, a * sin + b * cos
    return np.concatenate(turned, -1) if gemma else np.stack(turned, -1).reshape(y.shape)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

"""`spec convert`: checkpoints whose logits are those of the GGUF file, computed apart in float64."""

from __future__ import annotations

import io
import itertools
import json
import tracemalloc
from pathlib import Path

import ggufs
import mlx.core as mx
import numpy as np
import pytest

import mlx_spec
from mlx_spec.checkpoint import tensor_index
from mlx_spec.errors import LoadError, RefusedError, UsageError
from mlx_spec.gguf import convert as module
from mlx_spec.gguf.convert import convert_gguf
from mlx_spec.gguf.rope import llama3_factors
from mlx_spec.gguf.rounding import DTYPES, as_dtype

IDS = [3, 77, 12, 250, 9, 30, 31, 32, 140, 5, 201]
MIXED = {
    "token_embd": "Q6_K", "attn_q": "Q5_0", "attn_k": "Q5_1", "attn_v": "BF16", "attn_output": "Q8_0",
    "ffn_gate": "Q4_K", "ffn_up": "Q5_K", "ffn_down": "Q4_1", "output": "F16",
}  # fmt: skip
WIDE = {**ggufs.LLAMA, "llama.embedding_length": 256, "llama.feed_forward_length": 96, "llama.block_count": 1}


def converted(made, tmp_path, **options):
    return convert_gguf(made.write(tmp_path / "model.gguf"), tmp_path / "out", **options)


def config_of(done) -> dict:
    return json.loads((done.out / "config.json").read_text())


def logits(folder) -> np.ndarray:
    """What mlx-lm computes from a checkpoint, without a cache."""
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([IDS]))[0].astype(mx.float32))


def close(ours: np.ndarray, exact: np.ndarray, tolerance: float = 1e-5) -> None:
    assert ours.shape == exact.shape
    assert np.abs(ours - exact).max() < tolerance * np.abs(exact).max()
    assert np.array_equal(ours.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("base", [ggufs.LLAMA, ggufs.GEMMA3], ids=["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_logits_are_those_of_the_file(base, kind, tmp_path):
    made = ggufs.make(base, kind)
    done = converted(made, tmp_path)
    close(logits(done.out), ggufs.logits(made, IDS))
    assert not done.rounded and not done.widened and done.dtype == "float32"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("base", [ggufs.LLAMA, ggufs.GEMMA3], ids=["llama", "gemma3"])
def test_tied_and_own_head(base, tied, tmp_path):
    made = ggufs.make(base, "Q8_0", tied=tied, seed=4)
    done = converted(made, tmp_path)
    close(logits(done.out), ggufs.logits(made, IDS))
    assert ("lm_head.weight" in tensor_index(done.out)) is not tied
    assert config_of(done)["tie_word_embeddings"] is tied


def test_a_file_of_many_types(tmp_path):
    made = ggufs.make(WIDE, MIXED, tied=False)
    done = converted(made, tmp_path)
    close(logits(done.out), ggufs.logits(made, IDS))
    layer = "model.layers.0."
    five, eight = {"group_size": 32, "bits": 5}, {"group_size": 32, "bits": 8}
    assert config_of(done)["quantization"] == {
        "group_size": 32, "bits": 5, "mode": "affine",
        f"{layer}self_attn.o_proj": eight,
        f"{layer}mlp.gate_proj": {"group_size": 32, "bits": 4},
        f"{layer}mlp.down_proj": {"group_size": 32, "bits": 4},
    }  # fmt: skip
    assert five["bits"] == 5 and done.quantised == {4: 2, 5: 3, 8: 1} and done.widened == ["token_embd.weight"]
    assert done.types == {"F32": 3, "F16": 1} | {MIXED[k]: 1 for k in MIXED if k != "output"}
    index = tensor_index(done.out)
    assert index["model.embed_tokens.weight"].dtype == "F32" and f"{layer}self_attn.v_proj.scales" not in index


@pytest.mark.parametrize(
    "names", ["attn_q attn_k attn_v", "attn_q attn_k attn_v attn_output", "ffn_gate ffn_up ffn_down"]
)
def test_biases(names, tmp_path):
    made = ggufs.make(ggufs.LLAMA, "Q4_0", biases=names)
    done = converted(made, tmp_path)
    close(logits(done.out), ggufs.logits(made, IDS))
    config = config_of(done)
    assert (config["attention_bias"], config["mlp_bias"]) == ("attn" in names, "ffn" in names)


def test_factors_become_llama3_scaling(tmp_path):
    base = ggufs.LLAMA | {"llama.rope.scaling.original_context_length": 64, "llama.rope.freq_base": 50.0}
    made = ggufs.make(base, "Q8_0")
    factors = llama3_factors(50.0, 24, 8.0, 64)
    assert factors.min() == 1 and factors.max() == 8 and len(set(factors.tolist())) > 3
    made.tensors["rope_freqs.weight"] = ((12,), "F32", ggufs.from_floats("F32", factors))
    done = converted(made, tmp_path)
    close(logits(done.out), ggufs.logits(made, IDS))
    assert config_of(done)["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }


def test_config_says_what_the_metadata_says(tmp_path):
    made = ggufs.make(ggufs.GEMMA3, "Q4_0")
    config = config_of(converted(made, tmp_path))
    assert config["model_type"] == "gemma3_text" and config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert (config["rms_norm_eps"], config["rope_theta"], config["rope_local_base_freq"]) == (1e-6, 80000.0, 10000.0)
    assert (config["sliding_window"], config["sliding_window_pattern"], config["query_pre_attn_scalar"]) == (5, 2, 32)
    assert (config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]) == (32, 4, 1)
    assert config["eos_token_id"] == [2, 0] and config["bos_token_id"] == 1 and config["torch_dtype"] == "float32"
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}


def test_the_scale_of_the_largest_gemma3_comes_from_all_heads(tmp_path):
    base = ggufs.GEMMA3 | {"gemma3.block_count": 62}
    assert config_of(converted(ggufs.make(base, "Q8_0"), tmp_path))["query_pre_attn_scalar"] == 16


def test_a_scale_of_its_own_wins(tmp_path):
    made = ggufs.make(ggufs.GEMMA3 | {"gemma3.attention.scale": 0.25}, "Q8_0")
    assert config_of(converted(made, tmp_path))["query_pre_attn_scalar"] == 16


@pytest.mark.parametrize(("dtype", "name", "share"), [("float16", "F16", 2**-11), ("bfloat16", "BF16", 2**-8)])
def test_what_is_rounded_is_reported(dtype, name, share, tmp_path):
    made = ggufs.make(ggufs.LLAMA, {"attn_q": "Q4_1", "ffn_up": "F16", "ffn_down": "F32"})
    done = converted(made, tmp_path, dtype=dtype)
    index = tensor_index(done.out)
    assert {info.dtype for info in index.values()} == {"U32", name}
    quantised, half, single = "blk.0.attn_q.weight", "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
    assert 0 < done.rounded[single] < share
    for tensor in (quantised, half):  # float16 holds what float16 was
        assert (tensor in done.rounded) is (dtype == "bfloat16")
    stored = mx.load(str(done.out / "model.safetensors"))["model.layers.0.mlp.down_proj.weight"]
    expected = mx.array(made.floats(single).astype(np.float32)).astype(getattr(mx, dtype))
    assert mx.array_equal(stored, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_nearest_and_ties_to_even(dtype):
    words = np.random.default_rng(2).integers(0x30000000, 0x45000000, 4000, dtype=np.uint32)
    halfway = words & np.uint32(0xFFFFE000 if dtype == "float16" else 0xFFFF0000)
    halfway |= np.uint32(0x1000 if dtype == "float16" else 0x8000)
    values = np.concatenate([words, halfway]).view(np.float32)
    expected = mx.array(values).astype(getattr(mx, dtype)).view(mx.uint16)
    assert np.array_equal(as_dtype(values, DTYPES[dtype]).view(np.uint16), np.array(expected))


def test_shards_and_index(tmp_path, monkeypatch):
    made = ggufs.make(ggufs.LLAMA, "Q4_0", seed=6)
    whole = converted(made, tmp_path)
    monkeypatch.setattr(module, "CHUNK", 700)  # rows of q in several runs of whole heads
    parts = convert_gguf(whole.source, tmp_path / "parts", shard_bytes=20_000)
    names = sorted(path.name for path in parts.out.glob("*.safetensors"))
    assert parts.files == len(names) > 3 and names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert all((parts.out / name).stat().st_size < 24_000 for name in names[1:])
    sizes = [(parts.out / name).stat().st_size for name in names]
    assert all(a + b > 20_000 for a, b in itertools.pairwise(sizes))  # no file ends before it is full
    index = json.loads((parts.out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == parts.nbytes == whole.nbytes
    assert set(index["weight_map"].values()) == set(names)
    one = mx.load(str(whole.out / "model.safetensors"))
    many = {k: v for name in names for k, v in mx.load(str(parts.out / name)).items()}
    assert one.keys() == many.keys() and all(mx.array_equal(one[k], many[k]) for k in one)


def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1 << 14)
    base = ggufs.LLAMA | {"llama.embedding_length": 1024, "llama.feed_forward_length": 1024}
    made = ggufs.make(base, {"token_embd": "Q8_0"})
    made.write(tmp_path / "model.gguf")
    size = (tmp_path / "model.gguf").stat().st_size
    del made
    tracemalloc.start()
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 25_000_000 and peak < 2_500_000


def test_progress_reaches_the_end(tmp_path):
    steps = []
    converted(ggufs.make(ggufs.LLAMA, "Q4_0"), tmp_path, on_bytes=lambda done, total: steps.append((done, total)))
    assert steps == sorted(steps) and steps[-1][0] == steps[-1][1] and len(steps) == len({*steps})


@pytest.mark.parametrize("base", [ggufs.LLAMA, ggufs.GEMMA3], ids=["llama", "gemma3"])
def test_a_target_loads_and_replies(base, tmp_path):
    """Plain decoding by core says what the float64 model says, end ids and chat template included."""
    made = ggufs.make(base, "Q8_0", seed=9)
    done = converted(made, tmp_path)
    pair = mlx_spec.load(str(done.out))
    assert pair.end_ids == {0, 2} and pair.tokenizer.has_chat_template
    out = mlx_spec.generate(pair, IDS, max_tokens=6, ignore_eos=True)
    ids = list(IDS)
    for _ in range(6):
        ids.append(int(ggufs.logits(made, ids)[-1].argmax()))
    assert out.token_ids == ids[len(IDS) :]


# -- the folder ------------------------------------------------------------------------------------------


def test_an_existing_folder_is_kept_unless_told(tmp_path):
    made = ggufs.make(ggufs.LLAMA, "Q4_0")
    done = converted(made, tmp_path)
    before = {path.name: path.read_bytes() for path in done.out.iterdir()}
    with pytest.raises(UsageError, match="--overwrite") as caught:
        converted(ggufs.make(ggufs.LLAMA, "Q8_0"), tmp_path)
    assert caught.value.code == "U65"
    assert {path.name: path.read_bytes() for path in done.out.iterdir()} == before
    (done.out / "stale.txt").write_text("of the checkpoint before")
    again = converted(ggufs.make(ggufs.LLAMA, "Q8_0"), tmp_path, overwrite=True)
    assert again.quantised.keys() == {8} and not (done.out / "stale.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


@pytest.mark.parametrize("inside", ["notes.txt", "config.json"])
def test_only_a_checkpoint_is_replaced_and_never_the_source(inside, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / inside).write_text("{}")
    where = tmp_path if inside == "notes.txt" else folder
    source = ggufs.make(ggufs.LLAMA, "Q4_0").write(where / "model.gguf")
    with pytest.raises(UsageError) as caught:
        convert_gguf(source, folder, overwrite=True)
    assert caught.value.code == "U65" and (folder / inside).exists() and source.exists()


def test_no_checkpoint_is_written_inside_another(tmp_path):
    other = converted(ggufs.make(ggufs.LLAMA, "Q4_0"), tmp_path).out
    with pytest.raises(UsageError) as caught:
        convert_gguf(tmp_path / "model.gguf", other / "new")
    assert caught.value.code == "U69" and not (other / "new").exists()


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    assert converted(ggufs.make(ggufs.LLAMA, "Q4_0"), tmp_path).files == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    source = ggufs.make(ggufs.LLAMA, "Q4_0").write(tmp_path / "model.gguf")
    with pytest.raises(UsageError) as caught:
        convert_gguf(source, tmp_path / "file" / "out")
    assert caught.value.code == "U83"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_half_written_is_left(error, tmp_path, monkeypatch):
    source = ggufs.make(ggufs.LLAMA, "Q4_0").write(tmp_path / "model.gguf")
    convert_gguf(source, tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "_write_settings", fail)  # weights are there by then
    for folder, overwrite in (("new", False), ("out", True)):
        with pytest.raises((KeyboardInterrupt, RefusedError)) as caught:
            convert_gguf(source, tmp_path / folder, overwrite=overwrite)
        if caught.type is RefusedError:
            assert caught.value.code == "R40" and "No space left" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    source = ggufs.make(ggufs.LLAMA, "Q4_0").write(tmp_path / "model.gguf")
    convert_gguf(source, tmp_path / "out")
    (tmp_path / "out" / "mark").write_text("")
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if path.name == "model":
            raise OSError(13, "Permission denied")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UsageError, match="Permission denied"):
        convert_gguf(source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "mark").exists()


def test_a_file_that_shrinks_or_fails_meanwhile(tmp_path, monkeypatch):
    source = ggufs.make(ggufs.LLAMA, "Q4_0").write(tmp_path / "model.gguf")
    real = module._open

    class Short(io.BytesIO):
        def read(self, *_: object) -> bytes:
            return b""

    class Broken(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise OSError(5, "Input/output error")

    for stream, code in ((Short(), "L50"), (Broken(), "L03")):
        monkeypatch.setattr(module, "_open", lambda path, stream=stream: stream)
        with pytest.raises(LoadError) as caught:
            convert_gguf(source, tmp_path / "out")
        assert caught.value.code == code and not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "_open", real)
    assert convert_gguf(source, tmp_path / "out").files == 1


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "F32"), ("float32", "Q4_0"), ("float16", "F32"), ("bfloat16", "F32")]
)
def test_weights_that_are_not_finite(dtype, kind, tmp_path):
    made = ggufs.make(ggufs.LLAMA, kind)
    shape, _, data = made.tensors["blk.1.ffn_up.weight"]
    bad = {
        "float16": ggufs.from_floats("F32", [1e6]),
        "bfloat16": b"\xff\xff\xff\x7f",  # a NaN whose rounding would carry into the sign
        "float32": ggufs.from_floats("F32", [np.nan]) if kind == "F32" else b"\x00\x7c",
    }[dtype]
    made.tensors["blk.1.ffn_up.weight"] = (shape, kind, bad + data[len(bad) :])
    with pytest.raises(LoadError, match=r"blk\.1\.ffn_up\.weight") as caught:
        converted(made, tmp_path, dtype=dtype)
    assert caught.value.code == "L18" and not (tmp_path / "out").exists()

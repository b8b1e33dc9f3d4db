"""Model folders: bad config.json, bad weight files, end ids, loading through mlx-lm."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import pytest
from tinymodels import GEMMA3, LLAMA, write_model, write_tokenizer, write_weights

from mlx_spec import checkpoint
from mlx_spec.errors import LoadError
from mlx_spec.tensorfiles import read_header, read_json
from mlx_spec.types import ModelRef


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "one")
    write_model(root / "three", shards=3)
    return root


@pytest.fixture
def one(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "one", tmp_path / "one"))


@pytest.fixture
def three(originals, tmp_path) -> Path:
    return Path(shutil.copytree(originals / "three", tmp_path / "three"))


def ref(path: Path) -> ModelRef:
    return ModelRef(path.name, path)


def edit(path: Path, **changes) -> None:
    """Change keys of config.json; ... removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def set_weights(path: Path, **changes) -> None:
    """Change tensors of model.safetensors ("." spelled "__"); ... removes one."""
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    weights |= {k.replace("__", "."): v for k, v in changes.items()}
    write_weights(path, {k: v for k, v in weights.items() if v is not ...})


def rewrite_header(file: Path, change) -> None:
    """Apply `change` to the parsed header and write it back, same data."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


# -- config.json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "not JSON"), ("{", "not JSON"), ("\x00\x01", "not JSON"), ("[1]", "JSON list"), ('"x"', "JSON str")],
)
def test_config_that_is_no_json_object(one, text, found):
    (one / "config.json").write_text(text)
    with pytest.raises(LoadError, match=f"config.json in .*found .*{found}.*expected a JSON object"):
        checkpoint.read_config(one)


def test_config_with_invalid_utf8(one):
    (one / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(LoadError, match="config.json.*not JSON"):
        checkpoint.read_config(one)


def test_config_nested_too_deep(one):
    (one / "config.json").write_text("[" * 100_000)
    with pytest.raises(LoadError, match="config.json.*not JSON"):
        checkpoint.read_config(one)


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"model_type": ...}, "model_type", "nothing"),
        ({"model_type": 3}, "model_type", "int '3'"),
        ({"model_type": ""}, "model_type", "str"),
        ({"hidden_size": "48"}, "hidden_size", "str '48'"),
        ({"hidden_size": 48.0}, "hidden_size", "float"),
        ({"vocab_size": True}, "vocab_size", "bool"),
        ({"vocab_size": 0}, "vocab_size", "int '0'"),
        ({"num_hidden_layers": [3]}, "num_hidden_layers", "list"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", "int '1000000000'"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers", "int"),
        ({"mtp_num_hidden_layers": 10**30}, "mtp_num_hidden_layers", "int"),
        ({"architectures": True}, "architectures", "bool 'True'"),
        ({"architectures": ["A", None]}, "architectures", "list"),
        ({"num_attention_heads": "4"}, "num_attention_heads", "str"),
        ({"head_dim": -16}, "head_dim", "int '-16'"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps", "str"),
        ({"quantization": 4}, "quantization", "int '4'"),
        ({"eos_token_id": "1"}, "eos_token_id", "str"),
        ({"eos_token_id": [1, None]}, "eos_token_id", "list"),
        ({"text_config": [1]}, "text_config", "list"),
        ({"text_config": {"vocab_size": "x"}}, "text_config.vocab_size", "str 'x'"),
    ],
)
def test_config_with_wrong_types(one, changes, key, found):
    edit(one, **changes)
    with pytest.raises(LoadError) as error:
        checkpoint.read_config(one)
    assert f"{key} in config.json of {one}" in str(error.value) and f"found {found}" in str(error.value)


def test_config_with_null_and_per_layer_values_is_accepted(one):
    edit(one, head_dim=None, intermediate_size=[80, 0, 80], num_key_value_heads=[2, 2, 1], eos_token_id=None)
    assert checkpoint.read_config(one)["intermediate_size"] == [80, 0, 80]


def test_config_that_is_a_directory(one):
    (one / "config.json").unlink()
    (one / "config.json").mkdir()
    with pytest.raises(LoadError, match="config.json in .*expected a readable file"):
        checkpoint.read_config(one)


def test_config_without_permission(one, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(LoadError, match="config.json in .*found Permission denied"):
        checkpoint.read_config(one)
    with pytest.raises(LoadError, match="model.safetensors in .*found Permission denied"):
        checkpoint.read_header(one / "model.safetensors")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "it is empty"),
        (["model-q4.gguf", "README.md"], r"files only: model-q4\.gguf\).* spec convert \S+/model-q4\.gguf -o DIR\."),
        (["b.gguf", "a.gguf"], r"GGUF files only: a\.gguf and 1 more\).* spec convert \S+/a\.gguf -o DIR\."),
        (["pytorch_model.bin"], "PyTorch weights"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter"),
        (["tokenizer.json", "tokenizer_config.json"], "a tokenizer and no weights"),
        (["model.safetensors"], "no config.json"),
    ],
)
def test_directory_of_another_kind_is_named(tmp_path, files, reason):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(LoadError, match=reason):
        checkpoint.read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "files", "reason", "step"),
    [
        ({"model_type": "gemma4_assistant"}, [], "gemma4_assistant", "--draft-model"),
        ({"architectures": ["DFlashDraftModel"]}, [], "DFlashDraftModel", "--draft-model"),
        ({"dflash_config": {}}, [], "dflash_config", "--draft-model"),
        ({"speculators_model_type": "eagle3"}, [], "speculators", "plugin"),
        ({}, ["modules.json"], "sentence-embedding", "generates text"),
        ({}, ["pytorch_model.bin", "-model.safetensors"], "PyTorch", "mlx_lm.convert"),
        ({}, ["a.gguf", "-model.safetensors"], "GGUF", "safetensors checkpoint"),
        ({}, ["adapter_config.json", "-model.safetensors"], "adapter", "mlx_lm.fuse"),
        ({}, ["-model.safetensors"], "no weights", "Check the path"),
    ],
)
def test_other_kinds_are_refused_as_target_before_weights(one, changes, files, reason, step):
    edit(one, **changes)
    for name in files:
        (one / name[1:]).unlink() if name.startswith("-") else (one / name).write_text("{}")
    with pytest.raises(LoadError) as error:
        checkpoint.load_mlx_lm(ref(one))
    assert reason in str(error.value) and step in str(error.value)


def test_registered_drafter_type_is_refused_as_target(one):
    with pytest.raises(LoadError, match=r"a drafter \(model_type 'llama'\).*--draft-model"):
        checkpoint.load_mlx_lm(ref(one), drafter_types=("llama",))


def test_head_without_embedding_is_refused_as_target(one):
    set_weights(one, model__embed_tokens__weight=..., lm_head__weight=...)
    with pytest.raises(LoadError, match="no tensor with a row per vocabulary entry.*--draft-model"):
        checkpoint.load_mlx_lm(ref(one))


# -- weight files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["1 byte", "1 KiB", "half", "all", "to 4 bytes", "to the header"])
@pytest.mark.parametrize("shards", [1, 3])
def test_truncated_file_names_file_and_sizes(one, three, cut, shards):
    path = one if shards == 1 else three
    file = path / ("model.safetensors" if shards == 1 else "model-00002-of-00003.safetensors")
    data = file.read_bytes()
    size = len(data)
    kept = {
        "1 byte": size - 1,
        "1 KiB": size - 1024,
        "half": size // 2,
        "all": 0,
        "to 4 bytes": 4,
        "to the header": 60,
    }[cut]
    file.write_bytes(data[:kept])
    with pytest.raises(LoadError) as error:
        checkpoint.tensor_index(path)
    text = str(error.value)
    assert file.name in text and f"found {kept} bytes" in text
    if kept > 60:
        assert f"expected {size} bytes" in text


def test_file_with_bytes_behind_the_data(one):
    file = one / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(LoadError, match=f"found {size + 1} bytes, expected {size} bytes"):
        checkpoint.tensor_index(one)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"\xff" * 64, "header length of"),
        (struct.pack("<Q", 10) + b"not json!!", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"\xff\xff", "not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "header length of"),
    ],
)
def test_corrupt_header(one, data, found):
    (one / "model.safetensors").write_bytes(data)
    with pytest.raises(LoadError, match=f"model.safetensors in .*{found}"):
        checkpoint.tensor_index(one)


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ({"dtype": "F99"}, "dtype 'F99'"),
        ({"dtype": 3}, "described as"),
        ({"shape": [48, -1]}, "described as"),
        ({"shape": [48, 1.5]}, "described as"),
        ({"shape": [7]}, "expected 28 bytes"),
        ({"data_offsets": [0]}, "described as"),
        ({"data_offsets": [4, 196]}, "at byte"),
        ({"data_offsets": [1 << 40, (1 << 40) + 192]}, "at byte"),
    ],
)
def test_contradictory_header_entry(one, entry, found):
    name = "model.layers.0.input_layernorm.weight"
    rewrite_header(one / "model.safetensors", lambda header: header[name].update(entry))
    with pytest.raises(LoadError, match=f"model.safetensors.*tensor .*{found}"):
        checkpoint.tensor_index(one)


def test_missing_shard(three):
    (three / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match="found no file model-00002-of-00003.safetensors, expected the 3 files"):
        checkpoint.load_mlx_lm(ref(three))


def test_missing_shard_without_index(three):
    (three / "model.safetensors.index.json").unlink()
    (three / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(LoadError, match="found 2 of 3 shards; number 2 is missing"):
        checkpoint.tensor_index(three)


def test_complete_shards_without_index_are_taken(three):
    before = checkpoint.tensor_index(three)
    (three / "model.safetensors.index.json").unlink()
    assert checkpoint.tensor_index(three) == before


@pytest.mark.parametrize("change", ["unknown tensor", "wrong shard"])
def test_stale_index(three, change):
    file = three / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "model.norm.weight"
    here = index["weight_map"][name]
    if change == "unknown tensor":
        index["weight_map"]["model.layers.7.gone.weight"] = here
    else:
        index["weight_map"][name] = next(s for s in index["weight_map"].values() if s != here)
    file.write_text(json.dumps(index))
    with pytest.raises(LoadError, match="index.json in .*found tensor .*The index is stale"):
        checkpoint.tensor_index(three)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}"]
    + [
        '{"weight_map": ' + m + "}" for m in ("{}", '{"a": "../model.safetensors"}', '{"a": 3}', '{"a": "/etc/passwd"}')
    ],
)
def test_broken_index(three, content):
    (three / "model.safetensors.index.json").write_text(content)
    with pytest.raises(LoadError, match=r"model.safetensors.index.json in"):
        checkpoint.tensor_index(three)


def logits(path: Path) -> bytes:
    model, _ = checkpoint.load_mlx_lm(ref(path))
    return bytes(memoryview(model(mx.array([[3, 5, 8]]))))


def test_stray_file_is_ignored_with_an_index(three):
    before = logits(three)
    mx.save_safetensors(
        str(three / "model-extra.safetensors"), {"model.norm.weight": mx.zeros((48,)), "stray": mx.ones((3,))}
    )
    mx.save_safetensors(str(three / "consolidated.safetensors"), {"other": mx.ones((3,))})
    assert "stray" not in checkpoint.tensor_index(three)
    assert logits(three) == before


def test_stray_file_without_an_index_is_an_error(one):
    mx.save_safetensors(str(one / "model-extra.safetensors"), {"stray": mx.ones((3,))})
    with pytest.raises(LoadError, match="several files and no index: model-extra.safetensors, model.safetensors"):
        checkpoint.load_mlx_lm(ref(one))


def test_tensor_in_two_shards(three):
    file = three / "model-00001-of-00003.safetensors"
    weights = dict(mx.load(str(file)))
    mx.eval(weights)
    other = "model-00002-of-00003.safetensors"
    twice = sorted(checkpoint.read_header(three / other))[0]
    mx.save_safetensors(str(file), weights | {twice: mx.zeros((2,))})
    with pytest.raises(LoadError, match=f"tensor {twice} in .*two copies, in {file.name} and {other}"):
        checkpoint.tensor_index(three)


def test_shard_names_other_than_model_are_loaded_by_index(three):
    before = logits(three)
    file = three / "model.safetensors.index.json"
    file.write_text(file.read_text().replace("model-0000", "part-0000"))
    for shard in three.glob("model-0000*.safetensors"):
        shard.rename(three / shard.name.replace("model-", "part-"))
    assert logits(three) == before


def test_path_with_glob_characters(one, tmp_path):
    moved = Path(shutil.move(one, tmp_path / "a[1]*"))
    assert len(logits(moved)) == 3 * LLAMA["vocab_size"] * 4


def test_weights_stay_readable_after_the_links_are_gone(three):
    mx.save_safetensors(str(three / "model-extra.safetensors"), {"stray": mx.ones((3,))})
    model, _ = checkpoint.load_mlx_lm(ref(three), lazy=True)
    stored = mx.load(str(three / checkpoint.tensor_index(three)["model.norm.weight"].file.name))["model.norm.weight"]
    assert mx.array_equal(model.model.norm.weight, stored)


def test_index_and_header_describe_the_tensors(one):
    info = checkpoint.tensor_index(one)["model.layers.0.self_attn.k_proj.weight"]
    assert (info.dtype, info.shape, info.nbytes, info.size) == ("F32", (32, 48), 32 * 48 * 4, 32 * 48)
    raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    assert raw == bytes(memoryview(mx.load(str(info.file))["model.layers.0.self_attn.k_proj.weight"]))


def test_load_tensors_by_name_and_predicate(three):
    named = checkpoint.load_tensors(three, ["model.norm.weight", "lm_head.weight"])
    assert {k: v.shape for k, v in named.items()} == {"model.norm.weight": (48,), "lm_head.weight": (131, 48)}
    chosen = checkpoint.load_tensors(three, lambda name: ".layers.2." in name)
    assert len(chosen) == 9 and all(".layers.2." in name for name in chosen)
    with pytest.raises(LoadError, match="found no mtp.norm.weight"):
        checkpoint.load_tensors(three, ["mtp.norm.weight"])


# -- loading -------------------------------------------------------------------------------------------


def test_missing_tensor_is_named(one):
    set_weights(one, model__layers__1__mlp__up_proj__weight=...)
    with pytest.raises(LoadError, match="found no tensors model.layers.1.mlp.up_proj.weight, expected every parameter"):
        checkpoint.load_mlx_lm(ref(one))


def test_unexpected_tensor_is_named(one):
    set_weights(one, model__layers__1__mlp__bonus=mx.ones((3,)))
    with pytest.raises(LoadError, match="tensors the model does not have: model.layers.1.mlp.bonus"):
        checkpoint.load_mlx_lm(ref(one))


def test_wrong_shape_is_named(one):
    set_weights(one, model__layers__1__mlp__up_proj__weight=mx.ones((81, 48)))
    with pytest.raises(LoadError, match=r"wrong shape .*\(80, 48\).*\(81, 48\).*model.layers.1.mlp.up_proj.weight"):
        checkpoint.load_mlx_lm(ref(one))


def test_missing_config_keys_are_named(one):
    edit(one, rms_norm_eps=..., intermediate_size=...)
    with pytest.raises(LoadError, match="found no intermediate_size and rms_norm_eps, expected every key"):
        checkpoint.load_mlx_lm(ref(one))


def test_unknown_model_type(one):
    edit(one, model_type="never_heard_of")
    with pytest.raises(LoadError, match="model_type 'never_heard_of'.*spec plugins"):
        checkpoint.load_mlx_lm(ref(one))


def test_code_in_the_checkpoint_is_not_run(one, tmp_path):
    (one / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    edit(one, model_file="evil.py")
    with pytest.raises(LoadError, match="brings its own code"):
        checkpoint.load_mlx_lm(ref(one))
    assert not (tmp_path / "ran").exists()


def test_exception_of_a_model_class_becomes_a_load_error(one):
    def classes(config):
        raise ZeroDivisionError("heads")

    with pytest.raises(LoadError, match="ZeroDivisionError: heads"):
        checkpoint.load_mlx_lm(ref(one), classes)


def test_loading_prints_nothing(one, capfd):
    checkpoint.load_mlx_lm(ref(one))
    edit(one, model_type="never_heard_of")
    with pytest.raises(LoadError):
        checkpoint.load_mlx_lm(ref(one))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_check_finite_names_the_first_bad_tensor(value, dtype):
    good = {"a": mx.ones((3, 5), dtype), "c": mx.arange(7), "packed": mx.full((4,), 2**32 - 1, mx.uint32)}
    checkpoint.check_finite(good)
    bad = mx.ones((2, 9), dtype)
    bad[1, 7] = value
    with pytest.raises(LoadError, match=r"found NaN or infinite values in b \(and 1 more tensors\)"):
        checkpoint.check_finite(good | {"b": bad, "d": bad})


def test_check_finite_does_not_mistake_large_values(tmp_path):
    checkpoint.check_finite({"a": mx.full((300,), 65504.0, mx.float16), "b": mx.full((300,), 3e38)})


# -- end ids and fingerprint -----------------------------------------------------------------------------


def test_end_ids_are_the_union_of_all_places(tmp_path):
    write_tokenizer(tmp_path)  # declares <eos>, id 1
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 9]}')
    config = {"eos_token_id": 2, "text_config": {"eos_token_id": [7]}}
    assert checkpoint.end_ids(tmp_path, config) == {1, 2, 7, 9}


@pytest.mark.parametrize("token", ["<eos>", {"content": "<eos>", "special": True}])
@pytest.mark.parametrize("place", ["decoder", "added", "vocab"])
def test_end_id_of_the_tokenizer_is_found(tmp_path, token, place):
    config = {"eos_token": token}
    tokenizer = {"added_tokens": [{"id": 4, "content": "<other>"}], "model": {"vocab": {"a": 0}}}
    if place == "decoder":
        config["added_tokens_decoder"] = {"6": {"content": "<eos>"}, "4": {"content": "<other>"}}
    elif place == "added":
        tokenizer["added_tokens"].append({"id": 6, "content": "<eos>"})
    else:
        tokenizer["model"]["vocab"]["<eos>"] = 6
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert checkpoint.end_ids(tmp_path, {}) == {6}


def test_no_end_ids_anywhere(tmp_path):
    assert checkpoint.end_ids(tmp_path, {}) == frozenset()


@pytest.mark.parametrize("value", ["2", -1, [2, "9"], True, {"a": 1}])
def test_end_ids_of_a_wrong_type(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(LoadError, match="eos_token_id in generation_config.json"):
        checkpoint.end_ids(tmp_path, {})


@pytest.mark.parametrize("text", ["[]", "null", "3", "{"])
def test_a_damaged_generation_config_is_named_when_loading(tmp_path, text):
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(LoadError, match=r"generation_config\.json in .*expected a JSON object"):
        checkpoint.load_mlx_lm(ref(tmp_path))


def test_fingerprint_changes_with_every_tensor_and_the_config(one, three):
    seen = {checkpoint.fingerprint(one), checkpoint.fingerprint(three)}
    for name in ("model__norm__weight", "lm_head__weight"):
        set_weights(one, **{name: mx.ones(mx.load(str(one / "model.safetensors"))[name.replace("__", ".")].shape)})
        seen.add(checkpoint.fingerprint(one))
    edit(one, rope_theta=5e5)
    seen.add(checkpoint.fingerprint(one))
    assert len(seen) == 5 and all(len(f) == 64 for f in seen)
    assert checkpoint.fingerprint(one) in seen


def test_fingerprint_does_not_depend_on_the_folder(one, tmp_path):
    assert checkpoint.fingerprint(one) == checkpoint.fingerprint(Path(shutil.copytree(one, tmp_path / "copy")))


def test_gemma3_reference_config_loads(tmp_path):
    model, config = checkpoint.load_mlx_lm(ref(write_model(tmp_path, GEMMA3)))
    assert config["eos_token_id"] == [1, 5] and len(model.layers) == 5


def test_what_a_file_says_about_itself(one, tmp_path):
    assert checkpoint.read_metadata(one / "model.safetensors") == {"format": "mlx"}
    mx.save_safetensors(str(tmp_path / "bare.safetensors"), {"a": mx.ones((1,))})
    assert checkpoint.read_metadata(tmp_path / "bare.safetensors") == {}
    with pytest.raises(LoadError, match=r"absent.safetensors"):
        checkpoint.read_metadata(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_refused_instead_of_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    read = read_json if name == "config.json" else read_header
    with pytest.raises(LoadError, match="found a pipe, socket or device, expected a readable file") as caught:
        read(tmp_path / name)
    assert caught.value.code == "L03"


def test_what_moves_a_cursor_is_shown_as_text():
    error = LoadError("tensor a\x1b[2Jb", found="x\x07", expected="y", next_step="Look")
    assert str(error) == "tensor a\\x1b[2Jb: found x\\x07, expected y. Look."

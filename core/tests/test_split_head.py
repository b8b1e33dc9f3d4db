"""Heads taken out of checkpoints or kept beside them, and the record of the trunk they belong to."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymodels import write_model, write_weights

from mlx_spec.cli import cli
from mlx_spec.conversion.checkpoint import Options, convert
from mlx_spec.conversion.head import HEAD_FILE, split
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.conversion.trunk import KEY, SOURCE_KEY, check_trunk, compare, read_trunk, recorded
from mlx_spec.errors import LoadError, PairError, RefusedError
from mlx_spec.heads import find_heads, whole_index
from mlx_spec.loading import choose_drafter, open_ref, validate_pair
from mlx_spec.tensorfiles import read_metadata, tensor_index

CONFIG = {
    "model_type": "qwen3_5", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "tie_word_embeddings": False, "attention_bias": False, "mtp_num_hidden_layers": 1,
}  # fmt: skip
PLUGIN = """
from mlx_spec import DrafterCard, hookimpl
from mlx_spec.heads import whole_index

TYPES = ("qwen3_5", "toy_head")

def detect(ref):
    index = whole_index(ref.path)
    found = "fc.weight" in index or "mtp.fc.weight" in index
    return DrafterCard("mtp", ref.model_type, block_size=ref.config.get("block_size")) if found else None

@hookimpl
def spec_register(register):
    register.target("qwen3_5")
    register.drafter("mtp", model_types=TYPES, detect=detect)

@hookimpl
def spec_split_drafter(ref, out, options):
    import mlx.core as mx
    from mlx_spec.conversion.head import write_head
    from mlx_spec.partialfiles import select_index
    from mlx_spec.tensorfiles import load_indexed

    if ref.config.get("no_split"):
        return None
    index = select_index(ref.path, lambda name: name.startswith("mtp."))
    loaded = load_indexed(ref.path, list(index), index)
    tensors, config = {}, {"model_type": "toy_head", "block_size": options["block_size"] or 3}
    for name, array in loaded.items():
        bare = name.removeprefix("mtp.")
        if options["q_bits"] and array.ndim > 1:
            bits, group = options["q_bits"], options["q_group_size"]
            config["quantization"] = {"bits": bits, "group_size": group, "mode": "affine"}
            packed = mx.quantize(array, group_size=group, bits=bits)
            module = bare.removesuffix(".weight")
            tensors |= {f"{module}.{p}": a for p, a in zip(("weight", "scales", "biases"), packed)}
        else:
            tensors[bare] = array
    return write_head(out, tensors, config, options)
"""
HEAD = {"mtp.fc.weight": (64, 128), "mtp.norm.weight": (64,), "mtp.layers.0.input_layernorm.weight": (64,)}


@pytest.fixture(autouse=True)
def heads(site, monkeypatch):
    """The only plugin: one that extracts heads of qwen3_5."""
    site.install("fake-heads", "heads", PLUGIN)
    monkeypatch.setenv("MLX_SPEC_PLUGINS", "heads")


def write_source(
    path: Path, seed: int = 1, head: bool = True, shards: int = 3, whole: bool = False, **config: object
) -> Path:
    """A checkpoint whose head is in the last of its shards, by name, with an index.

    whole: the head has a complete layer, as core checks it, and not only what the fake plugin looks for.
    """
    import mlx.core as mx

    write_model(path, {**CONFIG, **config}, seed=seed)
    weights = mx.load(str(path / "model.safetensors"))
    (path / "model.safetensors").unlink()
    names, weight_map = sorted(weights), {}
    key = mx.random.key(seed)
    parts = [{n: weights[n] for n in names[i::shards]} for i in range(shards)]
    parts.append({n: mx.random.normal(shape, key=key) for n, shape in HEAD.items()} if head else {})
    if whole:
        inside = "language_model.model.layers.3."
        parts[-1] |= {n.replace(inside, "mtp.layers.0."): a for n, a in weights.items() if n.startswith(inside)}
    for i, part in enumerate(p for p in parts if p):
        file = f"model-{i + 1:05d}-of-{shards + head:05d}.safetensors"
        mx.save_safetensors(str(path / file), part, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "source")


def ref(path: Path):
    return open_ref(str(path))


def four() -> Options:
    return Options(read_quantisation(4, 32, None), keep_heads=True)


def pair_findings(target: Path, drafter: Path | None):
    choice = choose_drafter(str(drafter) if drafter else None, "mtp", {}, ref(target))
    return validate_pair(ref(target), choice)


# -- split ---------------------------------------------------------------------------------------------


def test_a_head_becomes_a_drafter_directory(source, tmp_path):
    made = split(ref(source), tmp_path / "head")
    assert (made.kind, made.model_type, made.block_size, made.tensors) == ("mtp", "toy_head", 3, 3)
    assert made.shards == ["model-00004-of-00004.safetensors"]
    assert set(tensor_index(made.out)) == {name.removeprefix("mtp.") for name in HEAD}
    assert not list(tmp_path.glob(".*"))
    assert [f.code for f in pair_findings(source, made.out)] == []


def test_only_the_files_that_hold_the_head_have_to_be_there(source, tmp_path):
    whole = split(ref(source), tmp_path / "whole")
    for number in (1, 2, 3):
        (source / f"model-0000{number}-of-00004.safetensors").unlink()
    part = split(ref(source), tmp_path / "part")
    assert (part.out / "config.json").read_text() == (whole.out / "config.json").read_text()
    assert tensor_index(part.out).keys() == tensor_index(whole.out).keys()
    record = recorded([part.out / "model.safetensors"])
    assert record.whole == "" and record.norms == {}  # the files with norms were not there


def test_of_a_hub_id_only_those_files_are_fetched(source, tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    cache, fetched = tmp_path / "cache", []
    cache.mkdir()

    def snapshot_download(repo, *, revision=None, local_files_only=False, allow_patterns=()):
        assert (repo, revision) == ("owner/name", "v2")
        if local_files_only:
            raise LocalEntryNotFoundError("not in the cache")
        for file in source.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                fetched.append(file.name)
                shutil.copy(file, cache)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    out = CliRunner().invoke(cli, ["split-mtp", "-m", "owner/name@v2", "-o", str(tmp_path / "head"), "--json"])
    assert out.exit_code == 0, out.output
    assert {name for name in fetched if name.endswith(".safetensors")} == {"model-00004-of-00004.safetensors"}
    assert set(tensor_index(tmp_path / "head")) == {name.removeprefix("mtp.") for name in HEAD}


def test_options_reach_the_plugin(source, tmp_path):
    made = split(ref(source), tmp_path / "head", read_quantisation(8, 64, None), 5)
    config = json.loads((made.out / "config.json").read_text())
    assert config["block_size"] == made.block_size == 5 and config["quantization"]["bits"] == 8
    assert {"fc.weight", "fc.scales", "fc.biases"} < set(tensor_index(made.out))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda p: (p / "model-00004-of-00004.safetensors").unlink(), "L11"),
        (lambda p: _cut(p / "model-00004-of-00004.safetensors"), "L15"),
        (lambda p: _set(p, model_type="llama"), "L62"),
        (lambda p: _set(p, no_split=True), "L62"),
        (lambda p: _set(p, hidden_size="64"), "L04"),
        (lambda p: _unlist(p), "L20"),
    ],
    ids=["missing", "cut", "no plugin", "plugin without", "config", "no head"],
)
def test_what_cannot_be_split(source, tmp_path, damage, code):
    damage(source)
    out = CliRunner().invoke(cli, ["split-mtp", "-m", str(source), "-o", str(tmp_path / "head")])
    assert out.exit_code == 1 and out.stderr.count("\n") == 1 and "Traceback" not in out.stderr
    with pytest.raises(LoadError) as caught:
        split(ref(source), tmp_path / "head")
    assert caught.value.code == code
    assert not (tmp_path / "head").exists() and not list(tmp_path.glob(".*"))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


def _set(path: Path, **values: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | values))


def _unlist(path: Path) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())["weight_map"]
    file.write_text(json.dumps({"weight_map": {n: f for n, f in index.items() if not n.startswith("mtp.")}}))


def test_a_full_disk_leaves_nothing(source, tmp_path, monkeypatch):
    from mlx_spec.tensorwriter import SafetensorsWriter

    monkeypatch.setattr(SafetensorsWriter, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(RefusedError, match="No space left") as caught:
        split(ref(source), tmp_path / "head")
    assert caught.value.code == "R40" and not (tmp_path / "head").exists() and not list(tmp_path.glob(".*"))


def test_the_command_says_what_it_read_and_json_is_quiet(source, tmp_path):
    out = CliRunner().invoke(cli, ["split-mtp", "-m", str(source), "-o", str(tmp_path / "a"), "--block-size", "4"])
    assert out.exit_code == 0, out.output
    assert "model-00004-of-00004.safetensors" in out.stdout and "L=4" in out.stdout
    assert f"use it with --draft-model {tmp_path / 'a'}" in out.stderr
    quiet = CliRunner().invoke(cli, ["split-mtp", "-m", str(source), "-o", str(tmp_path / "b"), "--json"])
    assert quiet.stderr == "" and json.loads(quiet.stdout)["tensors"] == 3
    again = CliRunner().invoke(cli, ["split-mtp", "-m", str(source), "-o", str(tmp_path / "b")])
    assert again.exit_code == 2 and "something there already" in again.stderr


# -- kept beside a model -----------------------------------------------------------------------------------


def test_a_kept_head_is_beside_the_model_and_out_of_mlx_lms_way(source, tmp_path):
    from mlx_lm.utils import load_model

    done = convert(ref(source), tmp_path / "kept", four())
    bare = convert(ref(source), tmp_path / "bare", Options(four().quantisation))
    assert done.head == HEAD_FILE and bare.head == "" and bare.left_out == ["mtp"] and done.left_out == []
    assert tensor_index(done.out).keys() == tensor_index(bare.out).keys()  # the model itself is the same
    assert set(whole_index(done.out)) - set(tensor_index(done.out)) == {
        "mtp.fc.weight", "mtp.fc.scales", "mtp.fc.biases", "mtp.norm.weight", "mtp.layers.0.input_layernorm.weight",
    }  # fmt: skip
    (head,) = find_heads(ref(done.out).config, whole_index(done.out))
    assert head.prefix == "mtp"
    model, _ = load_model(done.out)
    other, _ = load_model(bare.out)
    import mlx.core as mx

    assert mx.array_equal(model(mx.array([[3, 4, 5]])), other(mx.array([[3, 4, 5]])))
    choice = choose_drafter(None, "mtp", {}, ref(done.out))
    assert choice.ref.path == done.out and validate_pair(ref(done.out), choice) == []


def test_a_kept_head_that_is_packed_otherwise_is_said_so_in_the_config(source, tmp_path):
    done = convert(ref(source), tmp_path / "floats", Options(keep_heads=True))
    assert "mtplx_mtp_quantization" not in ref(done.out).config and "quantization" not in ref(done.out).config
    from mlx_spec.conversion.head import settings_with_head

    packing = {"bits": 4, "group_size": 32, "fc": {"bits": 8, "group_size": 64}}
    assert settings_with_head({}, packing) == {"mtplx_mtp_quantization": packing}
    both = settings_with_head({"quantization": {"bits": 4, "group_size": 32}}, packing)
    assert both == {"quantization": {"bits": 4, "group_size": 32, "mtp.fc": {"bits": 8, "group_size": 64}}}


def test_a_head_that_is_not_there_cannot_be_kept(tmp_path):
    source = write_source(tmp_path / "source", head=False)
    with pytest.raises(LoadError, match=r"\(config\.json declares 1 layer\)") as caught:
        convert(ref(source), tmp_path / "out", four())
    assert caught.value.code == "L20" and not list(tmp_path.glob(".*"))


def test_the_command_says_what_it_left_out(source, tmp_path):
    out = CliRunner().invoke(cli, ["convert", str(source), "-o", str(tmp_path / "a")])
    assert "left out: the drafter head under mtp; --keep-mtp keeps it" in out.stderr
    out = CliRunner().invoke(cli, ["convert", str(source), "-o", str(tmp_path / "b"), "--keep-mtp"])
    assert f"{HEAD_FILE}; it drafts with --draft-kind mtp" in out.stdout and "left out" not in out.stderr


# -- which trunk -------------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path) -> Path:
    """Another model of the same sizes."""
    return write_source(tmp_path / "other", seed=8)


def test_a_head_is_refused_with_another_trunk(source, other, tmp_path):
    head = split(ref(source), tmp_path / "head").out
    with pytest.raises(PairError) as caught:
        pair_findings(other, head)
    (finding,) = caught.value.findings
    assert finding.code == "P30" and "another trunk than recorded" in finding.found
    assert "split-mtp" in finding.next_step


def test_a_kept_head_copied_to_another_model_is_refused(source, other, tmp_path):
    mine = convert(ref(source), tmp_path / "mine", four()).out
    theirs = convert(ref(other), tmp_path / "theirs", four()).out
    shutil.copy(mine / HEAD_FILE, theirs / HEAD_FILE)
    with pytest.raises(PairError) as caught:
        pair_findings(theirs, None)
    assert caught.value.code == "P30"


def test_a_head_fits_what_its_trunk_was_converted_into(source, tmp_path):
    head = split(ref(source), tmp_path / "head").out
    once = convert(ref(source), tmp_path / "once", Options(dtype="bfloat16")).out
    twice = convert(ref(once), tmp_path / "twice", Options(read_quantisation(4, 32, None))).out
    for target in (once, twice):
        assert pair_findings(target, head) == []
    assert len(read_metadata(twice / "model.safetensors")[SOURCE_KEY].split(",")) == 2


def test_a_trunk_that_another_tool_quantised_is_known_by_its_norms(source, other, tmp_path):
    import mlx.core as mx

    head = split(ref(source), tmp_path / "head").out
    once = convert(ref(source), tmp_path / "once", Options(read_quantisation(4, 32, None))).out
    weights = mx.load(str(once / "model.safetensors"))
    shifted = {n: v + 1 if "layernorm" in n else v for n, v in weights.items()}  # as published norms are on loading
    write_weights(once, shifted)
    assert SOURCE_KEY not in read_metadata(once / "model.safetensors")
    (finding,) = pair_findings(once, head)
    assert (finding.code, finding.severity) == ("P31", "note")
    record = recorded([head / "model.safetensors"])
    assert compare(record, once, ref(once).config)[0] == "alike"
    assert compare(record, other, ref(other).config)[0] == "other"


def test_the_hash_knows_tensors_and_not_files(source, tmp_path):
    again = write_source(tmp_path / "again", shards=2)
    assert read_trunk(source, CONFIG).whole == read_trunk(again, CONFIG).whole != ""
    without = write_source(tmp_path / "without", head=False)
    assert read_trunk(without, CONFIG).whole == read_trunk(source, CONFIG).whole
    assert read_trunk(write_source(tmp_path / "seed", seed=2), CONFIG).whole != read_trunk(source, CONFIG).whole


def test_a_head_without_a_record_is_a_warning(source, tmp_path):
    import mlx.core as mx

    head = split(ref(source), tmp_path / "head").out
    weights = mx.load(str(head / "model.safetensors"))
    mx.save_safetensors(str(head / "model.safetensors"), weights, metadata={"format": "mlx"})
    (finding,) = pair_findings(source, head)
    assert (finding.code, finding.severity) == ("P32", "warning")
    kept = convert(ref(source), tmp_path / "kept", four()).out
    weights = mx.load(str(kept / HEAD_FILE))
    mx.save_safetensors(str(kept / HEAD_FILE), weights, metadata={"format": "mlx"})
    assert [f.code for f in pair_findings(kept, None)] == ["P32"]
    assert check_trunk(ref(source), ref(source)) == []  # in the model's own shards it belongs to the model


def test_a_damaged_record_is_named(source, tmp_path):
    import mlx.core as mx

    head = split(ref(source), tmp_path / "head").out
    weights = mx.load(str(head / "model.safetensors"))
    for text in ("{", '{"version":9,"whole":"","norms":{}}', '{"version":1,"whole":3,"norms":{}}'):
        mx.save_safetensors(str(head / "model.safetensors"), weights, metadata={KEY: text})
        with pytest.raises(LoadError) as caught:
            pair_findings(source, head)
        assert caught.value.code == "L63"

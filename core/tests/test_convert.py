"""`spec convert` of safetensors checkpoints: mlx-lm's bytes, one tensor at a time, resumed, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from tinymodels import LLAMA, write_model, write_tokenizer, write_weights

from mlx_spec.cli import cli
from mlx_spec.conversion import staging as staging_module
from mlx_spec.conversion.checkpoint import Options, Progress, convert
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.conversion.staging import PLAN
from mlx_spec.errors import LoadError, RefusedError, UsageError
from mlx_spec.loading import open_ref
from mlx_spec.tensorwriter import SafetensorsWriter
from mlx_spec.types import ModelRef

CONFIG = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "torch_dtype": "bfloat16"}
LIMIT = 20_000  # bytes per file: the tiny model becomes several
MOE = {
    "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 101,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny float32 checkpoint in two files, with a tokenizer."""
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("convert") / "source", CONFIG, shards=2))
    (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
    (folder / "notes.md").write_text("not part of the model")
    return folder


def asked(bits=4, group=32, mode=None, **options) -> Options:
    return Options(read_quantisation(bits, group, mode), **options)


def tensors(folder: Path) -> dict[str, tuple]:
    """Name -> (dtype, shape, bytes) of everything in the weight files of a folder."""
    import mlx.core as mx

    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():
            out[name] = (str(array.dtype), array.shape, bytes(array.reshape(-1).view(mx.uint8)))
    return out


def theirs(source: Path, out: Path, **options) -> Path:
    from mlx_lm.convert import convert as reference

    with redirect_stdout(StringIO()):
        reference(str(source), str(out), **options)
    return out


def run(*args: object):
    return CliRunner().invoke(cli, ["convert", *map(str, args)])


# -- what comes out --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "reference"),
    [
        (CONFIG, asked(), {"quantize": True, "q_bits": 4, "q_group_size": 32}),
        (CONFIG, asked(8, 64), {"quantize": True, "q_bits": 8, "q_group_size": 64}),
        (CONFIG, asked(None, None, "mxfp4"), {"quantize": True, "q_mode": "mxfp4"}),
        (CONFIG, asked(dtype="float16"), {"quantize": True, "q_bits": 4, "q_group_size": 32, "dtype": "float16"}),
        (CONFIG, Options(), {}),
        (MOE, asked(), {"quantize": True, "q_bits": 4, "q_group_size": 32}),
    ],
    ids=["4 bits", "8 bits", "mxfp4", "float16", "floats", "experts"],
)
def test_it_writes_what_mlx_lm_writes(tmp_path, config, options, reference):
    source = write_tokenizer(write_model(tmp_path / "source", config, shards=2))
    done = convert(open_ref(str(source)), tmp_path / "ours", options, shard_bytes=LIMIT)
    other = theirs(source, tmp_path / "theirs", **reference)
    assert tensors(done.out) == tensors(other)
    assert json.loads((done.out / "config.json").read_text()) == json.loads((other / "config.json").read_text())
    assert done.files == len(list(done.out.glob("*.safetensors"))) > 1


def test_experts_and_router_follow_the_models_own_rule(tmp_path):
    """A predicate of the model's (here 8 bits for the router) is asked, as mlx-lm does."""
    from mlx_lm.utils import _get_classes

    source = write_tokenizer(write_model(tmp_path / "source", MOE))
    done = convert(open_ref(str(source)), tmp_path / "out", asked())
    settings = json.loads((done.out / "config.json").read_text())["quantization"]
    predicate = _get_classes(dict(MOE))[0](_get_classes(dict(MOE))[1].from_dict(dict(MOE))).quant_predicate
    router = "model.layers.0.mlp.gate"
    assert settings[router] == predicate(router, None) == {"group_size": 64, "bits": 8}
    assert done.quantised[8] == 2 and done.quantised[4] > 8


def test_mlx_lm_loads_it_with_the_logits_of_its_own_conversion(source, tmp_path):
    import mlx.core as mx
    from mlx_lm.utils import load

    ours = convert(open_ref(str(source)), tmp_path / "ours", asked(), shard_bytes=LIMIT).out
    other = theirs(source, tmp_path / "theirs", quantize=True, q_bits=4, q_group_size=32)
    ids = mx.array([[5, 9, 80, 3]])
    (mine, words), (reference, _) = load(str(ours)), load(str(other))
    assert mx.array_equal(mine(ids), reference(ids))
    assert words.encode("red green") == load(str(source))[1].encode("red green")


def test_small_files_come_along_and_others_stay(source, tmp_path):
    out = convert(open_ref(str(source)), tmp_path / "out", asked(), shard_bytes=LIMIT).out
    names = {path.name for path in out.iterdir()} - {path.name for path in out.glob("*.safetensors")}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors(out))
    assert not list(tmp_path.glob(".*"))


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    import mlx.core as mx

    wide = LLAMA | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "head_dim": 64}
    source = write_model(tmp_path / "source", wide)
    largest = 4 * 256 * 512
    assert (source / "model.safetensors").stat().st_size > 30 * largest
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(open_ref(str(source)), tmp_path / "out", asked())
    assert mx.get_peak_memory() - before < 6 * largest


# -- runs that end early -----------------------------------------------------------------------------------

DRIVER = """
import sys, time
from pathlib import Path
from mlx_spec.conversion.checkpoint import Options, Progress, convert
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.loading import open_ref

source, out, stop = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def on_bytes(done, total):
    if done > stop:
        print("working", flush=True)
        time.sleep(600)

progress = Progress(on_bytes)
convert(open_ref(source), out, Options(read_quantisation(4, 32, None)), progress=progress, shard_bytes=LIMIT)
""".replace("LIMIT", str(LIMIT))


def start(source: Path, out: Path, stop: int) -> subprocess.Popen[str]:
    """A process in the middle of converting, once it has done `stop` bytes."""
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(source), str(out), str(stop)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "working\n", process.communicate()[1]
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_a_killed_run_is_taken_up_where_it_was(source, tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.mlx-spec-partial"
    process = start(source, out, 2 * LIMIT)
    kill(process)
    assert not out.exists()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(finished) >= 1 and list(partial.glob("*.part")), sorted(partial.iterdir())
    written: list[str] = []
    done = convert(open_ref(str(source)), out, asked(), progress=Progress(on_file=written.append), shard_bytes=LIMIT)
    assert done.resumed and not partial.exists()
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    assert set(written) == {path.name for path in out.glob("*.safetensors")} - set(finished)
    whole = convert(open_ref(str(source)), tmp_path / "whole", asked(), shard_bytes=LIMIT)
    assert tensors(out) == tensors(whole.out) and not whole.resumed
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.out.iterdir())


def test_what_another_plan_left_is_not_used(source, tmp_path):
    out = tmp_path / "out"
    process = start(source, out, 2 * LIMIT)
    kill(process)
    done = convert(open_ref(str(source)), out, asked(8, 64), shard_bytes=LIMIT)
    assert not done.resumed and done.quantised.keys() == {8}
    assert tensors(out) == tensors(convert(open_ref(str(source)), tmp_path / "b", asked(8, 64)).out)


def test_a_file_that_was_damaged_meanwhile_is_written_again(source, tmp_path):
    out, partial = tmp_path / "out", tmp_path / ".out.mlx-spec-partial"
    process = start(source, out, 2 * LIMIT)
    kill(process)
    first = sorted(partial.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-5])
    done = convert(open_ref(str(source)), out, asked(), shard_bytes=LIMIT)
    assert tensors(done.out) == tensors(convert(open_ref(str(source)), tmp_path / "b", asked()).out)


def test_two_processes_do_not_write_one_output(source, tmp_path):
    process = start(source, tmp_path / "out", LIMIT)
    try:
        with pytest.raises(RefusedError, match="found another process at work") as caught:
            convert(open_ref(str(source)), tmp_path / "out", asked(), shard_bytes=LIMIT)
        assert caught.value.code == "R41"
    finally:
        kill(process)
    assert convert(open_ref(str(source)), tmp_path / "out", asked(), shard_bytes=LIMIT).resumed


def test_an_interrupt_says_how_to_go_on(source, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_spec", "convert", str(source), "-o", str(tmp_path / "out"), "--q-bits", "4"],
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONSTARTUP": ""},
    )  # fmt: skip
    partial = tmp_path / ".out.mlx-spec-partial"
    while not partial.exists() and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert "Traceback" not in said
    assert (process.returncode, "the same command goes on" in said) == (130, True) or process.returncode == 0


# -- full disks --------------------------------------------------------------------------------------------

FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
from mlx_spec.cli import cli
cli.main(sys.argv[2:])
"""


def test_a_file_system_that_takes_no_more_is_one_clear_error(source, tmp_path):
    """A real EFBIG from the system, in the middle of the weights."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, "30000", "convert", str(source), "-o", str(tmp_path / "out"), "--q-bits", "4"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert f"room for {tmp_path / 'out'}: found File too large" in done.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_what_was_complete_when_the_disk_was_full_is_kept(source, tmp_path, monkeypatch):
    real, written = SafetensorsWriter.write, []

    def write(self, name, data):
        written.append(data.nbytes)
        if sum(written) > 2 * LIMIT:
            raise OSError(28, "No space left on device")
        real(self, name, data)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "write", write)
        with pytest.raises(RefusedError, match="which goes on after the . complete files") as caught:
            convert(open_ref(str(source)), out, asked(), shard_bytes=LIMIT)
    assert caught.value.code == "R40" and not out.exists()
    assert convert(open_ref(str(source)), out, asked(), shard_bytes=LIMIT).resumed


def test_too_small_a_disk_is_refused_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(staging_module.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    out = run(source, "-o", tmp_path / "out", "--q-bits", 4)
    assert out.exit_code == 1 and out.stderr.count("\n") == 1
    assert "expected 1.1 MiB free" in out.stderr and "found 1.0 MiB free" in out.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "mlx-spec-cache"] or not list(tmp_path.iterdir())


# -- outputs that cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "code"),
    [("source", "U66"), ("source/inside", "U66"), ("there", "U65"), ("file", "U65"), ("/proc/x", "U83")],
)
def test_outputs_that_cannot_be(tmp_path, where, code):
    source = write_model(tmp_path / "source", CONFIG)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine.txt").write_text("keep me")
    (tmp_path / "file").write_text("keep me")
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(UsageError) as caught:
        convert(open_ref(str(source)), tmp_path / where, asked(), overwrite=where == "source")
    assert caught.value.code == code
    assert sorted(path.name for path in source.iterdir()) == before
    assert (tmp_path / "there" / "mine.txt").read_text() == (tmp_path / "file").read_text() == "keep me"


@pytest.mark.parametrize("where", ["other/new", "other/deep/new", "link/new"])
def test_no_output_goes_inside_another_checkpoint(source, tmp_path, where):
    """Replacing that one with --overwrite would remove it unasked."""
    other = write_model(tmp_path / "other", CONFIG)
    (tmp_path / "link").symlink_to(other)
    before = sorted(path.name for path in other.iterdir())
    with pytest.raises(UsageError, match="found a folder inside the checkpoint .*other, expected") as caught:
        convert(open_ref(str(source)), tmp_path / where, asked())
    assert caught.value.code == "U69" and sorted(path.name for path in other.iterdir()) == before
    (other / "model.safetensors").unlink()  # a config.json alone makes no checkpoint
    assert convert(open_ref(str(source)), tmp_path / where, asked()).files == 1


def test_overwrite_replaces_a_checkpoint_only_when_the_new_one_is_complete(source, tmp_path, monkeypatch):
    out = convert(open_ref(str(source)), tmp_path / "out", asked()).out
    old = tensors(out)
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        with pytest.raises(RefusedError):
            convert(open_ref(str(source)), out, asked(8, 64), overwrite=True)
    assert tensors(out) == old
    convert(open_ref(str(source)), out, asked(8, 64), overwrite=True)
    assert tensors(out).keys() == old.keys() and tensors(out) != old
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "mine.txt").write_text("")
    with pytest.raises(UsageError, match="or a checkpoint to replace"):
        convert(open_ref(str(source)), tmp_path / "plain", asked(), overwrite=True)


# -- sources that cannot be --------------------------------------------------------------------------------


def broken(folder: Path, how: str) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    config = json.loads((folder / "config.json").read_text())
    if how == "truncated":
        shard.write_bytes(shard.read_bytes()[:-40])
    elif how == "missing":
        shard.unlink()
    elif how == "garbage":
        shard.write_bytes(b"\xff" * 400)
    elif how == "type":
        (folder / "config.json").write_text(json.dumps(config | {"hidden_size": "64"}))
    elif how == "shape":
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 104}))
    elif how == "json":
        (folder / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("truncated", "L15"),
        ("missing", "L11"),
        ("garbage", "L16"),
        ("type", "L04"),
        ("shape", "L19"),
        ("json", "L04"),
    ],
)
def test_a_source_that_is_not_whole(tmp_path, how, code):
    source = write_model(tmp_path / "source", CONFIG, shards=2)
    broken(source, how)
    with pytest.raises(LoadError) as caught:
        convert(open_ref(str(source)), tmp_path / "out", asked())
    assert caught.value.code == code
    out = run(source, "-o", tmp_path / "out", "--q-bits", 4)
    assert out.exit_code == 1 and out.stderr.count("\n") == 1 and "Traceback" not in out.stderr
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    import mlx.core as mx

    source = write_model(tmp_path / "source", CONFIG)
    weights = mx.load(str(source / "model.safetensors"))
    weights["model.layers.1.input_layernorm.weight"] = mx.full((64,), float("nan"))
    write_weights(source, weights)
    with pytest.raises(LoadError, match=r"tensor model\.layers\.1\.input_layernorm\.weight: found NaN") as caught:
        convert(open_ref(str(source)), tmp_path / "out", asked())
    assert caught.value.code == "L18" and not (tmp_path / "out").exists()


def test_a_file_that_shrinks_meanwhile_is_an_error_and_no_checkpoint(tmp_path, monkeypatch):
    source = write_model(tmp_path / "source", CONFIG)
    real = Options

    def shrink(done: int, total: int) -> None:
        os.truncate(source / "model.safetensors", 3000)

    with pytest.raises(LoadError) as caught:
        convert(open_ref(str(source)), tmp_path / "out", real(), progress=Progress(shrink))
    assert caught.value.code in ("L60", "L18") and not (tmp_path / "out").exists()


def test_what_is_quantised_already_is_not_quantised_again(source, tmp_path):
    once = convert(open_ref(str(source)), tmp_path / "once", asked()).out
    with pytest.raises(LoadError, match="quantised already \\(group_size 32, bits 4") as caught:
        convert(open_ref(str(once)), tmp_path / "twice", asked())
    assert caught.value.code == "L61"
    assert tensors(convert(open_ref(str(once)), tmp_path / "copy").out) == tensors(once)


@pytest.mark.parametrize(
    ("bits", "group", "mode", "text"),
    [
        (7, None, None, "--q-bits: found 7 in mode affine"),
        (4, 48, None, "--q-group-size: found 48"),
        (8, None, "mxfp4", "--q-bits: found 8 in mode mxfp4, expected 4"),
        (None, 64, "nvfp4", "--q-group-size: found 64 in mode nvfp4, expected 16"),
        (None, 64, None, "--q-group-size: found 64 without --q-bits"),
        (4, None, "int4", "--q-mode: found 'int4'"),
    ],
)
def test_settings_mlx_does_not_have(bits, group, mode, text):
    with pytest.raises(UsageError, match=text) as caught:
        read_quantisation(bits, group, mode)
    assert caught.value.code == "U67"


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_or_json_and_no_plan_stays(source, tmp_path):
    out = run(source, "-o", tmp_path / "a", "--q-bits", 4, "--q-group-size", 32)
    assert out.exit_code == 0, out.output
    assert "23 modules in 4 bits" in out.stdout and out.stderr == "wrote model.safetensors\n"
    quiet = run(source, "-o", tmp_path / "b", "--q-bits", 4, "--json")
    assert quiet.stderr == "" and json.loads(quiet.stdout)["quantised"] == {"4": 23}
    assert not (tmp_path / "a" / PLAN).exists()


def test_options_for_the_other_kind_of_source_are_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    out = run(tmp_path / "m.gguf", "-o", tmp_path / "out", "--q-bits", 4)
    assert out.exit_code == 2 and "--q-bits: found 4 for a GGUF file" in out.stderr


def test_a_model_type_that_nobody_gives_classes_for_is_refused(source, site, tmp_path):
    """A plugin that loads its targets itself may leave `spec_model_classes` out; mlx-lm knows no such type."""
    claim = "from mlx_spec import hookimpl\n@hookimpl\ndef spec_register(register):\n    register.target('fake_type')\n"
    site.install("fake-dist", "fake-one", claim)
    found = open_ref(str(source))
    strange = ModelRef(found.name, found.path, {**found.config, "model_type": "fake_type"})
    with pytest.raises(LoadError, match="for which mlx-lm and plugin fake-one give no classes") as caught:
        convert(strange, tmp_path / "out")
    assert caught.value.code == "L65" and not (tmp_path / "out").exists()

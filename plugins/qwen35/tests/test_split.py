"""Heads extracted and kept by `spec split-mtp` and `spec convert --keep-mtp`: layouts, precision, equal tokens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

import mlx_spec
from mlx_spec.cli import cli
from mlx_spec.conversion.checkpoint import Options, convert
from mlx_spec.conversion.head import HEAD_FILE, split
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.errors import LoadError, PairError, RefusedError
from mlx_spec.loading import open_ref
from mlx_spec.tensorwriter import SafetensorsWriter

PROMPT = [65, 66, 67, 68]
FOUR = read_quantisation(4, 32, None)
Dirs = Callable[..., tuple[Path, Path]]


def raw(mtp_dirs: Dirs, variant: str = "dense", **options: object) -> Path:
    """A published layout that carries its head: norms as deltas, fused experts, `mtp.` names."""
    return mtp_dirs(variant=variant, wrapper=True, drafter="own", raw=True, agree=True, **options)[0]


def ref(path: Path) -> mlx_spec.ModelRef:
    return open_ref(str(path))


def weights(folder: Path, file: str = "model.safetensors") -> dict[str, mx.array]:
    return mx.load(str(folder / file))


def replies(target: Path, drafter: Path | None, kind: str | None = None) -> tuple[list[int], list[int], int]:
    """(drafted reply, plain reply, drafts accepted)."""
    pair = mlx_spec.load(str(target), str(drafter) if drafter else None, kind, probe=False)
    run = {"max_tokens": 24, "ignore_eos": True, "adaptive": False}
    drafted = mlx_spec.generate(pair, PROMPT, **run)
    plain = mlx_spec.generate(pair, PROMPT, speculative=False, **run)
    return drafted.token_ids, plain.token_ids, drafted.timings.draft_n_accepted


@pytest.mark.parametrize("variant", ["dense", "moe", "tied"])
def test_the_round_trip_keeps_the_tokens(mtp_dirs, tmp_path, variant):
    source = raw(mtp_dirs, variant)
    kept = convert(ref(source), tmp_path / "kept", Options(FOUR, keep_heads=True)).out
    head, small = split(ref(source), tmp_path / "head").out, split(ref(kept), tmp_path / "small").out
    for target, drafter, kind in ((kept, None, "mtp"), (source, head, None), (kept, small, None), (kept, head, None)):
        drafted, plain, accepted = replies(target, drafter, kind)
        assert drafted == plain and len(plain) == 24
        assert accepted > 0, (target.name, drafter)


@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_names_norms_and_experts_are_those_of_a_drafter(mtp_dirs, tmp_path, variant):
    source, reference = raw(mtp_dirs, variant), mtp_dirs(variant=variant, drafter="mtp", agree=True)[1]
    made = weights(split(ref(source), tmp_path / "head").out)
    wanted = weights(reference)  # the same seed, written in that layout
    assert made.keys() == wanted.keys()
    for name, array in wanted.items():
        assert array.shape == made[name].shape and mx.allclose(array, made[name], atol=1e-6), name
    config = ref(tmp_path / "head").config
    assert config["model_type"] == "qwen3_5_mtp" and config["block_size"] == 3
    assert config["text_config"]["hidden_size"] == ref(reference).config["text_config"]["hidden_size"]


def test_norms_get_their_one_once(mtp_dirs, tmp_path):
    source = raw(mtp_dirs)
    deltas = {n: a for p in sorted(source.glob("*.safetensors")) for n, a in mx.load(str(p)).items() if "mtp." in n}
    first = weights(split(ref(source), tmp_path / "first").out)
    kept = convert(ref(source), tmp_path / "kept", Options(keep_heads=True)).out
    again = weights(split(ref(kept), tmp_path / "again").out)
    for name in ("norm.weight", "pre_fc_norm_hidden.weight", "layers.0.self_attn.q_norm.weight"):
        assert mx.array_equal(first[name], deltas[f"mtp.{name}"] + 1)
        assert mx.array_equal(again[name], first[name])
    assert mx.array_equal(weights(kept, HEAD_FILE)["mtp.norm.weight"], first["norm.weight"])
    assert mx.array_equal(first["fc.weight"], deltas["mtp.fc.weight"])


def test_packed_heads_stay_as_they_are_and_floats_are_packed_when_asked(mtp_dirs, tmp_path):
    packed = mtp_dirs(variant="moe", wrapper=True, drafter="own", bits=4)[0]
    made = weights(split(ref(packed), tmp_path / "same").out)
    stored = {n: a for p in sorted(packed.glob("*.safetensors")) for n, a in mx.load(str(p)).items() if "mtp." in n}
    for name in ("fc.weight", "fc.scales", "fc.biases"):
        (theirs,) = (a for n, a in stored.items() if n.endswith(f"mtp.{name}"))
        assert mx.array_equal(made[name], theirs)
    assert ref(tmp_path / "same").config["quantization"]["bits"] == 4
    with pytest.raises(LoadError, match="packed already \\(4 bits in groups of 32\\)") as caught:
        split(ref(packed), tmp_path / "other", FOUR)
    assert caught.value.code == "QW60"
    floats = raw(mtp_dirs, "moe")
    asked = split(ref(floats), tmp_path / "asked", FOUR).out
    settings = ref(asked).config["quantization"]
    assert settings["bits"] == 4 and settings["layers.0.mlp.gate"]["bits"] == 8
    plain = weights(split(ref(floats), tmp_path / "floats").out)
    for part, array in zip(("weight", "scales", "biases"), mx.quantize(plain["fc.weight"], 32, 4), strict=True):
        assert mx.array_equal(weights(asked)[f"fc.{part}"], array)


def test_only_the_head_has_to_be_there(mtp_dirs, tmp_path):
    source = shutil.copytree(raw(mtp_dirs), tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    whole = weights(split(ref(source), tmp_path / "whole").out)
    head = {name: array for p in sorted(source.glob("*.safetensors")) for name, array in mx.load(str(p)).items()}
    mx.save_safetensors(
        str(source / "model-00003-of-00003.safetensors"), {n: a for n, a in head.items() if n in index and "mtp." in n},
        metadata={"format": "pt"},
    )  # fmt: skip
    moved = {n: "model-00003-of-00003.safetensors" if "mtp." in n else f for n, f in index.items()}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": moved}))
    for file in set(index.values()):
        (source / file).unlink()
    part = split(ref(source), tmp_path / "part")
    assert part.shards == ["model-00003-of-00003.safetensors"]
    assert all(mx.array_equal(whole[name], array) for name, array in weights(part.out).items())


def test_a_head_of_another_model_of_these_sizes_is_refused(mtp_dirs, tmp_path):
    head = split(ref(raw(mtp_dirs)), tmp_path / "head").out
    other = mtp_dirs(seed=5, wrapper=True, drafter="own", raw=True)[0]
    with pytest.raises(PairError, match="another trunk than recorded") as caught:
        mlx_spec.load(str(other), str(head), probe=False)
    assert caught.value.code == "P30"


def test_the_head_in_another_whole_checkpoint_is_refused(mtp_dirs):
    mine = mtp_dirs(wrapper=True, drafter="own", raw=True)[0]
    other = mtp_dirs(seed=5, wrapper=True, drafter="own", raw=True)[0]
    with pytest.raises(PairError, match="another trunk than the one beside the head") as caught:
        mlx_spec.load(str(other), str(mine), probe=False)
    assert caught.value.code == "P30"


def test_a_head_nobody_asked_for_is_mentioned(mtp_dirs):
    target = str(mtp_dirs(wrapper=True, drafter="own", raw=True)[0])
    (note,) = mlx_spec.load(target).plan.notes
    assert "--draft-kind mtp" in note
    assert not any("carries a head" in line for line in mlx_spec.load(target, kind="none").plan.notes)


def test_a_head_with_embeddings_of_its_own_is_not_written(mtp_dirs, tmp_path):
    """Neither command leaves what the loader would refuse."""
    source = shutil.copytree(raw(mtp_dirs), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (config.get("text_config") or config)["mtp_use_dedicated_embeddings"] = True
    (source / "config.json").write_text(json.dumps(config))
    for write in (
        lambda: split(ref(source), tmp_path / "head"),
        lambda: convert(ref(source), tmp_path / "out", Options(FOUR, keep_heads=True)),
    ):
        with pytest.raises(LoadError, match="mtp_use_dedicated_embeddings.*found True"):
            write()
    assert not (tmp_path / "head").exists() and not (tmp_path / "out").exists()


def test_a_head_that_is_not_whole_is_named(mtp_dirs, tmp_path):
    source = shutil.copytree(raw(mtp_dirs), tmp_path / "source")
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())["weight_map"]
    name = next(name for name in index if name.endswith("mtp.layers.0.self_attn.o_proj.weight"))
    for shard in sorted(source.glob("*.safetensors")):
        kept = {n: a for n, a in mx.load(str(shard)).items() if n != name}
        mx.save_safetensors(str(shard), kept, metadata={"format": "pt"})
    file.write_text(json.dumps({"weight_map": {n: f for n, f in index.items() if n != name}}))
    out = CliRunner().invoke(cli, ["split-mtp", "-m", str(source), "-o", str(tmp_path / "head")])
    assert out.exit_code == 1 and "o_proj.weight" in out.stderr and out.stderr.count("\n") == 1
    assert not (tmp_path / "head").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("raw", [True, False], ids=["published", "converted"])
@pytest.mark.parametrize("variant", ["dense", "moe"])
def test_what_mlx_lm_does_not_define_is_converted_by_the_plugins_classes(mtp_dirs, tmp_path, variant, raw):
    """qwen3_5_text and qwen3_5_moe_text, as the text model alone is saved."""
    flat = mtp_dirs(drafter="own", raw=raw, variant=variant, agree=True)[0]
    done = convert(ref(flat), tmp_path / "out", Options(keep_heads=True))
    assert done.model_type.endswith("_text") and json.loads((done.out / "config.json").read_text())["vocab_size"] == 320
    assert replies(flat, None, "mtp") == replies(done.out, None, "mtp")
    assert len(replies(done.out, None, "mtp")[0]) == 24


def test_such_a_model_is_packed_and_loads(mtp_dirs, tmp_path):
    flat = mtp_dirs(drafter="own", raw=True)[0]
    done = convert(ref(flat), tmp_path / "out", Options(FOUR, keep_heads=True))
    assert sum(done.quantised.values()) > 40 and done.head == "mtp.safetensors"
    pair = mlx_spec.load(str(done.out), kind="mtp")
    assert pair.plan.active and pair.plan.findings == []


DRIVER = """
import sys, time
from pathlib import Path
from mlx_spec.conversion.checkpoint import Options, Progress, convert
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.loading import open_ref

def on_bytes(done, total):
    if done > int(sys.argv[3]):
        print("working", flush=True)
        time.sleep(600)

options = Options(read_quantisation(4, 32, None), keep_heads=True)
convert(open_ref(sys.argv[1]), Path(sys.argv[2]), options, progress=Progress(on_bytes), shard_bytes=60_000)
"""


@pytest.mark.parametrize("stop", [20_000, 140_000], ids=["in the head", "in the trunk"])
def test_a_killed_conversion_goes_on_and_keeps_the_head(mtp_dirs, tmp_path, stop):
    source, out, partial = raw(mtp_dirs), tmp_path / "out", tmp_path / ".out.mlx-spec-partial"
    arguments = [sys.executable, "-c", DRIVER, str(source), str(out), str(stop)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "working\n", process.communicate()[1]
    process.kill()
    process.communicate()
    finished = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert (HEAD_FILE in finished) == (stop > 100_000) and not out.exists()
    done = convert(ref(source), out, Options(FOUR, keep_heads=True), shard_bytes=60_000)
    assert done.resumed == bool(finished) and not partial.exists()
    assert {name: (out / name).stat().st_mtime_ns for name in finished} == finished
    whole = convert(ref(source), tmp_path / "whole", Options(FOUR, keep_heads=True), shard_bytes=60_000).out
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    drafted, plain, accepted = replies(out, None, "mtp")
    assert drafted == plain and accepted > 0


def test_a_disk_that_fills_while_the_head_is_kept_leaves_nothing_half(mtp_dirs, tmp_path, monkeypatch):
    source, out = raw(mtp_dirs), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(RefusedError, match="No space left") as caught:
            convert(ref(source), out, Options(FOUR, keep_heads=True))
    assert caught.value.code == "R40" and not out.exists() and not list(tmp_path.glob(".*"))
    assert convert(ref(source), out, Options(FOUR, keep_heads=True)).head == HEAD_FILE

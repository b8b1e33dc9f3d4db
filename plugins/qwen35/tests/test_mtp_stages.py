"""`spec inspect` on Qwen heads: every stage of good and of broken ones, in text and in JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

from mlx_spec.cli import cli
from mlx_spec.conversion.checkpoint import Options, convert
from mlx_spec.conversion.head import HEAD_FILE, split
from mlx_spec.conversion.quantise import read_quantisation
from mlx_spec.head_stages import Stage, own_stages
from mlx_spec.loading import open_ref

Dirs = Callable[..., tuple[Path, Path]]


@pytest.fixture
def kept(mtp_dirs: Dirs, tmp_path: Path) -> Path:
    """A converted model with its head beside it, in a folder a test may change."""
    source = mtp_dirs(wrapper=True, drafter="own", raw=True, agree=True)[0]
    options = Options(read_quantisation(4, 32, None), keep_heads=True)
    return convert(open_ref(str(source)), tmp_path / "kept", options).out


def stages(path: Path) -> dict[str, Stage]:
    return {stage.name: stage for stage in own_stages(open_ref(str(path)))}


def rewrite(
    file: Path, change: Callable[[dict[str, mx.array]], object], metadata: dict[str, str] | None = None
) -> None:
    from mlx_spec.tensorfiles import read_metadata

    labels, tensors = read_metadata(file), mx.load(str(file))
    change(tensors)
    mx.save_safetensors(str(file), tensors, metadata=labels if metadata is None else metadata)


def test_published_and_converted_heads(mtp_dirs, kept):
    raw = stages(mtp_dirs(variant="moe", wrapper=True, drafter="own", raw=True)[0])
    assert {stage.state for name, stage in raw.items() if name != "probe"} == {"ok"}
    assert "deltas, 1 is added" in raw["norms"].reason and "6 experts each" in raw["shapes"].reason
    assert raw["quantisation"].reason.startswith("F32; packed to 4 bits")
    own = stages(kept)
    assert {stage.state for name, stage in own.items() if name != "probe"} == {"ok"}
    assert "stored as they are used" in own["norms"].reason
    assert own["quantisation"].reason == "8 matrices in 4 bits in groups of 32"
    assert own["trunk"].reason == "it is the recorded one"


def test_a_wrong_shape_stops_before_the_probe(kept):
    rewrite(kept / HEAD_FILE, lambda t: t.update({"mtp.norm.weight": mx.zeros((9,))}))
    found = stages(kept)
    assert found["shapes"].state == "no" and "norm.weight" in found["shapes"].reason
    assert found["probe"].reason == "not possible: shapes" and found["norms"].state == "ok"


def test_norms_that_contradict_their_label_are_open(kept):
    def shrink(tensors: dict[str, mx.array]) -> None:
        tensors.update({n: a * 0.01 for n, a in tensors.items() if "norm" in n})

    rewrite(kept / HEAD_FILE, shrink)
    norms = stages(kept)["norms"]
    assert norms.state == "open" and "look like deltas" in norms.reason and "mtp_norms" in norms.next_step


def test_block_scaled_weights_cannot_be_read(mtp_dirs, tmp_path):
    source = shutil.copytree(mtp_dirs(wrapper=True, drafter="own", raw=True)[0], tmp_path / "source")
    name = "mtp.fc.weight_scale_inv"
    mx.save_safetensors(str(source / "extra.safetensors"), {name: mx.ones((1, 1))}, metadata={"format": "pt"})
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][name] = "extra.safetensors"
    file.write_text(json.dumps(index))
    quantisation = stages(source)["quantisation"]
    assert quantisation.state == "no" and "FP8" in quantisation.reason and "bfloat16 release" in quantisation.next_step


def test_the_command_tells_them_and_proves_on_request(kept, mtp_dirs, tmp_path):
    head = split(open_ref(str(kept)), tmp_path / "head").out
    out = CliRunner().invoke(cli, ["inspect", str(kept), "--drafter", str(head), "--probe", "--json"])
    assert out.exit_code == 0, out.output
    doc = json.loads(out.stdout)
    (fit,) = [d for d in doc["drafters"] if d["source"] == str(head)]
    for listed in (doc["stages"], fit["stages"]):
        assert listed[-1]["name"] == "probe" and listed[-1]["state"] == "ok"
        assert listed[-1]["reason"].startswith("bitwise at L=3 of L=3 (")
    again = CliRunner().invoke(cli, ["inspect", str(kept)])
    assert "bitwise at L=3 of L=3 (memo)" in again.stdout
    assert "declared      ok     mtp_num_hidden_layers is 1" in again.stdout

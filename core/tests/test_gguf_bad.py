"""Files that `spec convert` refuses: one clear error with a code each, and nothing written."""

from __future__ import annotations

import json
import os
import random
import struct

import ggufs
import pytest

from mlx_spec.errors import SpecError
from mlx_spec.gguf.convert import convert_gguf
from mlx_spec.gguf.refusals import cut_short
from mlx_spec.gguf.rope import llama3_factors
from mlx_spec.tensorfiles import tensor_index

L, G = "llama.", "gemma3."


def small(**kinds: str) -> ggufs.Made:
    return ggufs.make(ggufs.LLAMA, kinds or "Q4_0")


def refused(content: bytes, tmp_path) -> SpecError:
    source = tmp_path / "model.gguf"
    source.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        convert_gguf(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    return caught.value


# -- the container -----------------------------------------------------------------------------------------

WHOLE = small().bytes()
CONTAINERS = [
    (b"", "first bytes b''"),
    (b"GG", "first bytes b'GG'"),
    (b"PK\x03\x04" + bytes(100), "first bytes"),
    (b"GGUF", "for the version"),
    (b"GGUF" + struct.pack("<I", 1) + WHOLE[8:], "version 1"),
    (b"GGUF" + struct.pack(">I", 3) + WHOLE[8:], "big-endian"),
    (WHOLE[:24], "a metadata key"),
    (WHOLE[:-4000], "bytes"),
    (WHOLE[:8] + struct.pack("<QQ", 2**62, 2**62) + WHOLE[24:], "a metadata key"),
    (WHOLE[:24] + struct.pack("<Q", 2**63) + WHOLE[32:], "a metadata key"),
    (WHOLE.replace(b"general.architecture", b"general.\xff\xfechitecture"), "UTF-8"),
    (WHOLE.replace(b"llama.block_count", b"llama.block_cou\xc3\x28"), "UTF-8"),
]


@pytest.mark.parametrize(("content", "words"), CONTAINERS, ids=range(len(CONTAINERS)))
def test_damaged_containers(content, words, tmp_path):
    error = refused(content, tmp_path)
    assert error.code == "L50" and words in str(error) and "checksum" in error.next_step


@pytest.mark.parametrize("name", ["README.md", "model.safetensors"])
def test_a_file_that_is_something_else_is_not_called_a_damaged_one(name, tmp_path):
    (tmp_path / name).write_bytes(b"# some text")
    with pytest.raises(SpecError) as caught:
        convert_gguf(tmp_path / name, tmp_path / "out")
    assert caught.value.code == "L50" and "found no GGUF file: its first bytes are b'# so'" in str(caught.value)
    assert "checksum" not in caught.value.next_step and "config.json" in caught.value.next_step


@pytest.mark.parametrize(("lack", "share"), [(1, "less than 0.1%"), (4000, "5.5%"), (60000, "82.8%")])
def test_a_file_without_its_end_says_how_much_is_missing(lack, share, tmp_path):
    """Counted to the end of the last tensor, not of the one where the file ends."""
    error = refused(WHOLE[:-lack], tmp_path)
    assert error.code == "L50" and error.found.startswith(f"{len(WHOLE) - lack} bytes, which end in ")
    are = "is" if lack == 1 else "are"
    assert error.expected == f"at least {len(WHOLE)} bytes, as its header says: {lack} {are} missing ({share})"


def test_all_but_all_is_not_called_all(tmp_path):
    error = cut_short(tmp_path / "x.gguf", 2_000_000, 4_000_000_000, "token_embd.weight")
    assert error.expected.endswith("3998000000 are missing (more than 99.9%)")


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(SpecError, match="found a pipe, socket or device, expected a readable file") as caught:
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out")
    assert caught.value.code == "L03"


def test_a_file_that_ends_in_its_header_says_so(tmp_path):
    error = refused(WHOLE[:30], tmp_path)
    assert error.found == "6 bytes left of 30 for a metadata key"
    assert error.expected == "8 bytes: its header is damaged, or cut at least 2 bytes short"


def test_every_truncation_is_refused(tmp_path):
    for cut in sorted({*range(0, 3000, 97), *range(3000, len(WHOLE) - 1, 4001), len(WHOLE) - 33}):
        assert refused(WHOLE[:cut], tmp_path).code == "L50", cut


def test_damage_anywhere_never_becomes_a_traceback(tmp_path):
    """Bytes changed at random in header and data: refused with a code, or the change was harmless."""
    rng = random.Random(7)
    source, codes = tmp_path / "model.gguf", set()
    header = WHOLE.index(b"output_norm.weight") + 60
    for number in range(250):
        content = bytearray(WHOLE)
        for _ in range(rng.choice([1, 1, 4])):
            content[rng.randrange(header if rng.random() < 0.9 else len(content))] = rng.choice(
                [0, 1, 255, rng.randrange(256)]
            )
        source.write_bytes(content)
        try:
            tensor_index(convert_gguf(source, tmp_path / f"out{number}").out)
        except SpecError as error:
            codes.add(error.code)
            assert not (tmp_path / f"out{number}").exists()
    assert {"L50", "L53"} <= codes and codes <= {"L17", "L18", "L50", "L51", "L52", "L53", "L54", "L55"}


def with_tensor(change) -> bytes:
    made = small()
    change(made.tensors)
    return made.bytes()


def drop(name):
    return lambda tensors: tensors.pop(name)


def reshape(name, shape, kind="Q4_0"):
    def change(tensors):
        tensors[name] = (shape, kind, ggufs.random_blocks(kind, shape, 3))

    return change


def factors(first):
    """A table that is right but for one value."""
    values = [first, *llama3_factors(5000.0, 24, 8.0, 8192)[1:]]

    def change(tensors):
        tensors["rope_freqs.weight"] = ((12,), "F32", ggufs.from_floats("F32", values))

    return change


TENSORS = [
    (drop("blk.1.ffn_up.weight"), "L17", "no blk.1.ffn_up.weight"),
    (drop("token_embd.weight"), "L17", "token_embd.weight"),
    (drop("output_norm.weight"), "L17", "output_norm.weight"),
    (reshape("blk.0.attn_q.weight", (64, 96)), "L53", "[96, 64], as the metadata says"),
    (reshape("token_embd.weight", (64,)), "L17", "two axes"),
    (reshape("blk.0.attn_norm.weight", (32,)), "L53", "[64]"),
    (reshape("blk.2.ffn_up.weight", (160, 64)), "L54", "blk.2.ffn_up.weight"),
    (reshape("blk.0.ffn_gate_exps.weight", (4, 160, 64)), "L54", "blk.0.ffn_gate_exps.weight"),
    (reshape("blk.0.attn_v.weight", (48, 60), "F32"), "L53", "[48, 64]"),
    (reshape("rope_freqs.weight", (12,), "F32"), "L54", "rope factors"),
    (reshape("rope_freqs.weight", (8,), "F32"), "L54", "rope factors"),
    (factors(0.0), "L54", "rope factors from 0 to 8"),
    (factors(float("inf")), "L54", "to inf"),
    (factors(float("nan")), "L54", "to nan"),
    (factors(9.0), "L54", "from 1 to 9"),
    (reshape("rope_freqs.weight", (64,), "Q4_0"), "L54", "a short table of floats"),
]


@pytest.mark.parametrize(("change", "code", "words"), TENSORS, ids=range(len(TENSORS)))
def test_tensors_that_do_not_fit(change, code, words, tmp_path):
    error = refused(with_tensor(change), tmp_path)
    assert error.code == code and words in str(error)


def test_rows_that_are_no_whole_blocks(tmp_path):
    made = small()
    shape, _, data = made.tensors["blk.0.ffn_up.weight"]
    made.tensors["blk.0.ffn_up.weight"] = ((128, 80), "Q4_0", data)
    error = refused(made.bytes(), tmp_path)
    assert error.code == "L50" and "rows of 80 in blk.0.ffn_up.weight" in str(error) and shape == (160, 64)


def test_types_that_mlx_cannot_hold_are_named_with_their_tensors(tmp_path):
    made = small()
    for name, kind in (
        ("blk.0.ffn_up.weight", "IQ4_NL"),
        ("blk.1.ffn_up.weight", "IQ4_NL"),
        ("output_norm.weight", "Q3_K"),
    ):
        shape, _, data = made.tensors[name]
        made.tensors[name] = (shape, kind, data)
    error = refused(made.bytes(), tmp_path)
    assert error.code == "L52" and "IQ4_NL in 2 tensors (blk.0.ffn_up.weight, blk.1.ffn_up.weight)" in str(error)
    assert "Q3_K in 1 tensor" in str(error) and "Q4_0" in str(error.expected) and "Q4_K_M" in error.next_step


METADATA = [
    ({"general.architecture": "gptneox"}, "L51", "'gptneox'"),
    ({"general.architecture": None}, "L53", "general.architecture"),
    ({"general.architecture": 7}, "L53", "a string"),
    ({"general.alignment": 0}, "L50", "general.alignment"),
    ({"general.alignment": 24 * 8}, "L50", "a multiple of 192"),
    ({"split.count": 3}, "L54", "llama-gguf-split"),
    ({L + "block_count": None}, "L53", "llama.block_count"),
    ({L + "block_count": 2**31}, "L53", "no more layers"),
    ({L + "block_count": 3}, "L17", "blk.2."),
    ({L + "embedding_length": "64"}, "L53", "a positive integer"),
    ({L + "attention.head_count": 0}, "L53", "llama.attention.head_count"),
    ({L + "attention.head_count": [4, 4]}, "L53", "a list of 2"),
    ({L + "attention.head_count_kv": 3}, "L53", "attn_k.weight"),
    ({L + "attention.value_length": 32}, "L54", "value_length"),
    ({L + "rope.dimension_count": 8}, "L54", "part of each head"),
    ({L + "attention.layer_norm_rms_epsilon": None}, "L53", "a positive number"),
    ({L + "attention.layer_norm_rms_epsilon": float("nan")}, "L53", "a positive number"),
    ({L + "context_length": -5}, "L53", "llama.context_length"),
    ({L + "rope.scaling.type": "yarn"}, "L54", "'yarn'"),
    ({L + "rope.scaling.type": "linear"}, "L53", "llama.rope.scaling.factor"),
    ({L + "attention.sliding_window": 512}, "L54", "sliding window"),
    ({L + "expert_count": 8}, "L54", "llama.expert_count 8"),
    ({L + "logit_scale": 0.5}, "L54", "llama.logit_scale"),
]


@pytest.mark.parametrize(("change", "code", "words"), METADATA, ids=lambda v: str(v)[:60])
def test_metadata_that_cannot_be_used(change, code, words, tmp_path):
    made = small()
    made.metadata = {key: item for key, item in (made.metadata | change).items() if item is not None}
    error = refused(made.bytes(), tmp_path)
    assert error.code == code and words in str(error)


def test_gemma3_needs_its_window(tmp_path):
    made = ggufs.make(ggufs.GEMMA3, "Q4_0")
    del made.metadata[G + "attention.sliding_window"]
    error = refused(made.bytes(), tmp_path)
    assert error.code == "L53" and "gemma3.attention.sliding_window" in str(error)


def test_one_thing_twice(tmp_path):
    renamed = WHOLE.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
    assert "blk.0.ffn_up.weight twice" in str(refused(renamed, tmp_path))
    renamed = WHOLE.replace(b"llama.rope.freq_base", b"llama.context_length")
    assert "llama.context_length" in str(
        refused(renamed.replace(b"llama.context_length", b"llama.rope.freq_base", 1), tmp_path)
    )


def test_tensors_that_overlap(tmp_path):
    made = small()
    content = made.bytes()
    entry = content.index(b"blk.0.attn_k.weight") + 19 + 4 + 16 + 4
    error = refused(content[:entry] + bytes(8) + content[entry + 8 :], tmp_path)
    assert error.code == "L50" and "where" in str(error)


# -- the command -------------------------------------------------------------------------------------------


def test_the_command_writes_and_says_what(spec, tmp_path):
    small().write(tmp_path / "m.gguf")
    done = spec("convert", "m.gguf", "-o", "out")
    assert done.returncode == 0 and done.stderr == ""
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert lines["model_type"] == "llama" and lines["quantised"] == "15 layers in 4 bits, group size 32"
    again = spec("convert", "m.gguf", "-o", "out", "--overwrite", "--dtype", "float16", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["dtype"] == "float16"


def test_the_command_says_what_it_rounded_and_widened(spec, tmp_path):
    base = {**ggufs.LLAMA, L + "embedding_length": 256}
    ggufs.make(base, {"token_embd": "Q6_K", "ffn_up": "F32"}).write(tmp_path / "m.gguf")
    done = spec("convert", "m.gguf", "-o", "out", "--dtype", "bfloat16")
    assert done.returncode == 0
    rounded, widened = done.stderr.splitlines()
    assert rounded.startswith("rounded to bfloat16: ") and "--dtype float32" in rounded
    assert "token_embd.weight" in widened and "Q6_K" in widened


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["convert", "m.gguf"], 2, "--out"),
        (["convert", "absent.gguf", "-o", "out"], 1, "absent.gguf"),
        (["convert", "absent.gguf", "-o", "out"], 1, "Check the path"),
        (["convert", ".", "-o", "out"], 1, "it holds GGUF files only"),
        (["convert", "bad.gguf", "-o", "out"], 1, "first bytes b'no G'"),
        (["convert", "m.gguf", "-o", "there"], 2, "something there already (config.json)"),
        (["convert", "m.gguf", "-o", "bad.gguf"], 2, "found a file, expected a new folder"),
        (
            ["convert", "m.gguf", "-o", "bad.gguf/out"],
            2,
            "Choose another folder with -o, or correct its permissions",
        ),
        (["generate", "-m", "m.gguf", "-p", "a"], 1, "Make one of it: spec convert m.gguf -o DIR"),
        (["convert", "m.gguf", "-o", "out", "--dtype", "int8"], 2, "float32 | float16 | bfloat16"),
    ],
)
def test_refusals_of_the_command(arguments, exit_code, words, spec, tmp_path):
    small().write(tmp_path / "m.gguf")
    (tmp_path / "bad.gguf").write_text("no GGUF")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    done = spec(*arguments)
    assert done.returncode == exit_code and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()

"""`spec inspect`: what a directory is, what it carries, what contradicts itself, what fits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner
from tinymodels import CONFIGS, LLAMA, write_model, write_tokenizer, write_weights

from mlx_spec import inspection, settings
from mlx_spec.checkpoint import load_mlx_lm, read_config
from mlx_spec.cli import cli
from mlx_spec.cli import inspect as command_module
from mlx_spec.errors import LoadError, UsageError
from mlx_spec.heads import contradictions, find_heads, promised_layers
from mlx_spec.identify import identify
from mlx_spec.inspection import Inspection, inspect
from mlx_spec.tensorfiles import TensorInfo
from mlx_spec.types import ModelRef


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inspect")
    for name in CONFIGS:
        write_model(root / name, name)
    write_tokenizer(root / "text")
    return root


@pytest.fixture
def folder(originals, tmp_path):
    """Copy of a model folder; `changes` edit config.json, `text` adds a tokenizer."""

    def make(name: str = "llama", text: bool = False, **changes) -> Path:
        path = Path(shutil.copytree(originals / name, tmp_path / name))
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        if text:
            shutil.copytree(originals / "text", path, dirs_exist_ok=True)
        return path

    return make


def add(path: Path, **tensors) -> Path:
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    write_weights(path, weights | tensors)
    return path


def run(*args: object):
    return CliRunner().invoke(cli, ["inspect", *map(str, args)])


def no_tokenizer(path: Path, found: str = "no tokenizer files") -> str:
    return (
        f"warning L41: tokenizer of {path}: found {found}, expected tokenizer.json and its settings. Copy them from "
        "the model this one was made of; without them the prompt can only be --prompt-ids.\n"
    )


def codes(report: Inspection) -> list[tuple[str, str]]:
    return [(p.code, p.severity) for p in report.problems]


# -- targets -------------------------------------------------------------------------------------------


def test_target(folder):
    report = inspect(str(folder(text=True, vocab_size=131)), context=300)
    assert (report.kind, report.model_type, report.owner, report.distribution) == (
        "target",
        "llama",
        "core",
        "mlx-spec",
    )
    assert (report.layers, report.hidden_size, report.vocab_size, report.context) == (3, 48, 131, 512)
    weights = mx.load(str(report.path / "model.safetensors"))
    assert report.parameters == sum(w.size for w in weights.values()) and report.tensors == len(weights)
    assert report.dtypes == {"F32": 4 * report.parameters} and report.memory.context == 300
    assert report.end_ids == [1] and report.tokenizer["state"] == "ok" and report.tokenizer["chat_template"]
    assert [(d.kind, d.fits) for d in report.drafters] == [("prompt-lookup", True), ("full-model", True)]


def test_json_is_one_object_with_everything(folder):
    result = run(folder("gemma3"), "--json", "--kv-bits", "4")
    value = json.loads(result.stdout)
    assert result.exit_code == 0 and value["ok"] and value["kind"] == "target" and value["end_ids"] == [1, 5]
    assert value["memory"]["total_bytes"] == value["memory"]["weights_bytes"] + value["memory"]["kv_bytes"]
    assert set(Inspection.__dataclass_fields__) < set(value)


def test_plain_text_in_a_pipe(folder):
    path = folder()
    result = run(path)
    assert result.exit_code == 0 and result.stderr == no_tokenizer(path) and "\x1b" not in result.stdout
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert ["model_type", "llama"] in lines and ["plugin", "core (mlx-spec)"] in lines
    assert ["tokenizer", "state: none"] in lines and ["end", "ids      1"] in lines


def test_table_on_a_terminal(folder, monkeypatch):
    monkeypatch.setattr("mlx_spec.cli.output.on_terminal", lambda stream: True)
    result = run(folder())
    assert result.exit_code == 0 and "─" in result.stdout and "prompt-lookup" in result.stdout


def test_quantised_checkpoint_counts_parameters(originals, tmp_path):
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    sizes = LLAMA | {"hidden_size": 64, "intermediate_size": 96}
    model_class, arguments = _get_classes(sizes)
    model = model_class(arguments.from_dict(sizes))
    parameters = sum(a.size for _, a in tree_flatten(model.parameters()))
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda p, m: {"group_size": 32, "bits": 8} if p == "lm_head" else hasattr(m, "to_quantized"),
    )
    setting = {"group_size": 32, "bits": 4, "lm_head": {"group_size": 32, "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"quantization": setting}))
    write_weights(tmp_path, dict(tree_flatten(model.parameters())))
    report = inspect(str(tmp_path))
    assert report.parameters == parameters and report.ok and set(report.dtypes) == {"U32", "F32"}
    assert "bits 4" in run(tmp_path).stdout


def test_cache_that_cannot_roll_back_is_a_problem(folder):
    result = run(folder("mamba"))
    assert result.exit_code == 1 and "ArraysCache, which cannot roll back" in result.stderr
    assert "Install a plugin that owns this model_type" in result.stderr and "drafter kind" not in result.stderr
    assert inspect(str(folder("llama"))).ok


def test_unknown_model_type(folder):
    report = inspect(str(folder(model_type="never_heard_of")))
    assert report.owner is None and not any(d.fits for d in report.drafters)
    assert codes(report) == [("L06", "error"), ("L41", "warning")]


# -- other directories ---------------------------------------------------------------------------------


def test_missing_directory():
    result = run("/no/such/dir")
    assert result.exit_code == 1 and "found no directory" in result.stderr and result.stdout == ""
    assert run("file:///etc").exit_code == 2


def test_drafter_directory_is_no_problem(folder):
    report = inspect(str(folder(architectures=["MedusaLlama"])))  # of a kind no plugin here reads
    assert report.kind == "drafter" and "MedusaLlama" in report.reason and report.ok and report.drafters == []


def test_head_only_directory_is_a_drafter(folder):
    path = folder()
    weights = {
        k: v for k, v in mx.load(str(path / "model.safetensors")).items() if "embed" not in k and "lm_head" not in k
    }
    mx.eval(weights)
    write_weights(path, weights)
    report = inspect(str(path))
    assert report.kind == "drafter" and "borrows" in report.reason


@pytest.mark.parametrize(
    ("name", "kind"), [("a.gguf", "gguf"), ("pytorch_model.bin", "pytorch"), ("adapter_config.json", "adapter")]
)
def test_other_kinds_exit_1(tmp_path, name, kind):
    (tmp_path / name).write_text("{}")
    result = run(tmp_path, "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == 1 and value["kind"] == kind and value["problems"][0]["code"] == "L05"


@pytest.mark.parametrize("damage", ["config", "weights", "tokenizer"])
def test_damage_is_reported_beside_what_is_known(folder, damage):
    path = folder(text=True)
    file = path / {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}[damage]
    file.write_bytes(file.read_bytes()[:-5])
    result = run(path)
    assert result.exit_code == 1 and len(re.findall(r"^error [A-Z]\d\d: ", result.stderr, re.M)) == 1
    assert file.name in result.stderr
    assert "path" in result.stdout
    report = inspect(str(path))
    assert (report.tokenizer.get("state") == "broken") == (damage == "tokenizer")


# -- contradictions (case 139) ---------------------------------------------------------------------------


def index_of(*names: str, shape: tuple[int, ...] = (4, 6)) -> dict[str, TensorInfo]:
    return {name: TensorInfo("F32", shape, Path("model.safetensors"), 96, 0) for name in names}


def layer(prefix: str, *drop: str) -> list[str]:
    parts = ["self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight"]
    return [f"{prefix}.{part}" for part in parts if part not in drop]


@pytest.mark.parametrize(
    ("prefix", "found"),
    [
        ("mtp.layers.0", ("mtp", (0,))),
        ("model.mtp.layers.0", ("model.mtp", (0,))),
        ("language_model.mtp.layers.0", ("language_model.mtp", (0,))),
        ("model.mtp_layers.0", ("model.mtp_layers", (0,))),
        ("model.layers.3", ("model.layers.3", (3,))),
        ("model.language_model.layers.3", ("model.language_model.layers.3", (3,))),
    ],
)
def test_heads_are_found_under_every_name(prefix, found):
    index = index_of(*[n for i in range(3) for n in layer(f"model.layers.{i}")], *layer(prefix))
    heads = find_heads({"num_hidden_layers": 3}, index)
    assert [(h.prefix, h.layers, h.tensors, h.nbytes) for h in heads] == [(*found, 3, 288)]
    config = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
    assert contradictions(config, index) == []
    assert [f.code for f in contradictions({"num_hidden_layers": 3}, index)] == ["C02"]


def test_names_that_only_look_like_a_head():
    assert (
        find_heads(
            {"num_hidden_layers": 1},
            index_of("model.layers.0.smtp.weight", "mtpx.a", "model.layers.0.mlp.up_proj.weight"),
        )
        == []
    )


def test_head_tensors_beside_the_layers_belong_to_it():
    index = index_of(*layer("model.layers.0"), *layer("mtp.layers.0"), "mtp.fc.weight", "mtp.norm.weight")
    (head,) = find_heads({"num_hidden_layers": 1}, index)
    assert (head.prefix, head.layers, head.tensors) == ("mtp", (0,), 5)


def test_experts_of_a_head_may_be_laid_out_in_another_way_than_the_models():
    trunk = [*layer("model.layers.0"), "model.layers.0.mlp.switch_mlp.up_proj.weight"]
    index = index_of(*trunk, *layer("mtp.layers.0"), "mtp.layers.0.mlp.experts.0.up_proj.weight")
    assert contradictions({"num_hidden_layers": 1, "mtp_num_hidden_layers": 1}, index) == []


@pytest.mark.parametrize(
    "key", ["mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_layers"]
)
@pytest.mark.parametrize("nested", [False, True])
def test_promise_without_tensors(folder, key, nested):
    config = LLAMA | ({"text_config": {key: 2}} if nested else {key: 2})
    assert promised_layers(config) == 2 and promised_layers(LLAMA) == 0
    index = index_of(*[n for i in range(3) for n in layer(f"model.layers.{i}")])
    assert [f.code for f in contradictions(config, index)] == ["C01"]


def test_half_a_head(folder):
    path = folder(num_nextn_predict_layers=1)
    names = [n for n in mx.load(str(path / "model.safetensors")) if n.startswith("model.layers.2.")]
    whole = {n.replace("layers.2.", "layers.3."): mx.ones((2,)) for n in names}
    report = inspect(str(add(path, **whole)))
    assert report.ok and report.drafters[2].fits and report.heads[0].tensors == 9
    weights = dict(mx.load(str(path / "model.safetensors")))
    mx.eval(weights)
    del weights["model.layers.3.mlp.up_proj.weight"]
    write_weights(path, weights)
    report = inspect(str(path))
    assert codes(report) == [("C03", "error"), ("L41", "warning")]
    assert "model.layers.3.mlp.up_proj.weight" in report.problems[0].found
    assert not report.drafters[2].fits and run(path).exit_code == 1


def test_fewer_head_layers_than_promised():
    index = index_of(*layer("model.layers.0"), *layer("mtp.layers.0"))
    assert [f.code for f in contradictions({"num_hidden_layers": 1, "mtp_num_hidden_layers": 2}, index)] == ["C03"]


def test_config_without_a_head_in_the_files_stays_usable(folder):
    report = inspect(str(folder(num_nextn_predict_layers=1)))
    assert codes(report) == [("C01", "warning"), ("L41", "warning")] and report.ok
    assert "runs undrafted" in run(report.path).stderr


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_hidden_layers": 4}, "layers: found 3 in the tensors, expected num_hidden_layers 4"),
        ({"vocab_size": 99}, "embed_tokens.weight rows: found 131, expected vocab_size 99"),
        ({"hidden_size": 64}, "model.norm.weight rows: found 48, expected hidden_size 64"),
    ],
)
def test_sizes_that_do_not_agree(folder, change, text):
    result = run(folder(**change))
    assert result.exit_code == 1 and text in result.stderr


def test_layers_with_a_quantisation_of_their_own_are_told():
    report = Inspection("x", Path("x"))
    report.quantisation = {"group_size": 32, "bits": 4, "mode": "affine", "embed": {"group_size": 64, "bits": 8}}
    told = dict(command_module.rows(report))["quantisation"]
    assert told == "group_size 32, bits 4, mode affine; embed group_size 64, bits 8"
    report.quantisation |= {"head": False, "a": {"bits": 8}, "b": {"bits": 8}, "c": True}
    told = dict(command_module.rows(report))["quantisation"]
    assert told.endswith("; head not quantised; a bits 8; 2 more with settings of their own")


def test_quantisation_that_does_not_agree(folder):
    path = folder()
    report = inspect(str(add(path, **{"lm_head.scales": mx.ones((2, 3))})))
    assert codes(report) == [("C05", "error"), ("L41", "warning")]
    shutil.rmtree(path)
    report = inspect(str(folder(quantization={"bits": 4, "group_size": 64})))
    assert codes(report) == [("C05", "warning"), ("L41", "warning")]


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**30},
        {"num_hidden_layers": 10**12},
        {"num_hidden_layers": -3},
        {"hidden_size": None, "head_dim": ...},
        {"hidden_size": 10**400, "head_dim": 10**400},
        {"num_attention_heads": [4], "num_key_value_heads": "2", "head_dim": {}},
        {"model_type": "\ud800"},
    ],
    ids=str,
)
def test_nonsense_in_config_is_reported_not_tripped_over(folder, change):
    result = run(folder(**change))
    assert result.exit_code == 1 and re.match(r"error [A-Z]\d\d: ", result.stderr)
    assert "internal error" not in result.stderr
    assert "path " in result.stdout


def test_tokenizer_of_another_model(folder):
    report = inspect(str(folder(text=True, eos_token_id=[1, 300])))
    assert codes(report) == [("C06", "warning"), ("C07", "warning")] and report.end_ids == [1, 300]


@pytest.mark.parametrize(
    ("left", "found"),
    [
        ((), "no tokenizer files"),
        (("tokenizer_config.json",), "tokenizer_config.json and no file with the tokens (tokenizer.json)"),
    ],
)
def test_a_model_without_a_tokenizer_is_warned_of(folder, left, found, caplog):
    path = folder(text=True)
    for name in {"tokenizer.json", "tokenizer_config.json"} - set(left):
        (path / name).unlink()
    result = run(path)
    assert result.exit_code == 0 and result.stderr == no_tokenizer(path, found)
    assert inspect(str(path)).tokenizer == {"state": "none"} and not caplog.records


def test_a_tokenizer_that_cannot_be_read_is_an_error(folder):
    path = folder(text=True)
    (path / "tokenizer.json").write_text("{")
    report = inspect(str(path))
    assert codes(report) == [("L04", "error")] and "tokenizer.json" in report.problems[0].subject
    (path / "tokenizer.json").write_text("{}")
    assert codes(inspect(str(path))) == [("L40", "error")]


def test_a_drafter_head_needs_no_tokenizer(folder):
    report = inspect(str(folder(architectures=["DFlashDraftModel"])))
    assert report.kind == "drafter" and "L41" not in dict(codes(report))


@pytest.mark.parametrize("missing", ["model", "one shard", "all shards", "a shard without an index", "other names"])
@pytest.mark.parametrize("text", [True, False])
def test_weights_that_are_missing_are_one_kind_of_fault(folder, missing, text):
    """Whatever else the folder holds, and whichever of its weight files is gone."""
    path = folder(text=text)
    weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    if "shard" in missing:
        index.write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}))
    if missing in ("one shard", "a shard without an index"):
        shutil.copy(weights, path / shards[1])
    if missing == "a shard without an index":
        index.unlink()
    weights.rename(path / "other.safetensors") if missing == "other names" else weights.unlink()
    (problem,) = [p for p in inspect(str(path)).problems if p.severity == "error"]
    found = {
        "model": "no weights",
        "one shard": f"no file {shards[0]}",
        "all shards": f"no file {shards[0]} (and 1 more)",
        "a shard without an index": "1 of 2 shards; number 1 is missing",
        "other names": "no weights but other.safetensors",
    }
    assert (problem.code, problem.subject, problem.found) == ("L11", f"weights in {path}", found[missing])
    with pytest.raises(LoadError) as refused:
        load_mlx_lm(ModelRef("m", path, read_config(path)))
    assert (refused.value.code, refused.value.found) == ("L11", found[missing])


# -- drafters ------------------------------------------------------------------------------------------


def test_drafters_of_plugins_that_need_no_directory_are_listed(folder, site, tmp_path):
    site.install(
        "mlx-spec-own", "own",
        "from mlx_spec.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def spec_register(register):\n"
        "    register.drafter('suffix')\n"
        "    register.drafter('seen', detect=lambda ref: None)\n"
        "    register.drafter('mtp', ['other_assistant'])\n",
    )  # fmt: skip
    report = inspect(str(folder()))
    told = [(d.kind, d.source, d.fits) for d in report.drafters]
    assert told[2:] == [("suffix", "plugin own", True)]
    assert "--draft-kind suffix" in report.drafters[2].reason
    report = inspect(str(folder("mamba")))
    assert [(d.kind, d.fits) for d in report.drafters][-1] == ("suffix", False)


def test_candidates_are_checked(folder, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    path, small = folder(), folder("small-llama")
    result = run(path, "--drafter", small, "--drafter", tmp_path / "empty", "--json")
    fits = {d["source"]: d for d in json.loads(result.stdout)["drafters"]}
    assert fits[str(small)]["kind"] == "full-model" and fits[str(small)]["fits"]
    assert not fits[str(tmp_path / "empty")]["fits"] and "it is empty" in fits[str(tmp_path / "empty")]["reason"]
    assert (
        result.exit_code == 1 and result.stderr.startswith("error L05: ") and str(tmp_path / "empty") in result.stderr
    )


def test_a_candidate_that_does_not_fit_is_told_and_exits_1(folder):
    small, path = folder("small-llama"), folder()
    result = run(small, "--drafter", path)
    assert result.exit_code == 1 and "full-model" in result.stdout
    lack = no_tokenizer(small)
    assert result.stderr.startswith(f"{lack}error P") and "Traceback" not in result.output
    assert run(path, "--drafter", small).exit_code == 0


@pytest.mark.parametrize("name", ["/no/such/drafter", "", "http://x/y"])
def test_a_candidate_that_is_not_there_is_refused(folder, name):
    result = run(folder(), "--drafter", name)
    assert result.exit_code in (1, 2) and result.stdout == ""
    assert name in result.stderr and result.stderr.count("\n") == 1
    assert result.stderr.startswith(("error L01: model ", "error U01: model "))


def test_candidates_for_what_is_no_target_are_answered(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    small = folder("small-llama")
    drafter = folder(architectures=["DFlashDraftModel"])
    for path in (drafter, tmp_path / "empty"):
        (fit,) = inspect(str(path), [str(small)]).drafters
        assert (fit.source, fit.fits) == (str(small), False) and f"{path} is no target" in fit.reason


def test_candidate_with_a_larger_vocabulary(folder):
    small, path = folder("small-llama"), folder()
    fit = inspect(str(small), [str(path)]).drafters[-1]
    assert (fit.kind, fit.fits) == ("full-model", False) and "131" in fit.reason and "97" in fit.reason


def test_drafters_of_the_owning_plugin_are_offered(folder, site):
    site.install(
        "mlx-spec-own", "own",
        "from mlx_spec.hookspecs import hookimpl\n"
        "@hookimpl\n"
        "def spec_register(register):\n"
        "    register.target('llama')\n"
        "    register.drafter('mtp', ['llama_assistant'])\n",
    )  # fmt: skip
    report = inspect(str(folder()))
    assert (report.owner, report.distribution) == ("own", "mlx-spec-own")
    assert [(d.kind, d.source, d.fits) for d in report.drafters[2:]] == [("mtp", "plugin own", True)]
    assert "llama_assistant" in report.drafters[2].reason
    report = inspect(str(folder("small-llama", model_type="llama_assistant")))
    assert (report.kind, report.owner, report.card.kind, report.ok) == ("drafter", "own", "mtp", True)
    assert "pass it as --draft-model" in run(report.path).stdout


def test_contested_model_type_is_a_problem(folder, site):
    for name in ("one", "two"):
        site.install(
            f"mlx-spec-{name}",
            name,
            "from mlx_spec.hookspecs import hookimpl\n"
            "@hookimpl\ndef spec_register(register):\n    register.target('llama')\n",
        )
    report = inspect(str(folder()))
    assert not report.ok and "mlx-spec-one, mlx-spec-two" in str(report.problems[0])


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 << 29, "1.50 GiB"), (1 << 60, "1048576.00 TiB")],
)
def test_sizes_for_people(nbytes, text):
    assert command_module.size(nbytes) == text


@pytest.mark.parametrize(("name", "value"), [("MLX_SPEC_THREADS", "many"), ("MLX_SPEC_KERNELS", "foo")])
def test_a_bad_variable_is_no_fault_of_the_model(folder, monkeypatch, name, value):
    model = str(folder())
    monkeypatch.setenv(name, value)
    settings.reset_settings()
    with pytest.raises(UsageError, match=f"{name}: found '?{value}"):
        inspect(model)


def test_inspect_reads_no_weights(folder, monkeypatch):
    monkeypatch.setattr(mx, "load", None)
    monkeypatch.setattr(inspection, "resolve", lambda name, config: __import__("mlx_spec").ModelRef(name, Path(name)))
    assert inspect(str(folder())).ok


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "it has no config.json"), ("[]", "its config.json cannot be used")],
    ids=["none", "list"],
)
def test_a_folder_without_a_usable_config_says_which(tmp_path: Path, text: str | None, reason: str) -> None:
    (tmp_path / "model.safetensors").touch()
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert identify(tmp_path, None).reason == reason

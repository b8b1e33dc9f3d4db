"""Whether a directory can draft for a target as `full-model`; read from files, before any weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from .errors import Finding, SpecError
from .types import ModelRef

COMPLETE = "Use a small complete model of the same family and tokenizer"
RECURRENT = frozenset({
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "falcon_h1", "falcon_mamba", "gear",
    "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2", "lfm2-vl", "lfm2_moe", "longcat_flash_ngram",
    "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "prism_hadamard_qwen35", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "recurrent_gemma", "rwkv7",
})  # fmt: skip
"""model_types whose modules in mlx-lm ask for a cache of fixed size (its ArraysCache)."""

ATTENTION = frozenset({"attention", "full_attention", "sliding_attention"})
"""Values of layer_types that keep K/V."""

MISMATCH_SHARE = 0.01  # of compared ids: reserved names that differ are common, another vocabulary is not


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LARGE_SHARE = 0.9
"""Of the target's bytes: four rows for three drafts at this cost are 1.08 times as fast, had all been accepted."""


def validate(target: ModelRef, drafter: ModelRef) -> list[Finding]:
    """Every reason why `drafter` cannot, or only badly, draft whole tokens for `target`."""
    findings = list(_other_kind(drafter))
    if findings:
        return findings
    findings += _vocabulary(target, drafter)
    findings += _rollback(drafter)
    findings += _size(target, drafter)
    findings += _tokenizers(target, drafter)
    findings += _context(target, drafter)
    return findings


def _subject(ref: ModelRef) -> str:
    return f"full-model drafter {ref.name}"


def _other_kind(drafter: ModelRef) -> Iterator[Finding]:
    """Assistants, heads, adapters and other directories that are no model on their own."""
    from .checkpoint import carries_embedding, identify, tensor_index

    try:
        identity = identify(drafter.path, drafter.config)
        if identity.kind != "target":
            reason = f"another kind of directory ({identity.reason})"
        elif not carries_embedding(drafter.config, tensor_index(drafter.path)):
            rows = vocab_size(drafter.config)
            reason = f"a head without its own token embedding (no tensor has {rows} rows, one per token)"
        else:
            return
    except SpecError as error:
        yield Finding(error.code, "error", error.what, str(error.found), str(error.expected), error.next_step)
        return
    step = "Drop --draft-kind to let the directory decide, or give a complete small model"
    yield Finding("P20", "error", _subject(drafter), reason, "a complete causal language model", step)


# -- vocabulary ----------------------------------------------------------------------------------------


def vocab_size(config: Mapping[str, object]) -> int | None:
    """vocab_size of config.json or of its text_config; None when neither has one."""
    return _positive(config, "vocab_size")


def _positive(config: Mapping[str, object], key: str) -> int | None:
    """A number above 0 of config.json or of its text_config; None when neither has one."""
    text = config.get("text_config")
    for section in (config, text if isinstance(text, Mapping) else {}):
        value = section.get(key)
        if type(value) is int and value > 0:
            return value
    return None


def _vocabulary(target: ModelRef, drafter: ModelRef) -> Iterator[Finding]:
    mine, theirs = vocab_size(drafter.config), vocab_size(target.config)
    for ref, size in ((drafter, mine), (target, theirs)):
        if size is None:
            yield Finding(
                "P21",
                "error",
                f"config.json of {ref.name} (model_type {ref.model_type!r})",
                "no vocab_size",
                "vocab_size, to know that ids of both models mean the same",
                "Add the key from the original model; for a drafter head, install the plugin that brings it",
            )
    if mine is not None and theirs is not None and mine > theirs:
        yield Finding(
            "P22",
            "error",
            f"vocabulary of {_subject(drafter)}",
            f"{mine} entries, target {target.name} has {theirs}",
            f"at most {theirs}",
            COMPLETE,
        )


def _tokenizers(target: ModelRef, drafter: ModelRef) -> Iterator[Finding]:
    """Same id, same token: compared over all ids both tokenizers name. Padding rows have no name."""
    try:
        theirs, mine = token_names(target.path), token_names(drafter.path)
    except SpecError as error:
        yield Finding(
            "P27",
            "warning",
            error.what,
            str(error.found),
            "a file that can be compared with the other side's",
            "Download it again: whether both sides mean the same by an id was not compared",
        )
        return
    if theirs is None or mine is None:
        missing = drafter if mine is None else target
        yield Finding(
            "P24",
            "note",
            f"tokenizer of {missing.name}",
            "no tokenizer.json to compare",
            "the same tokens on both sides",
            "Make sure that both models use one tokenizer; otherwise hardly a draft is accepted",
        )
        return
    shared = mine.keys() & theirs.keys()
    wrong = sorted(i for i in shared if mine[i] != theirs[i])
    if not wrong and shared:
        return
    share = len(wrong) / len(shared) if shared else 1.0
    example = f", e.g. id {wrong[0]} is {mine[wrong[0]]!r} and {theirs[wrong[0]]!r}" if wrong else ""
    yield Finding(
        "P25",
        "error" if share > MISMATCH_SHARE else "warning",
        f"tokenizer of {_subject(drafter)}",
        f"{len(wrong)} of {len(shared)} common ids that mean another token{example}",
        f"the tokens of {target.name}",
        COMPLETE,
    )


def token_names(path: Path) -> dict[int, str] | None:
    """Id -> token from tokenizer.json; None without one, or when it lists none. Raises LoadError."""
    from .checkpoint import read_json

    file = path / "tokenizer.json"
    if not file.exists():
        return None
    data = read_json(file)
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    names: dict[int, str] = {}
    if isinstance(vocab, dict):
        names = {i: str(token) for token, i in vocab.items() if type(i) is int}
    elif isinstance(vocab, list):  # unigram: [piece, score] in the order of ids
        names = {i: str(entry[0]) for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    for entry in data.get("added_tokens") or ():
        if isinstance(entry, dict) and type(entry.get("id")) is int:
            names[entry["id"]] = str(entry.get("content"))
    return names or None


# -- caches and context --------------------------------------------------------------------------------


def _rollback(drafter: ModelRef) -> Iterator[Finding]:
    """Whether its layers can go back, as far as config.json shows it; the loader has the last word."""
    from .plugins import get_manager

    if get_manager().registry.target_owner(drafter.model_type) is not None:
        return  # that plugin brings states that can
    found = fixed_state(drafter.config)
    if found:
        expected = "attention in every layer, whose K/V can be rolled back"
        yield Finding("P23", "error", f"state of {_subject(drafter)}", found, expected, COMPLETE)


def fixed_state(config: Mapping[str, object]) -> str:
    """Which layers keep a state of fixed size, in words; "" when config.json shows none."""
    model_type = config.get("model_type")
    if model_type not in RECURRENT:
        return ""
    text = config.get("text_config")
    kinds = (text if isinstance(text, Mapping) else config).get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return f"model_type {model_type!r}, whose layers keep a state of fixed size"
    fixed = sorted({str(kind) for kind in kinds} - ATTENTION)  # some of these types also come without any
    return f"layers of type {', '.join(fixed)} (model_type {model_type!r})" if fixed else ""


def _size(target: ModelRef, drafter: ModelRef) -> Iterator[Finding]:
    """A drafter whose steps cost what the target's do; one with experts reads few of its weights."""
    from .checkpoint import tensor_index
    from .memory import size

    if any(_positive(drafter.config, key) for key in EXPERTS):
        return
    try:
        mine, theirs = (sum(info.nbytes for info in tensor_index(ref.path).values()) for ref in (drafter, target))
    except SpecError:  # loading names the fault
        return
    if mine >= LARGE_SHARE * theirs:
        yield Finding(
            "P28",
            "warning",
            f"size of {_subject(drafter)}",
            f"{size(mine)} of weights, target {target.name} has {size(theirs)}",
            "a fraction of it, since a draft takes about as long as its weights take to read",
            "Use a smaller one, or prompt-lookup: even where every draft of this one is accepted, replies are hardly "
            "faster than plain ones, so most are decoded plainly (parked)",
        )


def _context(target: ModelRef, drafter: ModelRef) -> Iterator[Finding]:
    from .generic_target import declared_context

    mine, theirs = declared_context(drafter.config), declared_context(target.config)
    if mine is not None and theirs is not None and mine < theirs:
        yield Finding(
            "P26",
            "note",
            f"context of {_subject(drafter)}",
            f"{mine} positions, target {target.name} has {theirs}",
            f"{theirs} to draft in long replies too",
            f"Past {mine} positions the reply is decoded plainly",
        )

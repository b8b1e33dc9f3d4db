"""What a head takes in, found out per checkpoint: which hidden state, which half comes first.

No tensor shows it, and the wrong choice looks like a head that is merely bad. In this order: the user's options, what
the checkpoint states, what is measured, the usual. Measured means: over a piece of text the target's states are fed to
the head in every way that is left open, and its guesses are compared with what the target itself says next. The usual
way stays unless another one is clearly better, so a head that nobody trained keeps it too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import mlx.core as mx

from mlx_spec.checkpoint import fingerprint
from mlx_spec.diskcache import read_entry, write_entry
from mlx_spec.errors import SpecError
from mlx_spec.state import KVState
from mlx_spec.tokenizer import load_tokenizer

from .mtp_head import Concat, Hidden, MtpHead, Reading

if TYPE_CHECKING:
    from mlx_spec.types import ModelRef

    from .target import Qwen35Target

log = logging.getLogger("mlx_spec.load")

USUAL = Reading()
OPTIONS = {"hidden": "mtp_hidden", "concat": "mtp_concat"}
STATED = "mtplx_runtime.json"
"""A file that some checkpoints carry; its `mtp_contract` may name the state the head was trained with."""
AREA = "readings"
POSITIONS = 96
SKIPPED = 8
"""First positions that are not compared: too little is known there to guess from."""
BETTER_BY, BETTER_TIMES = 0.15, 1.5
"""How much more often another way must be right than the usual one, as a share of guesses and as a factor."""
TEXT = (
    "The library was founded in the spring of 1887, when the town council decided that the old market hall should "
    "hold books instead of cattle. In the first year it lent out 312 volumes; by the tenth, more than 9,000. People "
    "came from the villages around, on foot or by cart, and stayed until the lamps were put out. def mean(values): "
    "return sum(values) / len(values)"
)


def find_reading(
    ref: ModelRef, options: Mapping[str, object], head: MtpHead, target: Qwen35Target
) -> tuple[Reading, dict[str, str]]:
    """What the head in `ref` takes in, and per item what decided."""
    given, reasons = dict[str, Any](), dict[str, str]()
    for item, option in OPTIONS.items():
        if option in options:
            given[item], reasons[item] = options[option], f"the option {option}"
    stated = stated_hidden(ref)
    if stated is not None and "hidden" not in given:
        given["hidden"], reasons["hidden"] = stated, f"{STATED} says so"
    open_ways = [
        Reading(hidden, concat)
        for hidden, concat in itertools.product(get_args(Hidden), get_args(Concat))
        if given.get("hidden", hidden) == hidden and given.get("concat", concat) == concat
    ]
    rates = _rates(ref, open_ways, head, target) if len(open_ways) > 1 else {}
    chosen = choose(open_ways, rates)
    for item in OPTIONS:
        if item not in reasons:
            reasons[item] = f"measured: {_shown(rates)} of guesses right" if rates else "the usual one, not measured"
    return chosen, {item: f"{getattr(chosen, item)} ({reasons[item]})" for item in OPTIONS}


def choose(ways: Sequence[Reading], rates: Mapping[Reading, float]) -> Reading:
    """The usual way where it is open, unless another one is right clearly more often."""
    usual = USUAL if USUAL in ways else ways[0]
    best = max(ways, key=lambda way: (rates.get(way, 0.0), way == usual))
    gain = rates.get(best, 0.0) - rates.get(usual, 0.0)
    clear = gain > BETTER_BY and rates.get(best, 0.0) > BETTER_TIMES * rates.get(usual, 0.0)
    return best if clear else usual


def stated_hidden(ref: ModelRef) -> Hidden | None:
    """The hidden state a checkpoint names for its head; None when it names none."""
    file = ref.path / STATED
    try:
        contract = json.loads(file.read_text(encoding="utf-8"))["mtp_contract"]
        variant = contract["base_hidden_variant"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a foreign file: what cannot be read in it states nothing
    known: dict[str, Hidden] = {"post_norm": "post", "pre_norm": "pre"}
    return known.get(variant) if isinstance(variant, str) else None


def _shown(rates: Mapping[Reading, float]) -> str:
    return ", ".join(f"{way.hidden} {way.concat} {rate:.0%}" for way, rate in rates.items())


# -- measuring -----------------------------------------------------------------------------------------


def _rates(ref: ModelRef, ways: Sequence[Reading], head: MtpHead, target: Qwen35Target) -> dict[Reading, float]:
    """Share of right guesses per way, remembered between runs; {} for a target without a tokenizer."""
    parts = (fingerprint(ref.path), fingerprint(target.ref.path), str(target.dtype), TEXT)
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    names = {f"{way.hidden} {way.concat}": way for way in ways}
    known = read_entry(AREA, key) or {}
    if all(isinstance(known.get(name), float) for name in names):
        return {way: known[name] for name, way in names.items()}
    tokens = _sample(target)
    if len(tokens) <= 2 * SKIPPED:
        return {}
    try:
        rates = measure(head, target, tokens, ways)
    except RuntimeError as error:  # kernels take the head's layers later: mlx alone may have no operation for them
        log.warning("how the head is fed was not measured, the usual way is taken: %s", error)
        return {}
    write_entry(AREA, key, {**known, **{name: rates[way] for name, way in names.items()}})
    return rates


def _sample(target: Qwen35Target) -> list[int]:
    """Ids of the text, [] without a usable tokenizer (loading the pair says what is wrong with it)."""
    try:
        tokenizer = load_tokenizer(target.ref.path)
        return [] if tokenizer is None else tokenizer.encode(TEXT)[:POSITIONS]
    except SpecError:  # loading the pair names the fault; here it only means that nothing can be measured
        return []


def measure(
    head: MtpHead, target: Qwen35Target, tokens: Sequence[int], ways: Sequence[Reading]
) -> dict[Reading, float]:
    """Share of positions at which the head guesses what the target says next, per way of feeding it."""
    ids = mx.array([list(tokens)], dtype=mx.int32)
    last = f"residual.{target.text.num_hidden_layers - 1}"
    taps = target.prefill(ids, target.make_states(), ("hidden", last))
    says = mx.argmax(target.head(taps["hidden"]), axis=-1)
    embedded = target.embed(ids[:, 1:])
    rates = {}
    for way in ways:
        hidden = taps["hidden" if way.hidden == "post" else last][:, :-1]
        seen, _ = head(embedded, hidden, [KVState() for _ in head.layers], way)
        right = mx.argmax(target.head(seen), axis=-1) == says[:, 1:]
        rates[way] = float(right[:, SKIPPED:].astype(mx.float32).mean().item())
    return rates

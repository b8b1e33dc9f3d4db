"""What taking back a Qwen block costs beside verifying it, and how much its tape holds. Goal: < 0.2%.

    python bench/qwen35_rewind.py [--layers 16] [--runs 9] [--save]

Random 4-bit weights at the layer sizes of a 9B model (hidden 4096, 16 key and 32 value heads of 128), a few
layers of it: both sides of the ratio grow with their number, but for the first touch of code and data that have
left the caches meanwhile. Verify is the forward of L rows with its logits, its graph built and run, round after
round on one state. Taking back is three things: the rewind itself and the arrays it leaves to the device; the
commit (a mark); and what the next forward pays for the kept rows, which are owed until then. The last is the
difference between a layer that resumes from a tape, its window cut out of what the last block saw, and one whose
state is there and which leaves no tape. It
is measured over as many states as a whole model has, so that they are not in the caches, both sides writing in
place, and counted for the layers measured here. Medians (of differences of neighbours for the last), for every
number of rows kept; `share` is all three over verify. `mean_share` weighs numbers of rows by acceptance: each draft
is kept with its chance in ACCEPTANCE if the one before was. `copy` is what a copy of all recurrent states would cost
instead, once per round, before anything is taken back.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from common import finish, parser, scratch

from mlx_spec.gated_delta import GatedDelta, Owed
from mlx_spec.kernels import use_kernels
from mlx_spec.state import DeltaState, StateGroup
from mlx_spec.types import ModelRef

GOAL = 0.002
WIDTHS = (2, 4, 8)
CONTEXT = 64
STATES = 24  # gated-delta layers of the whole model: 48 MB of states
ACCEPTANCE = (0.75, 0.85, 0.75)  # by position; the last also for those after it
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
    "eos_token_id": 1,
}


def main() -> int:
    """Measure every width and number of rows kept; exit 1 when one of them misses the goal."""
    arguments = parser(__doc__, "qwen35_rewind", tokens=CONTEXT, runs=9)
    arguments.add_argument("--layers", type=int, default=16, help="layers, every fourth of full attention")
    options = arguments.parse_args()
    target = random_target(options.layers)
    figures: dict[str, Any] = {"layers": options.layers, "kernels": use_kernels(target.model).line()}
    mx.eval(target.model.parameters())
    states = target.make_states()
    target.prefill(mx.array([[i % 997 for i in range(options.tokens)]]), states)
    states.mark()
    mx.eval(states.arrays())
    figures["recurrent_state_bytes"] = sum(s.nbytes for s in recurrent(states))
    figures["widths"] = [width(target, states, L, options.runs) for L in WIDTHS]
    figures["acceptance"] = ACCEPTANCE
    figures["worst_share"] = max(kept["share"] for row in figures["widths"] for kept in row["keep"])
    show(figures)
    finish("qwen35_rewind", options, figures)
    return 0 if figures["worst_share"] < GOAL else 1


def random_target(layers: int) -> Any:
    """A target whose matrices are random 4-bit codes, of the size of what a row may be."""
    from mlx_spec_qwen35.target import Qwen35Target, target_config
    from mlx_spec_qwen35.weights import target_classes

    config = {**CONFIG, "num_hidden_layers": layers}
    folder = scratch()
    (folder / "config.json").write_text(json.dumps(config))
    model_class, arguments = target_classes(target_config(config, folder))(config)
    mx.random.seed(7)
    model = model_class(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16, lambda dtype: dtype == mx.float32)
    model.apply_to_modules(_quantise)
    return Qwen35Target(ModelRef(str(folder), folder, config), config, model)


def _quantise(name: str, module: nn.Module) -> None:
    """Put a random quantised matrix in the place of every wide linear layer of `module`."""
    for key, child in module.children().items():
        if isinstance(child, nn.Linear) and child.weight.shape[0] >= 64:
            rows, width = child.weight.shape
            made = nn.QuantizedLinear(64, 64, bias=False, group_size=64, bits=4)
            made.weight = mx.random.randint(0, 1 << 32, (rows, width // 8), dtype=mx.uint32)
            step = 0.25 * width**-0.5
            made.scales = mx.full((rows, width // 64), step, dtype=mx.bfloat16)
            made.biases = mx.full((rows, width // 64), -7.5 * step, dtype=mx.bfloat16)
            setattr(module, key, made)


def width(target: Any, states: StateGroup, L: int, runs: int) -> dict[str, Any]:
    """Times of rounds of L rows for every number of rows kept, one after the other on one state."""
    block = mx.arange(3, 3 + L)[None]
    spent: dict[str, list[float]] = {"verify": [], "commit": [], "copy": []}
    back: dict[int, list[float]] = {keep: [] for keep in range(1, L + 1)}
    held = states.select([0])
    mark, tape = held.mark(), 0
    for turn in range(-1, runs):
        for keep, rewinds in back.items():
            verify = timed(lambda: mx.eval(target.forward(block, held).logits, held.arrays()))
            tape = sum(s.tape_nbytes for s in recurrent(held))
            there = {id(array) for array in held.arrays()}
            rewind = timed(lambda mark=mark, keep=keep: held.rewind(mark, [keep]))
            left = [array for array in held.arrays() if id(array) not in there]
            rewind += timed(lambda left=left: mx.eval(left))
            del left
            started = time.perf_counter()
            mark = held.mark()
            commit = time.perf_counter() - started
            if turn >= 0:
                spent["verify"].append(verify)
                spent["commit"].append(commit)
                rewinds.append(rewind)
        copied = timed(lambda: mx.eval([s.recurrent(()) + 0.0 for s in recurrent(states)]))
        spent["copy"].extend([copied] if turn >= 0 else [])
    medians = {name: statistics.median(values) for name, values in spent.items()}
    rule = target.model.language_model.model.layers[0].linear_attn.gated_delta
    keeps = []
    for keep, rewinds in back.items():
        rewind, later = statistics.median(rewinds), len(recurrent(states)) * owed_s(rule, L, keep, 4 * runs)
        parts = {"rewind_us": 1e6 * rewind, "owed_us": 1e6 * later}
        share = (rewind + medians["commit"] + max(0.0, later)) / medians["verify"]
        keeps.append({"rows": keep, **parts, "share": share})
    return {
        "L": L,
        "verify_ms": 1e3 * medians["verify"],
        "commit_us": 1e6 * medians["commit"],
        "copy_us": 1e6 * medians["copy"],
        "tape_bytes": tape,
        "keep": keeps,
        "mean_share": sum(chance * kept["share"] for chance, kept in zip(chances(L), keeps, strict=True)),
    }


def chances(L: int) -> list[float]:
    """How likely 1 to L rows of a block are kept."""
    out, reached = [], 1.0
    for draft in range(L - 1):
        kept = ACCEPTANCE[min(draft, len(ACCEPTANCE) - 1)]
        out.append(reached * (1 - kept))
        reached *= kept
    return [*out, reached]


def owed_s(rule: GatedDelta, L: int, keep: int, runs: int) -> float:
    """Seconds a layer's next block of L rows takes longer when `keep` rows of the last one are owed to it."""
    Hk, Hv = CONFIG["linear_num_key_heads"], CONFIG["linear_num_value_heads"]
    Dk, Dv, taps = CONFIG["linear_key_head_dim"], CONFIG["linear_value_head_dim"], CONFIG["linear_conv_kernel_dim"] - 1
    q, k = (0.09 * mx.random.normal((1, L, Hk, Dk)).astype(mx.bfloat16) for _ in range(2))
    v = mx.random.normal((1, L, Hv, Dv)).astype(mx.bfloat16)
    g, beta = mx.random.uniform(0.8, 1.0, (1, L, Hv)), mx.random.uniform(0.0, 1.0, (1, L, Hv)).astype(mx.bfloat16)
    states = [mx.random.normal((1, Hv, Dv, Dk)) for _ in range(STATES)]
    joined = mx.random.normal((1, taps + L, 2 * Hk * Dk + Hv * Dv)).astype(mx.bfloat16)
    window, rows, kept = mx.contiguous(joined[:, :taps]), mx.contiguous(joined[:, taps:]), mx.array([keep])
    delta = rule(q, k, v, g, beta, states[0])[2]
    mx.eval(q, k, v, g, beta, states, delta, window, rows)

    def step(owed: bool) -> float:
        """One block of all layers, from the building of its graph on."""
        started = time.perf_counter()
        made = []
        for i in range(STATES):
            state, states[i] = states[i], None  # nobody else has it: it may be written in place
            before = joined[:, keep : keep + taps] if owed else window
            if owed and rule.resumes:
                y, state, added = rule.resume(Owed(state, k, g, delta, kept), q, k, v, g, beta)
            elif owed and keep < L:  # else the state after the last step is there
                y, state, added = rule(q, k, v, g, beta, rule.replay(state, k, g, delta, kept))
            else:
                y, state, added = rule(q, k, v, g, beta, state)
            states[i] = state
            made += [y, added, mx.concatenate([before, rows], axis=1)]
        del state
        mx.eval(states, made)
        return time.perf_counter() - started

    step(False), step(True)
    return statistics.median([step(True) - step(False) for _ in range(runs)]) / STATES


def recurrent(states: StateGroup) -> list[DeltaState]:
    """The states of the gated-delta layers."""
    return [state for state in states if isinstance(state, DeltaState)]


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def show(figures: dict[str, Any]) -> None:
    """A line per width."""
    print(f"{figures['layers']} layers, kernels {figures['kernels']}", file=sys.stderr)
    for row in figures["widths"]:
        shares = ", ".join(
            f"{k['rows']}: {k['rewind_us']:.0f} + {k['owed_us']:.0f} us ({100 * k['share']:.2f}%)" for k in row["keep"]
        )
        print(
            f"L={row['L']}: verify {row['verify_ms']:.2f} ms, tape {row['tape_bytes'] / 1024:.1f} KiB, commit "
            f"{row['commit_us']:.0f} us, copying states {row['copy_us']:.0f} us; rewind + owed by rows kept {shares}; "
            f"mean {100 * row['mean_share']:.2f}%",
            file=sys.stderr,
        )
    verdict = "met" if figures["worst_share"] < GOAL else "MISSED"
    print(f"worst {100 * figures['worst_share']:.2f}% of verify; goal {100 * GOAL}% {verdict}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

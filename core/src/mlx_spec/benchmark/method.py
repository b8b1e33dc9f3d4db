"""Run the arms of a benchmark in turns and keep every number; nothing here prints.

One trial is one prompt, decoded once per arm, one arm right after the other. Every trial of a workload has
a prompt of its own as long as there are any, and trials go round the workloads, so that a slow minute of
the machine does not fall on one of them. A run that did not take the path its arm stands for is void.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .statistics import settled
from .workloads import Workload

if TYPE_CHECKING:
    from ..pair import Pair
    from ..request import Request, Result
    from ..sampling import Sampling

WARM_TOKENS = 48  # per warm-up run
WARM_TURNS = (2, 5)  # fewest and most turns of all arms before timing


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode the same reply.

    Attributes:
        block_size: a narrower L than the pair's, anchor counted.
        may_idle: a run in which the drafter proposed nothing counts too: it is what this arm does on that text.
    """

    name: str
    about: str
    speculative: bool
    adaptive: bool = True
    block_size: int | None = None
    may_idle: bool = False


ARMS = {
    "plain": Arm("plain", "one token per step, no drafts", speculative=False),
    "spec": Arm("spec", "drafts, as many as the governor finds worth while", speculative=True),
    "fixed": Arm("fixed", "drafts, always the full width", speculative=True, adaptive=False),
}


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What is fixed before anything is timed.

    Attributes:
        arms: in the order they take turns; the first one is what others are compared with.
        pairs: trials per workload.
        max_tokens: length of every reply; end ids do not end it.
        sampling: of trial 0; trial i uses seed + i.
        template: put prompts into the chat template, where the tokenizer has one.
    """

    arms: tuple[Arm, ...]
    workloads: tuple[Workload, ...]
    pairs: int
    max_tokens: int
    sampling: Sampling
    template: bool = True

    @property
    def runs(self) -> int:
        """Timed runs in all."""
        return len(self.arms) * len(self.workloads) * self.pairs


@dataclass(frozen=True, slots=True)
class Trial:
    """One prompt of one workload, encoded."""

    workload: str
    number: int  # from 1
    prompt: int  # from 1, within the workload
    repeated: bool
    ids: list[int]


@dataclass(slots=True)
class Run:
    """One timed reply.

    Attributes:
        first_token_s: from submitting to the first token: prefill and the first step or round.
        decode_per_second: tokens over the time since the prompt was in, as the engine's timings count: the first event
            comes when the second round is under way, and often with the tokens of a whole one.
        total_s: from submitting to the last token.
        peak_memory, active_memory: bytes, as mlx counts them, peak since the run began.
        path: what the engine says it did.
        void: why this run does not count, "" when it does.
    """

    workload: str
    trial: int
    arm: str
    first_token_s: float
    decode_per_second: float
    total_s: float
    peak_memory: int
    active_memory: int
    ids: list[int]
    path: dict[str, Any]
    void: str = ""


@dataclass(slots=True)
class WarmUp:
    """How often the arms ran before timing, how fast, and whether the first arm had settled by then."""

    turns: int = 0
    decode_per_second: dict[str, list[float]] = field(default_factory=dict)
    settled: bool = False


def prepare(pair: Pair, plan: BenchPlan) -> list[Trial]:
    """Encode every prompt of every trial; UsageError when one does not fit with its reply."""
    trials = []
    for number in range(plan.pairs):
        for workload in plan.workloads:
            index, repeated = workload.choose(number)
            ids = encode(pair, workload.measured[index], plan)
            trials.append(Trial(workload.name, number + 1, index + 1, repeated, ids))
    return trials


def encode(pair: Pair, text: str, plan: BenchPlan) -> list[int]:
    """Token ids of one prompt, checked against the context."""
    if pair.tokenizer is None:
        raise _no_tokenizer()
    ids = pair.tokenizer.prompt(text, template=plan.template).ids
    room = pair.target.context - len(ids)
    if room < plan.max_tokens:
        raise UsageError(
            "-n",
            found=f"{plan.max_tokens} tokens after a prompt of {len(ids)}",
            expected=f"at most {max(0, room)} (context {pair.target.context})",
            next_step="Ask for fewer tokens",
            code="U82",
        )
    return ids


def need_tokenizer(target: str) -> None:
    """UsageError for a model without a tokenizer, from its files."""
    from ..loading import open_ref
    from ..tokenizer import lacking

    if lacking(open_ref(target).path):
        raise _no_tokenizer()


def _no_tokenizer() -> UsageError:
    return UsageError(
        "bench",
        found="a target without a tokenizer",
        expected="one, since the workloads are texts",
        next_step="Add tokenizer.json to the target's directory",
        code="U81",
    )


def warm_up(pair: Pair, plan: BenchPlan, tick: Callable[[str], None]) -> WarmUp:
    """Turns of all arms on a prompt that is not timed, until the first arm's speed stays the same."""
    done = WarmUp(decode_per_second={arm.name: [] for arm in plan.arms})
    tokens = min(plan.max_tokens, WARM_TOKENS)
    fewest, most = WARM_TURNS
    while done.turns < fewest or (done.turns < most and not done.settled):
        workload = plan.workloads[done.turns % len(plan.workloads)]
        ids = encode(pair, workload.warm_up, plan)
        for arm in plan.arms:
            tick(f"warm-up {done.turns + 1}: {arm.name}")
            run = run_once(pair, Trial(workload.name, 0, 0, False, ids), arm, plan.sampling, tokens)
            done.decode_per_second[arm.name].append(run.decode_per_second)
        done.turns += 1
        done.settled = settled(done.decode_per_second[plan.arms[0].name])
    return done


def measure(pair: Pair, plan: BenchPlan, trials: Sequence[Trial], tick: Callable[[str], None]) -> list[Run]:
    """Every arm on every trial, in turns."""
    runs = []
    for trial in trials:
        sampling = at_trial(plan.sampling, trial.number)
        for arm in plan.arms:
            tick(f"{trial.workload} {trial.number}/{plan.pairs}: {arm.name}")
            runs.append(run_once(pair, trial, arm, sampling, plan.max_tokens))
    return runs


def at_trial(sampling: Sampling, number: int) -> Sampling:
    """Sampling of trial `number` (from 1): every trial has its own seed, the same one for all arms."""
    return sampling if sampling.seed is None else sampling.replace(seed=sampling.seed + number - 1)


def run_once(pair: Pair, trial: Trial, arm: Arm, sampling: Sampling, tokens: int) -> Run:
    """One reply of `tokens` tokens, from a clean allocator, with its own clocks."""
    import mlx.core as mx

    from ..engine import Engine

    request = request_of(trial, arm, sampling, tokens)
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    times: list[float] = []
    started = time.perf_counter()
    handle = Engine(pair, max_rows=1).submit(request)
    for event in handle:
        if event.token_ids:
            times.append(time.perf_counter())
    result = handle.result()
    return Run(
        workload=trial.workload,
        trial=trial.number,
        arm=arm.name,
        first_token_s=times[0] - started if times else 0.0,
        decode_per_second=result.timings.predicted_per_second,
        total_s=times[-1] - started if times else 0.0,
        peak_memory=mx.get_peak_memory(),
        active_memory=mx.get_active_memory(),
        ids=result.token_ids,
        path=describe_path(result),
        void=void_reason(arm, result, tokens),
    )


def request_of(trial: Trial, arm: Arm, sampling: Sampling, tokens: int) -> Request:
    """The request an arm makes of a trial: `tokens` tokens, whatever ends the model picks."""
    from ..request import Request

    return Request(
        trial.ids,
        sampling,
        tokens,
        ignore_eos=True,
        adaptive=arm.adaptive,
        speculative=arm.speculative,
        block_size=arm.block_size,
    )


def describe_path(result: Result) -> dict[str, Any]:
    """What the engine reports of the path a reply took."""
    timings, spec = result.timings, result.speculation
    return {
        "active": spec.active,
        "method": spec.method,
        "law": spec.law,
        "draft_rounds": timings.draft_rounds,
        "plain_steps": timings.plain_steps,
        "proposed_by_position": list(spec.proposed_by_position),
        "accepted_by_position": list(spec.accepted_by_position),
        "tokens_per_forward": spec.tokens_per_round,
        "governor": spec.governor,
        "fallbacks": list(spec.fallbacks),
    }


def void_reason(arm: Arm, result: Result, tokens: int) -> str:
    """Why a run says nothing about its arm; "" when it took the arm's path to the end."""
    timings, spec = result.timings, result.speculation
    if result.finish_reason == "error":
        return f"the reply ended in an error: {result.error}"
    if len(result.token_ids) != tokens:
        return f"the reply has {len(result.token_ids)} tokens, {tokens} were asked for"
    if not arm.speculative:
        return f"{timings.draft_rounds} rounds drafted in a plain run" if timings.draft_rounds else ""
    if not spec.active:
        return f"speculation was off: {spec.reason}"
    if not timings.draft_rounds and not arm.may_idle:
        return f"0 of {timings.plain_steps} forwards drafted, expected at least 1 ({spec.governor or spec.method})"
    return ""

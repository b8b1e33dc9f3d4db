"""One target on the test bench: plain replies, pairs with any drafter, watched engines."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ..accept import RowPlan
from ..drawing import Drawer
from ..engine import Engine
from ..errors import SpecError
from ..membership import single_lane
from ..pair import Pair, Plan
from ..prefill import Prefill
from ..request import Request, Result
from ..rows import new_row
from ..sampling import Sampling
from ..types import Verification
from .watch import Proposal, Steer, Watch

if TYPE_CHECKING:
    from ..lane import Lane
    from ..models import Drafter, Target
    from ..state import StateGroup

GREEDY = Sampling()
LENGTHS = (1, 2, 5, 12)  # prompt tokens; past-the-window lengths come on top
KV_GROUP = 32  # the smallest group MLX quantises K/V by
CHUNK = 2048
FEW, TEXTS = 3, 257  # ids of a babbling target's replies, and how many laws it has for the next of them


@dataclass(slots=True)
class Run:
    """Replies of one engine and every propose that led to them."""

    results: list[Result]
    proposals: list[Proposal]

    @property
    def tokens(self) -> list[list[int]]:
        """Reply ids per request."""
        return [r.token_ids for r in self.results]


@dataclass(slots=True)
class Setup:
    """How a pair is run: block size L, K/V mode, prefill partition, rows per lane."""

    block_size: int = 4
    kv_bits: int | None = None
    prefill_step: int = CHUNK
    max_rows: int = 1
    adaptive: bool = False


@dataclass(slots=True, eq=False)
class Rig:
    """A loaded target and, when there is one, the drafter under test.

    Attributes:
        windows: sizes of the target's sliding windows, smallest first.
        ids: token ids a prompt may hold (placeholders for other media are left out).
    """

    target: Target
    drafter: Drafter | None = None
    windows: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    _plain: dict[Any, list[int]] = field(default_factory=dict)
    _babbling: dict[int, Rig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        states = self.target.make_states()
        self.windows = tuple(sorted({w for s in states if isinstance(w := getattr(s, "window", None), int)}))
        self.ids = [i for i in range(min(self.target.vocab_size, 4096)) if self._allowed(i)]

    def _allowed(self, token: int) -> bool:
        """Whether a prompt may hold it: refusing is what check_prompt is for."""
        try:
            self.target.check_prompt([token])
        except SpecError:  # the refusal that is asked about
            return False
        return True

    # -- prompts -----------------------------------------------------------------------------------------

    def prompt(self, length: int, seed: int) -> list[int]:
        """`length` seeded ids."""
        rng = random.Random(f"{seed}/{length}")
        return [rng.choice(self.ids) for _ in range(length)]

    def prompts(self, seed: int, windowed: bool = True) -> list[list[int]]:
        """Short prompts, one that repeats itself and, for windowed targets, ones around and past the window."""
        lengths = [*LENGTHS]
        if windowed and self.windows:
            w = self.windows[0]
            lengths += [n for n in (w - 1, w, w + 1, 2 * w + 5) if n >= 2]
        out = [self.prompt(n, seed) for n in dict.fromkeys(lengths)]
        return [*out, self.prompt(6, seed + 1) * 3]

    # -- pairs and runs ----------------------------------------------------------------------------------

    def pair(self, drafter: Drafter | None, setup: Setup) -> Pair:
        """A pair without probe and without files of its own."""
        from ..costs import load_costs

        plan = Plan(
            requested=drafter.kind if drafter else "none",
            active=drafter is not None,
            block_size=setup.block_size,
            block_size_from="kit",
            reason="conformance kit",
            kv_bits=setup.kv_bits,
            kv_group_size=KV_GROUP,
            prefill_step=setup.prefill_step,
        )
        pair = Pair(self.target, drafter, None, plan, self.target.ref)
        pair.owner, pair.drafter_owner = target_owner(self.target), drafter_owner(drafter)
        pair.costs = load_costs("")
        return pair

    def run(
        self,
        drafter: Drafter | None,
        prompts: Sequence[Sequence[int]],
        count: int | Sequence[int],
        setup: Setup | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        steer: Steer | None = None,
        guard: bool = False,
    ) -> Run:
        """Replies of `count` tokens to all prompts, all submitted at once."""
        setup = setup or Setup()
        counts = [count] * len(prompts) if isinstance(count, int) else list(count)
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        engine = Engine(self.pair(drafter, setup), max_rows=setup.max_rows)
        watch = Watch(engine, steer, guard)
        requests = [
            Request(list(p), s, n, ignore_eos=True, adaptive=setup.adaptive)
            for p, s, n in zip(prompts, settings, counts, strict=True)
        ]
        handles = [engine.submit(request) for request in requests]
        engine.run()
        return Run([h.result() for h in handles], watch.proposals)

    def plain(
        self, prompt: Sequence[int], count: int, sampling: Sampling = GREEDY, setup: Setup | None = None
    ) -> list[int]:
        """What the target alone replies, remembered."""
        setup = setup or Setup()
        kv, step = setup.kv_bits, setup.prefill_step
        key = (tuple(prompt), count, sampling, kv, step)
        if key not in self._plain:
            alone = Setup(kv_bits=kv, prefill_step=step)
            self._plain[key] = self.run(None, [prompt], count, alone, sampling).tokens[0]
        return self._plain[key]

    def babbling(self, seed: int) -> Rig:
        """The same bench with a target whose replies are random text over a few ids.

        A tiny random model hardly ever repeats itself; here the same few tokens in a row come back all the time,
        followed by this and by that, so that a drafter that looks things up drafts, rightly and wrongly.
        """
        known = self._babbling.get(seed)
        if known is None:
            known = self._babbling[seed] = Rig(_Babbling(self.target, self.few(seed), seed), self.drafter)  # type: ignore[arg-type]
        return known

    def few(self, seed: int) -> list[int]:
        """The ids of a babbling target's replies."""
        return random.Random(seed).sample(self.ids, min(FEW, len(self.ids)))

    def babble(self, length: int, seed: int, salt: int = 0) -> list[int]:
        """`length` of those ids: a prompt for that target."""
        rng = random.Random(f"{seed}/{length}/{salt}")
        few = self.few(seed)
        return [rng.choice(few) for _ in range(length)]

    def table(self, prompts: Iterable[Sequence[int]], count: int, **options: Any) -> dict[tuple[int, ...], list[int]]:
        """Prompt -> plain reply, as the scripted drafters want it."""
        return {tuple(p): self.plain(p, count, **options) for p in prompts}

    # -- lanes without an engine -------------------------------------------------------------------------

    def fresh_lane(self, drafter: Drafter, tokens: Sequence[int], setup: Setup, spoil: bool = False) -> Lane:
        """A lane of one row, as a new request with these tokens as its prompt would join one.

        With `spoil` every tap the drafter is given is negated: what it drafts shows whether it reads them.
        """
        pair = self.pair(drafter, setup)
        if spoil:
            pair.target = _Spoilt(self.target)  # type: ignore[assignment]
        row = new_row(pair, Request(list(tokens), GREEDY, 8, ignore_eos=True, adaptive=False))
        work = Prefill(pair, row)
        while not work.chunk():
            pass
        return single_lane(pair, work)

    def greedy_draw(self, lane: Lane) -> Drawer:
        """The `draw` of a greedy round of this lane."""
        return Drawer([RowPlan(GREEDY, 0, n + 1) for n in lane.lengths], self.target.vocab_size)


class _Wrapped:
    """A target, for what a subclass does not change."""

    def __init__(self, target: Target):
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _Babbling(_Wrapped):
    """Says random text over `ids`: the logits of a row depend on its token and position alone."""

    def __init__(self, target: Target, ids: Sequence[int], seed: int):
        super().__init__(target)
        likely = mx.random.normal((TEXTS, len(ids)), key=mx.random.key(seed)) * 1.5
        self._table = mx.full((TEXTS, target.vocab_size), -30.0)
        self._table[:, mx.array(list(ids))] = likely

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """The target's forward, for its state and taps, with other logits."""
        positions = mx.array(states.lengths)[:, None] + mx.arange(tokens.shape[1])
        seen = self._target.forward(tokens, states, taps)
        return Verification(self._table[(positions + 31 * tokens) % TEXTS].astype(seen.logits.dtype), seen.taps)


class _Spoilt(_Wrapped):
    """A target whose taps are not its own."""

    def forward(self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = ()) -> Verification:
        """The target's forward with every tap negated."""
        seen = self._target.forward(tokens, states, taps)
        return Verification(seen.logits, {name: -value for name, value in seen.taps.items()})

    def prefill(
        self, tokens: mx.array, states: StateGroup, taps: Sequence[str] = (), last: bool = False
    ) -> dict[str, mx.array]:
        """The target's prefill, likewise."""
        return {name: -value for name, value in self._target.prefill(tokens, states, taps, last).items()}


@lru_cache(maxsize=16)
def rig_for(target: Target, drafter: Drafter | None = None) -> Rig:
    """The rig of these two objects, kept so that plain replies are computed once per target."""
    rig = Rig(target, drafter)
    if drafter is not None:
        rig._plain = rig_for(target)._plain
    return rig


def right_for(replies: dict[tuple[int, ...], list[int]], right: int, vocab_size: int) -> Steer:
    """Steer every draft to be right for `right` tokens and wrong after them; `replies` as in `oracle`."""

    def steer(tokens: Sequence[int], step: int) -> int:
        for prompt, reply in replies.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                at = len(tokens) - len(prompt) + step
                token = reply[at] if at < len(reply) else 0
                return token if step < right else (token + 1) % vocab_size
        return 0

    return steer


def target_owner(target: Target) -> str:
    """Plugin whose hooks run this target's rounds."""
    from ..plugins import get_manager
    from ..registry import CORE

    return get_manager().registry.target_owner(target.model_type) or CORE


def drafter_owner(drafter: Drafter | None) -> str:
    """Plugin whose hooks run this drafter's proposes; core for one that no installed plugin serves."""
    from ..plugins import get_manager
    from ..registry import CORE

    if drafter is None:
        return CORE
    registry = get_manager().registry
    found = registry.drafter_for(drafter.ref) if drafter.ref is not None else None
    if found is not None and found[1].kind == drafter.kind:
        return found[0]
    return registry.kind_owner(drafter.kind) or CORE

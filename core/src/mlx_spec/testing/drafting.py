"""What the drafter contract asks of runs: well-formed drafts, fresh proposals, sampled replies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from ..laws import fit_width
from ..rounds import bind_hooks
from ..sampling import Sampling
from ..shaping import shape_logprobs
from .compare import same_reply
from .faults import broken, require
from .rig import Rig, Run, Setup
from .statistics import Draws
from .traces import by_question, drafted, parting, shown
from .watch import Proposal, Steer, same_bytes, watched_propose

if TYPE_CHECKING:
    from ..lane import DrawFn
    from ..models import Drafter

SAMPLED = Sampling(temperature=0.7, acceptance="rejection")
CONFIDENT = SAMPLED.replace(temperature=0.2)  # its best token has most of the mass
REQUESTS, REPLY = 36, 18  # sampled requests and their length: 648 tokens of the target, about as many drafted
BACK = "prime, propose and rollback: they must count committed positions alike (the anchor is not one of them)"
ROWS = "propose: row b has its own lane.tokens[b], lengths, positions, masks and state; DraftState.merge and select"
STATE = "DraftState: everything a request owns lives there, never on the drafter object"
LAWS = "propose: what lane.draw returns, stacked over steps, goes into Draft.probs, each step at its own index"
RAISED = "propose at that line, and what prime and rollback left for it"
FORM = "the Draft that propose returns: tokens (B, K) int32, counts of 0..budget[b] per row, probs (B, K, V) or None"


def the(rig: Rig) -> Drafter:
    """The drafter on the bench."""
    if rig.drafter is None:
        raise RuntimeError("this rig has no drafter")
    return rig.drafter


def well_formed(rig: Rig, run: Run) -> None:
    """Every propose of a run returned a proper draft, and the engine had no complaint."""
    for seen in run.proposals:
        when = f"propose of {type(the(rig)).__name__} after {shown(seen.histories[0])}, budget {seen.budget}"
        require(not seen.error, when, found=f"it raised {seen.error}", expected="a Draft", look=RAISED)
        _form(seen, rig.target.vocab_size, when)
    said = [text for result in run.results for text in result.speculation.fallbacks]
    require(
        not said,
        f"what the engine says about {type(the(rig)).__name__}",
        found=f"a fallback: {said[0] if said else ''}",
        expected="no fault of the drafter (each costs its drafts, never the reply)",
        look="propose and rollback of your drafter",
    )


def _form(seen: Proposal, vocab_size: int, when: str) -> None:
    draft, rows = seen.draft, len(seen.histories)
    if draft is None:
        broken(when, found="None", expected="a Draft", look=FORM)
    tokens = draft.tokens
    good = isinstance(tokens, mx.array) and tokens.ndim == 2 and tokens.shape[0] == rows
    shape = getattr(tokens, "shape", type(tokens).__name__)
    require(good, when, found=f"tokens of shape {shape}", expected=f"({rows}, K)", look=FORM)
    require(
        mx.issubdtype(tokens.dtype, mx.integer), when, found=f"tokens of {tokens.dtype}", expected="int32", look=FORM
    )
    counts = [tokens.shape[1]] * rows if draft.counts is None else list(draft.counts)
    fits = len(counts) == rows and all(
        0 <= c <= min(k, tokens.shape[1]) for c, k in zip(counts, seen.budget, strict=True)
    )
    require(fits, when, found=f"counts {counts}", expected=f"at most the budget {seen.budget} per row", look=FORM)
    wrong = [t for b in range(rows) for t in seen.ids(b) if not 0 <= t < vocab_size]
    require(not wrong, when, found=f"id {wrong[:1]}", expected=f"ids from 0 to {vocab_size - 1}", look=FORM)
    if draft.probs is not None:
        good = draft.probs.shape == (*tokens.shape, vocab_size) and draft.probs.dtype == mx.float32
        found = f"probs of shape {draft.probs.shape}, {draft.probs.dtype}"
        require(good, when, found=found, expected=f"{(*tokens.shape, vocab_size)} float32", look=FORM)


def something(made: int, where: str) -> None:
    """A test that saw no draft proves nothing."""
    require(
        made > 0,
        f"drafts with {where}",
        found="none at all, so nothing was tested",
        expected="a draft after at least one of the prompts",
        look="propose, or give prompts it can draft for: override the fixture `prompts` (token ids)",
    )


def fresh_proposal(
    rig: Rig,
    tokens: Sequence[int],
    budget: Sequence[int],
    setup: Setup,
    steer: Steer | None = None,
    spoil: bool = False,
    draw: DrawFn | None = None,
) -> Proposal:
    """What the drafter proposes for a new request whose prompt is `tokens`.

    spoil: feed it other taps. draw: what `lane.draw` does, default as in a greedy round.
    """
    drafter = the(rig)
    lane = rig.fresh_lane(drafter, tokens, setup, spoil)
    seen = Proposal([list(tokens)], list(budget))
    lane.bind_draw(draw or rig.greedy_draw(lane))
    try:
        watched_propose(bind_hooks(rig.pair(drafter, setup)), lane, seen, steer)
    finally:
        lane.bind_draw(None)
    return seen


def as_afresh(rig: Rig, run: Run, setup: Setup, what: str, look: str = BACK, steer: Steer | None = None) -> int:
    """Every draft of a run is what a new request with its tokens gets; number of tokens compared."""
    compared = 0
    for seen in run.proposals:
        fresh = fresh_proposal(rig, seen.histories[0], seen.budget, setup, steer)
        where = parting(seen, 0, fresh, 0)
        require(
            not where,
            f"draft {what}, {shown(seen.histories[0])}",
            found=where,
            expected="the draft of a fresh request with these tokens as its prompt",
            look=look,
        )
        compared += min(len(seen.ids(0)), len(fresh.ids(0)))
    return compared


def as_alone(
    rig: Rig, prompts: Sequence[Sequence[int]], counts: Sequence[int], setup: Setup, steer: Steer | None = None
) -> int:
    """Rows of a lane draft, and reply, as each does alone; number of tokens compared."""
    drafter, compared = the(rig), 0
    together = rig.run(drafter, prompts, counts, setup, steer=steer)
    well_formed(rig, together)
    known = by_question(together.proposals)
    for prompt, count, reply in zip(prompts, counts, together.tokens, strict=True):
        alone = rig.run(drafter, [prompt], count, Setup(setup.block_size), steer=steer)
        same_reply(reply, alone.tokens[0], f"reply in company, prompt of {len(prompt)} tokens", STATE)
        for seen in alone.proposals:
            other, row = known.get((tuple(seen.histories[0]), seen.budget[0]), (seen, 0))
            where = parting(other, row, seen, 0)
            require(
                not where,
                f"draft of row {row} in a lane of {len(other.histories)} after {shown(seen.histories[0])}",
                found=where,
                expected="the draft of the row alone",
                look=ROWS,
            )
            compared += 0 if other is seen else len(seen.ids(0))
    return compared


def picking(vocab_size: int, unlikely: int | None = None) -> DrawFn:
    """A draw under `rejection` that takes the likeliest token, at step `unlikely` the least likely one."""

    def draw(logits: mx.array, step: int) -> tuple[mx.array, mx.array]:
        logits = fit_width(logits, vocab_size, -mx.inf)
        law = mx.exp(shape_logprobs(logits, CONFIDENT))
        picked = mx.argmin(law, axis=-1) if step == unlikely else mx.argmax(law, axis=-1)
        return picked.astype(mx.int32), law

    return draw


# -- sampling --------------------------------------------------------------------------------------------


def sampled_prompts(rig: Rig, seed: int) -> list[list[int]]:
    """Prompts of the sampled requests: random ones, some twice over, and some over a few ids."""
    return [_sampled_prompt(rig, seed, i) for i in range(REQUESTS)]


def _sampled_prompt(rig: Rig, seed: int, i: int) -> list[int]:
    if i % 3 == 2:
        return rig.babble(12 + i % 5, seed, i)
    return rig.prompt(4 + i % 9, 1000 * seed + i) * (2 if i % 3 else 1)


@lru_cache(maxsize=4)
def sampled_run(rig: Rig, seed: int, batch: bool) -> Run:
    """Many replies sampled under `rejection`, each with a seed of its own."""
    settings = [SAMPLED.replace(seed=1000 * seed + i) for i in range(REQUESTS)]
    setup = Setup(4, max_rows=8 if batch else 1)
    return rig.run(the(rig), sampled_prompts(rig, seed), REPLY, setup, settings)


def drafted_draws(run: Run) -> Draws:
    """Every drafted token with the law reported for it; point masses (no probs) are left out."""
    draws = Draws()
    for seen in run.proposals:
        if seen.draft is None or seen.draft.probs is None:
            continue
        for b in range(len(seen.histories)):
            for i, token in enumerate(seen.ids(b)):
                draws.add(seen.draft.probs[b, i], token)
    return draws


def emitted_draws(rig: Rig, prompts: Sequence[Sequence[int]], run: Run) -> Draws:
    """Every reply token with the law the target alone has there."""
    draws = Draws()
    for prompt, result in zip(prompts, run.results, strict=True):
        tokens = mx.array([[*prompt, *result.token_ids[:-1]]], dtype=mx.int32)
        logits = rig.target.forward(tokens, rig.target.make_states()).logits[0, len(prompt) - 1 :]
        laws = mx.exp(shape_logprobs(logits, SAMPLED))
        for i, token in enumerate(result.token_ids):
            draws.add(laws[i], token)
    return draws


def laws_as_drawn(rig: Rig, run: Run) -> None:
    """Drafts are well formed; step by step, tokens and probs are what lane.draw answered with."""
    well_formed(rig, run)
    for seen in run.proposals:
        _as_drawn(rig, seen)


def _as_drawn(rig: Rig, seen: Proposal) -> None:
    draft = seen.draft
    if draft is None or not seen.draws:
        return
    when = f"draft of {type(the(rig)).__name__} after {shown(seen.histories[0])}"
    ids = [seen.ids(b) for b in range(len(seen.histories))]
    for i, draw in enumerate(seen.draws[: draft.tokens.shape[1]]):
        rows = [b for b, row in enumerate(ids) if i < len(row)]
        drawn: list[int] = draw.tokens.tolist()
        wrong = next((b for b in rows if ids[b][i] != drawn[b]), None)
        if wrong is not None:
            found, expected = f"token {ids[wrong][i]} at step {i}", f"{drawn[wrong]}, as lane.draw answered"
            broken(
                when, found=found, expected=expected, look="propose: the drafted token is the one lane.draw returned"
            )
        if draw.law is None or not rows:
            continue
        if draft.probs is None:
            broken(when, found="probs None", expected="the laws that lane.draw returned", look=LAWS)
        index = mx.array(rows)
        if not same_bytes(draft.probs[index, i], draw.law[index]):
            found = _other_law(seen, draft.probs[index, i], index)
            broken(f"probs of step {i}, {when}", found=found, expected="the one lane.draw returned", look=LAWS)


def _other_law(seen: Proposal, probs: mx.array, rows: mx.array) -> str:
    """Which step's law was reported instead, in words."""
    for k, draw in enumerate(seen.draws):
        if draw.law is not None and same_bytes(probs, draw.law[rows]):
            return f"the law of step {k}"
    return "another law"


def acceptance(run: Run) -> tuple[int, int]:
    """Accepted and drafted tokens of a run."""
    return sum(r.timings.draft_n_accepted for r in run.results), drafted(run.proposals)

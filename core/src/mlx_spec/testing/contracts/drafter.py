"""DrafterContract: a drafter costs nothing but acceptance, and its requests are strangers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import pytest

from ...engine import Engine
from ...request import Request
from ...sampling import Sampling
from ..compare import same_reply
from ..drafting import (
    LAWS,
    STATE,
    acceptance,
    as_afresh,
    as_alone,
    drafted_draws,
    emitted_draws,
    fresh_proposal,
    laws_as_drawn,
    picking,
    sampled_prompts,
    sampled_run,
    something,
    the,
    well_formed,
)
from ..faults import broken, require
from ..rig import GREEDY, Rig, Setup, rig_for, right_for
from ..statistics import FEWEST
from ..traces import drafted, parting, shown
from ..watch import Watch
from .base import Contract, needs, needs_given

if TYPE_CHECKING:
    from ...models import Drafter, Target

BLOCKS = tuple(range(2, 9))  # widths L
Reference = Callable[[Sequence[int], int], Sequence[int]]
REJECTED = "propose: what it learns from (lane.tokens is what was committed; its own drafts may have been rejected)"


class DrafterContract(Contract):
    """What the engine relies on in a drafter. Fixtures: `target`, `drafter`, `prompts`, `reference_draft`.

    Attributes:
        tokens: length of the replies compared.
        block_size: L of tests that run one width.
        least_acceptance: share of drafts that must be accepted over `prompts`; None when nothing is promised.
    """

    tokens: ClassVar[int] = 11
    block_size: ClassVar[int] = 4
    least_acceptance: ClassVar[float | None] = None

    @pytest.fixture
    def rig(self, target: Target, drafter: Drafter) -> Rig:
        """Target and drafter on the bench."""
        return rig_for(target, drafter)

    @pytest.fixture
    def prompts(self, rig: Rig, seed: int) -> list[list[int]]:
        """Prompts as token ids; at least one must make the drafter draft."""
        return rig.prompts(seed, self.declares("window"))

    @pytest.fixture
    def reference_draft(self) -> Reference | None:
        """function(tokens, budget) -> the ids this drafter should draft greedily after `tokens` (anchor last)."""
        return None

    # -- what it says and gives --------------------------------------------------------------------------

    def test_it_describes_itself(self, rig: Rig) -> None:
        """A kind, taps the target has, and the flags declared here."""
        drafter, target = the(rig), rig.target
        name = type(drafter).__name__
        require(
            isinstance(drafter.kind, str) and bool(drafter.kind),
            f"kind of {name}",
            found=repr(drafter.kind),
            expected="a non-empty string",
            look="DrafterCard(kind=...) in the constructor",
        )
        missing = [tap for tap in drafter.taps if tap not in target.tap_names]
        require(
            not missing,
            f"taps of {name}",
            found=f"{missing}",
            expected=f"some of the target's, {list(target.tap_names)}",
            look="Drafter.taps and Target.tap_names",
        )
        for flag in ("batch", "sampling", "quantised_kv"):
            require(
                not self.declares(flag) or getattr(drafter.capabilities, flag),
                f"capability {flag!r} of {name}",
                found="it declared in the test class and False in drafter.capabilities",
                expected="both to agree",
                look="Capabilities(...) of your drafter: the engine reads these flags",
            )
        require(
            not drafter.taps or drafter.capabilities.history != "none",
            f"history of {name}",
            found=f"taps {list(drafter.taps)} with history {drafter.capabilities.history!r}",
            expected='"last" or "all": with "none" no tap ever reaches lane.fresh',
            look="Capabilities(history=...) of your drafter",
        )

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda n: f"L{n}")
    def test_its_own_drafts_give_the_plain_reply(self, rig: Rig, prompts: list[list[int]], block: int) -> None:
        """Left to itself it drafts something well formed, faults never, and the reply is the plain one."""
        made = 0
        for prompt in [prompts[block % len(prompts)], prompts[-1]]:
            for adaptive in (False, True) if block == BLOCKS[-1] else (False,):
                run = rig.run(the(rig), [prompt], self.tokens, Setup(block, adaptive=adaptive))
                well_formed(rig, run)
                made += drafted(run.proposals)
                what = f"reply with the drafter's own drafts, L={block}, prompt of {len(prompt)} tokens"
                same_reply(run.tokens[0], rig.plain(prompt, self.tokens), what, "the target, with TargetContract")
        something(made, f"L={block}")

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda n: f"L{n}")
    def test_every_accept_count_gives_the_plain_reply(self, rig: Rig, prompts: list[list[int]], block: int) -> None:
        """Drafts steered to be right for 0, 1, ... K tokens give the plain reply, and it goes on drafting."""
        prompt = prompts[-1 - block % min(2, len(prompts))]
        reply = rig.plain(prompt, self.tokens)
        for right in range(block):
            steer = right_for({tuple(prompt): reply}, right, rig.target.vocab_size)
            run = rig.run(the(rig), [prompt], self.tokens, Setup(block), steer=steer)
            well_formed(rig, run)
            what = f"reply with L={block} and drafts right for {right} tokens, prompt of {len(prompt)}"
            same_reply(run.tokens[0], reply, what, "propose and rollback: they ran between two replies that agree")

    def test_propose_leaves_the_target_alone(self, rig: Rig, prompts: list[list[int]]) -> None:
        """The target's state has the same bytes after propose, and nobody ran, appended or rewound it."""
        for prompt in prompts[-3:]:
            steer = right_for({tuple(prompt): rig.plain(prompt, self.tokens)}, 1, rig.target.vocab_size)
            run = rig.run(the(rig), [prompt], self.tokens, Setup(self.block_size), steer=steer, guard=True)
            something(len(run.proposals), "the engine")
            for seen in run.proposals:
                require(
                    not seen.misdeeds,
                    f"propose of {type(the(rig)).__name__} after {shown(seen.histories[0])}",
                    found="; ".join(dict.fromkeys(seen.misdeeds)),
                    expected="the target's state only read, through state.view()",
                    look="propose: it may look at what the target stored and at lane.fresh, and change neither",
                )

    # -- its own state -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("right", range(4), ids=lambda n: f"right{n}")
    def test_a_rollback_equals_a_fresh_start(self, rig: Rig, prompts: list[list[int]], right: int) -> None:
        """After any round it drafts what it would draft for a new request with the same tokens."""
        setup, compared = Setup(self.block_size), 0
        for prompt in prompts[-2:]:
            steer = right_for({tuple(prompt): rig.plain(prompt, self.tokens)}, right, rig.target.vocab_size)
            run = rig.run(the(rig), [prompt], self.tokens, setup, steer=steer)
            well_formed(rig, run)
            compared += as_afresh(rig, run, setup, f"after rounds that kept {right} drafts", steer=steer)
        something(compared, f"drafts right for {right}")

    def test_what_was_rejected_is_forgotten(self, rig: Rig, seed: int) -> None:
        """In a reply that often repeats itself it drafts what it would draft had it never been wrong."""
        babbling, setup = rig.babbling(seed), Setup(self.block_size)
        run = babbling.run(the(rig), [rig.babble(16, seed)], 2 * self.tokens, setup)
        well_formed(babbling, run)
        as_afresh(babbling, run, setup, "in a reply over a few ids", REJECTED)

    def test_prompts_in_chunks_draft_alike(self, rig: Rig, seed: int) -> None:
        """A prompt prefilled 1, 3 or 7 tokens at a time leads to the same first draft."""
        prompt = [*rig.prompt(6, seed + 1) * 4, *rig.prompt(6, seed + 1)[:2]]
        whole = fresh_proposal(rig, prompt, [3], Setup(4))
        for step in (1, 3, 7):
            parts = fresh_proposal(rig, prompt, [3], Setup(4, prefill_step=step))
            where = parting(parts, 0, whole, 0)
            require(
                not where,
                f"first draft of a prompt of {len(prompt)} tokens prefilled {step} at a time",
                found=where,
                expected="the draft after one chunk",
                look="prime: `start` is the position of the chunk's first token",
            )

    def test_two_requests_do_not_see_each_other(self, rig: Rig, prompts: list[list[int]]) -> None:
        """Two engines on one drafter object, stepped in turn, draft what each drafts alone."""
        pair = (prompts * 2)[-2:]
        alone = [rig.run(the(rig), [p], self.tokens, Setup(self.block_size)).proposals for p in pair]
        engines = [Engine(rig.pair(the(rig), Setup(self.block_size)), max_rows=1) for _ in pair]
        watches = [Watch(engine) for engine in engines]
        for engine, prompt in zip(engines, pair, strict=True):
            engine.submit(Request(prompt, GREEDY, self.tokens, ignore_eos=True, adaptive=False))
        while any([engine.step() for engine in engines]):  # noqa: C419 - every engine takes its step
            pass
        for i, watch in enumerate(watches):
            found = [(p.histories[0], p.ids(0)) for p in watch.proposals]
            expected = [(p.histories[0], p.ids(0)) for p in alone[i]]
            at = next((k for k, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            if at is None and len(found) == len(expected):
                continue
            broken(
                f"drafts of request {i} while another request runs in turn",
                found=f"{found[at][1] if at is not None else len(found)} in round {at}",
                expected=f"{expected[at][1] if at is not None else len(expected)}, as it drafts alone",
                look=STATE,
            )

    @needs("batch")
    def test_rows_of_a_batch_draft_as_they_do_alone(self, rig: Rig, prompts: list[list[int]], seed: int) -> None:
        """Rows of unequal length and width in one lane draft, and reply, as each does alone."""
        chosen, counts = (prompts[1:3] + prompts[-3:] + prompts)[:5], [self.tokens, 5, self.tokens, 9, 7]
        counts, setup = counts[: len(chosen)], Setup(self.block_size, max_rows=3)
        table = {tuple(p): rig.plain(p, self.tokens) for p in chosen}
        compared = as_alone(rig, chosen, counts, setup, right_for(table, 1, rig.target.vocab_size))
        something(compared, "a lane of three rows")
        repeating = [rig.babble(length, seed) for length in (9, 14, 11, 17)]
        as_alone(rig.babbling(seed), repeating, [9, 5, 7, 8], setup)

    # -- sampling ----------------------------------------------------------------------------------------

    @needs("sampling")
    def test_probs_are_the_distribution_drafted_from(self, rig: Rig, seed: int) -> None:
        """Over many seeded rounds: probs repeat what lane.draw said, and the drafted tokens fit them."""
        run = sampled_run(rig, seed, self.declares("batch"))
        laws_as_drawn(rig, run)
        draws = drafted_draws(run)  # none of a drafter without randomness: a point mass is always exact
        if len(draws) < FEWEST:  # it drafts where text repeats itself
            babbling = rig.babbling(seed)
            run = sampled_run(babbling, seed, self.declares("batch"))
            laws_as_drawn(babbling, run)
            draws = drafted_draws(run)
        complaint = draws.complaint(seed) if len(draws) >= FEWEST else ""
        require(
            not complaint,
            f"Draft.probs of {type(the(rig)).__name__}",
            found=complaint,
            expected="the distribution each token was really drawn from",
            look=LAWS,
        )

    @needs("sampling")
    def test_drafts_are_cut_by_what_was_known_before(self, rig: Rig, prompts: list[list[int]]) -> None:
        """Whether step i is drafted does not depend on the token drawn at step i."""
        V, budget = rig.target.vocab_size, [self.block_size - 1]
        for prompt in prompts:
            likely = fresh_proposal(rig, prompt, budget, Setup(), draw=picking(V))
            for step in range(self.block_size - 1):
                other = fresh_proposal(rig, prompt, budget, Setup(), draw=picking(V, step))
                counts = len(likely.ids(0)), len(other.ids(0))
                require(
                    (counts[0] > step) == (counts[1] > step),
                    f"length of the draft after {shown(prompt)}",
                    found=f"{counts[0]} tokens when step {step} draws its likeliest token, "
                    f"{counts[1]} when its least likely",
                    expected="the token of a step to have no say in whether that step is kept",
                    look="where counts is decided: a draft is cut before its token is drawn, else replies are biased",
                )

    @needs("sampling")
    def test_sampled_replies_are_the_targets(self, rig: Rig, seed: int) -> None:
        """Replies sampled under `rejection` are distributed as the target alone would have them."""
        run = sampled_run(rig, seed, self.declares("batch"))
        complaint = emitted_draws(rig, sampled_prompts(rig, seed), run).complaint(seed)
        require(
            not complaint,
            "replies sampled with drafts",
            found=complaint,
            expected="the target's own distribution",
            look=LAWS,
        )

    @needs("sampling")
    def test_seeded_sampling_gives_the_plain_reply(self, rig: Rig, prompts: list[list[int]], seed: int) -> None:
        """With a seed the reply is token-identical to plain sampling."""
        for settings in (
            Sampling(temperature=0.8, seed=seed),
            Sampling(temperature=1.2, top_k=12, top_p=0.95, seed=seed),
        ):
            for prompt in prompts[-2:]:
                run = rig.run(the(rig), [prompt], self.tokens, Setup(self.block_size), settings)
                well_formed(rig, run)
                what = f"reply sampled with seed {seed}, prompt of {len(prompt)} tokens"
                same_reply(
                    run.tokens[0], rig.plain(prompt, self.tokens, settings), what, "the target, with TargetContract"
                )

    # -- other capabilities ------------------------------------------------------------------------------

    @needs("quantised_kv")
    @pytest.mark.parametrize("bits", [4, 8], ids=lambda n: f"kv{n}")
    def test_it_drafts_over_quantised_kv(self, rig: Rig, prompts: list[list[int]], bits: int) -> None:
        """With the target's K/V in 4 or 8 bits it drafts, and the reply is the plain one."""
        made, setup = 0, Setup(self.block_size, kv_bits=bits)
        for prompt in prompts[-3:]:
            run = rig.run(the(rig), [prompt], self.tokens, setup)
            well_formed(rig, run)
            made += drafted(run.proposals)
            what = f"reply with {bits}-bit K/V, prompt of {len(prompt)} tokens"
            same_reply(
                run.tokens[0], rig.plain(prompt, self.tokens, setup=setup), what, "the target, with TargetContract"
            )
        something(made, f"{bits}-bit K/V")

    @needs("taps")
    def test_it_reads_the_taps_it_asks_for(self, rig: Rig, prompts: list[list[int]]) -> None:
        """Other taps lead to another draft; taps nobody reads cost memory and time in every round."""
        drafter, setup = the(rig), Setup(self.block_size)
        require(
            bool(drafter.taps), f"taps of {type(drafter).__name__}", found="none", expected="a tap", look="Drafter.taps"
        )
        own = fresh_proposal(rig, prompts[-1], [3], setup)
        other = fresh_proposal(rig, prompts[-1], [3], setup, spoil=True)
        something(len(own.ids(0)), "taps")
        require(
            bool(parting(own, 0, other, 0)),
            f"draft of {type(drafter).__name__} with its taps replaced by others",
            found="the same draft and logits",
            expected="another draft",
            look="propose and prime: where lane.fresh, lane.last_tap or the taps of prime are read",
        )

    # -- expectations of acceptance ----------------------------------------------------------------------

    @needs_given("reference_draft", "faults that cost only acceptance, such as positions off by one, are not found")
    def test_drafts_equal_the_reference(
        self, rig: Rig, prompts: list[list[int]], reference_draft: Reference | None, seed: int
    ) -> None:
        """In the first round and in later ones it drafts what an independent implementation drafts."""
        if reference_draft is None:
            broken("reference_draft", found="None", expected="a function", look="your fixture reference_draft")
        compared = 0
        for prompt in [*prompts, *(rig.babble(12 + i, seed, i) for i in range(3))]:
            steer = right_for({tuple(prompt): rig.plain(prompt, self.tokens)}, 1, rig.target.vocab_size)
            run = rig.run(the(rig), [prompt], 6, Setup(self.block_size), steer=steer)
            histories = [prompt, *(seen.histories[0] for seen in run.proposals[1:])]
            for history in histories:
                found = fresh_proposal(rig, history, [self.block_size - 1], Setup(self.block_size)).ids(0)
                expected = [int(t) for t in reference_draft(history, self.block_size - 1)][: len(found)]
                compared += len(found)
                require(
                    found == expected,
                    f"draft after {shown(history)}",
                    found=found,
                    expected=f"{expected}, as the reference drafts",
                    look="position of the query (n committed positions, the anchor is n), masks, and order of inputs",
                )
        something(compared, "a reference")

    @needs_given("least_acceptance", "a drafter that is merely bad is not found")
    def test_acceptance_is_as_declared(self, rig: Rig, prompts: list[list[int]]) -> None:
        """At least the declared share of drafted tokens is accepted."""
        runs = [rig.run(the(rig), [prompt], self.tokens, Setup(self.block_size)) for prompt in prompts]
        pairs = [acceptance(run) for run in runs]
        accepted, made = sum(a for a, _ in pairs), sum(m for _, m in pairs)
        something(made, "declared acceptance")
        require(
            accepted >= (self.least_acceptance or 0.0) * made,
            f"acceptance of {type(the(rig)).__name__}",
            found=f"{accepted} of {made} drafted tokens ({accepted / max(made, 1):.2f})",
            expected=f"at least {self.least_acceptance}",
            look="positions of queries and keys (off by one?), scaling of embeddings, which row a tap is taken from",
        )

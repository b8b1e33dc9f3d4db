"""TargetContract: a target verifies blocks, and rolls back, as if it had decoded one token at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx
import pytest

from ...sampling import Sampling
from ...shaping import greedy_ids
from ..compare import close, largest_gap, same_logits, same_reply
from ..drafters import ScriptedDrafter, empty, flaky, mixed, noise, oracle
from ..faults import require
from ..rig import KV_GROUP, Rig, Setup, rig_for
from .base import Contract, needs

if TYPE_CHECKING:
    from ...models import Target
    from ...state import StateGroup

BLOCKS = tuple(range(2, 9))  # widths L
VERIFY = "forward over L rows: masks, positions, and kernels that depend on the row count; then the state's rewind"
FLAGS = {"batch": "batch", "window": "window", "recurrent": "recurrent", "conv": "conv", "quantised_kv": "quantised_kv"}


class TargetContract(Contract):
    """What the engine relies on in a target. Fixture: `target`."""

    tokens: ClassVar[int] = 11  # length of the replies compared

    def shared_out(self, rig: Rig, seed: int, block: int) -> list[list[int]]:
        """The prompts this width is run on: together the widths run on all of them."""
        prompts = rig.prompts(seed, self.declares("window"))
        first = BLOCKS.index(block) % len(prompts)
        return prompts[first :: len(BLOCKS)]

    @pytest.fixture
    def rig(self, target: Target) -> Rig:
        """The target on the bench."""
        return rig_for(target)

    # -- what it says of itself --------------------------------------------------------------------------

    def test_it_describes_itself(self, target: Target) -> None:
        """Sizes, dtype, an empty state of one row; and the capabilities declared here are those it claims."""
        for name in ("vocab_size", "hidden_size", "context"):
            value = getattr(target, name, None)
            require(
                type(value) is int and value > 0,
                f"{type(target).__name__}.{name}",
                found=repr(value),
                expected="a positive integer",
                look="the constructor of your target",
            )
        states = target.make_states()
        require(
            states.lengths == (0,),
            f"{type(target).__name__}.make_states",
            found=f"lengths {states.lengths}",
            expected="(0,): an empty state for one row",
            look="make_states; a new group of states for every call",
        )
        for name, flag in FLAGS.items():
            require(
                not self.declares(name) or getattr(target.capabilities, flag),
                f"capability {name!r} of {type(target).__name__}",
                found="it declared in the test class and False in target.capabilities",
                expected="both to agree",
                look="Capabilities(...) of your target: the engine reads these flags",
            )

    def test_forward_appends_and_returns_one_row_per_token(self, rig: Rig, seed: int) -> None:
        """forward over (1, L) gives logits (1, L, V) and a state that is L longer."""
        target, tokens = rig.target, rig.prompt(5, seed)
        states = target.make_states()
        logits = target.forward(mx.array([tokens], dtype=mx.int32), states).logits
        require(
            logits.shape == (1, 5, target.vocab_size) and states.lengths == (5,),
            "forward over 5 tokens",
            found=f"logits {logits.shape}, lengths {states.lengths}",
            expected=f"logits (1, 5, {target.vocab_size}), lengths (5,)",
            look="forward and vocab_size (the width of the logits) of your target",
        )

    # -- against single steps ----------------------------------------------------------------------------

    def test_plain_decoding_equals_single_steps(self, rig: Rig, seed: int) -> None:
        """The engine without a drafter replies what a loop over forward and argmax replies."""
        for prompt in rig.prompts(seed, self.declares("window")):
            expected = single_steps(rig, prompt, self.tokens)
            what = f"plain reply to a prompt of {len(prompt)} tokens"
            same_reply(
                rig.plain(prompt, self.tokens), expected, what, "spec_verify of the target's plugin, and forward"
            )

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda n: f"L{n}")
    def test_a_block_equals_single_steps(self, rig: Rig, seed: int, block: int) -> None:
        """Logits of L rows at once against the same rows one by one; bytes unless `level` says tokens."""
        target = rig.target
        for prompt in self.shared_out(rig, seed, block):
            more = rig.prompt(block, seed + 7)
            wide, narrow = prefilled(rig, prompt), prefilled(rig, prompt)
            logits = target.forward(mx.array([more], dtype=mx.int32), wide).logits
            singles = [target.forward(mx.array([[t]], dtype=mx.int32), narrow).logits for t in more]
            for i, single in enumerate(singles):
                what = f"logits of row {i} of a block of L={block} after {len(prompt)} tokens"
                same_logits(logits[:, i], single[:, 0], self.level, what, VERIFY)

    @pytest.mark.parametrize("block", BLOCKS, ids=lambda n: f"L{n}")
    def test_every_accept_count_gives_the_plain_reply(self, rig: Rig, seed: int, block: int) -> None:
        """Drafts right for 0, 1, ... K tokens, through the engine: token for token the plain reply."""
        for prompt in self.shared_out(rig, seed, block):
            reply = rig.plain(prompt, self.tokens)
            for right in range(block):
                drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, rig.target.vocab_size))
                run = rig.run(drafter, [prompt], self.tokens, Setup(block))
                what = f"reply with L={block} and drafts right for {right} tokens, prompt of {len(prompt)}"
                same_reply(run.tokens[0], reply, what, VERIFY)
                wrong = [r for r in run.results[0].rounds if r.accepted != min(right, len(r.draft_ids))]
                require(
                    not wrong,
                    f"accepted drafts with L={block}, right for {right}",
                    found=f"{wrong[0].accepted if wrong else ''} of {wrong[0].draft_ids if wrong else ''}",
                    expected=f"{right}",
                    look=VERIFY,
                )

    @pytest.mark.parametrize("adaptive", [False, True], ids=["full-width", "adaptive"])
    def test_any_draft_gives_the_plain_reply(self, rig: Rig, seed: int, adaptive: bool) -> None:
        """Perfect, random, empty and flaky drafts of changing length."""
        V = rig.target.vocab_size
        for prompt in rig.prompts(seed, self.declares("window"))[-3:]:
            reply = rig.plain(prompt, self.tokens)
            table = {tuple(prompt): reply}
            scripts = {
                "perfect": oracle(table),
                "random": noise(V, seed),
                "empty": empty,
                "flaky": flaky(table, 0.7, V, seed),
            }
            for name, script in scripts.items():
                run = rig.run(ScriptedDrafter(script), [prompt], self.tokens, Setup(5, adaptive=adaptive))
                what = f"reply with {name} drafts, prompt of {len(prompt)} tokens"
                same_reply(run.tokens[0], reply, what, VERIFY)

    def test_prompts_in_chunks_give_the_plain_reply(self, rig: Rig, seed: int) -> None:
        """The prompt prefilled 1, 3 or 7 tokens at a time: drafted and plain replies agree."""
        prompt = rig.prompt(23, seed)
        for step in (1, 3, 7):
            setup = Setup(4, prefill_step=step)
            reply = rig.plain(prompt, self.tokens, setup=setup)
            drafter = ScriptedDrafter(flaky({tuple(prompt): reply}, 0.7, rig.target.vocab_size, seed))
            found = rig.run(drafter, [prompt], self.tokens, setup).tokens[0]
            same_reply(found, reply, f"reply to a prompt prefilled {step} tokens at a time", VERIFY)

    def test_stops_and_limits_fall_anywhere_in_a_draft(self, rig: Rig, seed: int) -> None:
        """A stop id or the length limit inside a block ends the reply where plain decoding ends it."""
        prompt = rig.prompt(9, seed)
        reply = rig.plain(prompt, self.tokens)
        drafter = ScriptedDrafter(oracle({tuple(prompt): reply}))
        for limit in range(1, 8):
            found = rig.run(drafter, [prompt], limit, Setup(5)).tokens[0]
            same_reply(found, reply[:limit], f"reply limited to {limit} tokens", "forward and rewind of short blocks")
        for at in range(1, 8):
            sampling = Sampling(stop_ids=(reply[at],))
            expected = reply[: reply.index(reply[at]) + 1]
            found = rig.run(drafter, [prompt], self.tokens, Setup(5), sampling).tokens[0]
            same_reply(found, expected, f"reply that stops at token {at}", "forward and rewind of short blocks")

    # -- capabilities ------------------------------------------------------------------------------------

    @needs("batch")
    def test_rows_of_unequal_length_equal_the_rows_alone(self, rig: Rig, seed: int) -> None:
        """Three requests of unequal length in one forward: each row's logits are those it has alone."""
        target = rig.target
        prompts = rig.prompts(seed, self.declares("window"))[1:4]
        groups = [prefilled(rig, prompt) for prompt in prompts]
        together = type(groups[0]).merge([group.extract(0) for group in groups])
        for step in range(4):
            tokens = [rig.prompt(1, seed + 20 + step + b)[0] for b in range(3)]
            logits = target.forward(mx.array(tokens, dtype=mx.int32)[:, None], together).logits
            for b, group in enumerate(groups):
                alone = target.forward(mx.array([[tokens[b]]], dtype=mx.int32), group).logits
                require(
                    close(logits[b], alone[0]),
                    f"logits of row {b} ({len(prompts[b]) + step} tokens) in a batch of 3",
                    found=f"a difference of {largest_gap(logits[b], alone[0]):.3g} to the row alone",
                    expected="rounding",
                    look="positions and masks per row: state.offset and state.make_mask differ by row in a batch",
                )

    @needs("batch")
    def test_rows_that_join_and_leave_reply_as_alone(self, rig: Rig, seed: int) -> None:
        """Requests of unequal prompt and reply length, greedy and seeded, share lanes of up to three rows."""
        prompts = rig.prompts(seed, self.declares("window"))
        counts = [5 + 4 * (i % 3) for i in range(len(prompts))]
        seeded = self.declares("sampling")
        settings = [
            Sampling(temperature=0.9, seed=40 + i) if seeded and i % 3 == 2 else Sampling() for i in range(len(prompts))
        ]
        plain = {tuple(p): rig.plain(p, 20, s) for p, s in zip(prompts, settings, strict=True)}
        drafter = ScriptedDrafter(flaky(plain, 0.7, rig.target.vocab_size, seed))
        run = rig.run(drafter, prompts, counts, Setup(5, max_rows=3), settings)
        for prompt, count, found in zip(prompts, counts, run.tokens, strict=True):
            what = f"reply in company to a prompt of {len(prompt)} tokens"
            same_reply(found, plain[tuple(prompt)][:count], what, "merge, select and rewind of the state, row by row")

    @needs("sampling")
    def test_seeded_sampling_gives_the_plain_reply(self, rig: Rig, seed: int) -> None:
        """With a seed the drafted reply is token-identical to plain sampling, at every accept count."""
        prompt = rig.prompt(9, seed)
        for settings in (
            Sampling(temperature=0.8, seed=seed),
            Sampling(temperature=1.3, top_p=0.9, top_k=20, seed=seed),
        ):
            reply = rig.plain(prompt, self.tokens, settings)
            for right in range(4):
                drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, rig.target.vocab_size))
                found = rig.run(drafter, [prompt], self.tokens, Setup(4), settings).tokens[0]
                same_reply(found, reply, f"reply sampled with seed {seed}, drafts right for {right}", VERIFY)

    @needs("quantised_kv")
    @pytest.mark.parametrize("bits", [4, 8], ids=lambda n: f"kv{n}")
    def test_quantised_kv_gives_its_own_plain_reply(self, rig: Rig, seed: int, bits: int) -> None:
        """With K/V in 4 or 8 bits the drafted reply is the one plain decoding gives with them."""
        prompt = rig.prompts(seed, self.declares("window"))[-2]
        reply = rig.plain(prompt, self.tokens, setup=Setup(kv_bits=bits))
        for block in (2, 4, 6):
            for right in range(block):
                drafter = ScriptedDrafter(mixed({tuple(prompt): reply}, right, rig.target.vocab_size))
                found = rig.run(drafter, [prompt], self.tokens, Setup(block, kv_bits=bits)).tokens[0]
                what = f"reply with {bits}-bit K/V in groups of {KV_GROUP}, L={block}, drafts right for {right}"
                same_reply(found, reply, what, "make_states(kv_bits): trimming must not quantise kept rows again")

    @needs("taps")
    def test_taps_cost_nothing_and_equal_single_steps(self, rig: Rig, seed: int) -> None:
        """Asking for taps leaves the logits alone; each tap has one row per token, equal to single steps."""
        target, tokens = rig.target, rig.prompt(6, seed)
        names = tuple(target.tap_names)
        require(bool(names), f"{type(target).__name__}.tap_names", found="none", expected="a tap", look="tap_names")
        block = mx.array([tokens], dtype=mx.int32)
        bare, seen = target.forward(block, target.make_states()), target.forward(block, target.make_states(), names)
        same_logits(seen.logits, bare.logits, "bitwise", "logits with taps", "forward: one graph with and without taps")
        states = target.make_states()
        singles = [target.forward(mx.array([[t]], dtype=mx.int32), states, names).taps for t in tokens]
        for name in names:
            value = seen.taps.get(name)
            require(
                value is not None and value.shape[:2] == (1, len(tokens)),
                f"tap {name!r} of {len(tokens)} tokens",
                found=f"shape {getattr(value, 'shape', None)}",
                expected=f"(1, {len(tokens)}, ...)",
                look="the taps that forward returns",
            )
            rows = mx.concatenate([s[name] for s in singles], axis=1)
            same_logits(seen.taps[name], rows, self.level, f"tap {name!r} of a block of {len(tokens)}", VERIFY)
        self._prefill_shows_the_same(target, block, seen.taps)
        if "hidden" in names:
            look = "head: the logits are head(hidden), hidden is post-norm"
            same_logits(target.head(seen.taps["hidden"]), seen.logits, self.level, "head(hidden)", look)

    def _prefill_shows_the_same(self, target: Target, block: mx.array, taps: dict[str, mx.array]) -> None:
        """Taps of a prompt chunk, whole and of its last row alone, are those of a forward."""
        names = tuple(taps)
        for last in (False, True):
            states = target.make_states()
            found = target.prefill(block, states, names, last)
            shape = {name: value.shape[:2] for name, value in found.items()}
            count = 1 if last else block.shape[1]
            require(
                shape == dict.fromkeys(names, (1, count)) and states.lengths == (block.shape[1],),
                f"taps and lengths after prefill(last={last})",
                found=f"{shape}, {states.lengths}",
                expected=f"(1, {count}) for each of {list(names)}, {(block.shape[1],)}",
                look="prefill",
            )
            for name in names:
                what = f"tap {name!r} of prefill(last={last})"
                same_logits(found[name], taps[name][:, -count:], self.level, what, "prefill")


def prefilled(rig: Rig, prompt: list[int]) -> StateGroup:
    """A state that holds the prompt."""
    states = rig.target.make_states()
    rig.target.forward(mx.array([prompt], dtype=mx.int32), states)
    return states


def single_steps(rig: Rig, prompt: list[int], count: int) -> list[int]:
    """The greedy reply by a loop that knows nothing of rounds: prefill, then one token per forward."""
    states = rig.target.make_states()
    if prompt[:-1]:
        rig.target.forward(mx.array([prompt[:-1]], dtype=mx.int32), states)
    tokens, token = [], prompt[-1]
    for _ in range(count):
        logits = rig.target.forward(mx.array([[token]], dtype=mx.int32), states).logits
        token = int(greedy_ids(logits)[0, -1].item())
        tokens.append(token)
    return tokens

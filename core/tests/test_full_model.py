"""full-model: a whole small model as drafter, over real states, in lanes of one and of several rows."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from click.testing import CliRunner
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import MODEL_REMAPPING
from tinymodels import GEMMA3, LLAMA, MAMBA, SMALL_LLAMA, write_model, write_tokenizer

from mlx_spec.checkpoint import read_config, tensor_index
from mlx_spec.cli import cli
from mlx_spec.draft_state import DraftState
from mlx_spec.full_model import CHUNK, FullModelDrafter
from mlx_spec.full_model_checks import RECURRENT, fixed_state, token_names, validate
from mlx_spec.generic_target import GenericTarget
from mlx_spec.lane import Lane
from mlx_spec.memory import size
from mlx_spec.types import DrafterCard, ModelRef


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints shared by the tests below."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def load(folder: Path):
    """Load a tiny model by config name, once."""
    loaded: dict[str, GenericTarget] = {}

    def get(name: str, config: dict[str, Any] | None = None) -> GenericTarget:
        if name not in loaded:
            path = write_model(folder / name, config or name)
            loaded[name] = GenericTarget.load(ModelRef(name, path, read_config(path)))
        return loaded[name]

    return get


class Replies:
    """What a model says greedily, stepped through mlx-lm's own caches: nothing is shared with the drafter."""

    def __init__(self, target: GenericTarget):
        self.target = target
        self.known: dict[tuple[int, ...], int] = {}

    def next(self, tokens: Sequence[int]) -> int:
        if tuple(tokens) not in self.known:
            self._step(list(tokens), 10)
        return self.known[tuple(tokens)]

    def extend(self, tokens: Sequence[int], count: int) -> list[int]:
        out = list(tokens)
        for _ in range(count):
            out.append(self.next(out))
        return out[len(tokens) :]

    def _step(self, tokens: list[int], count: int) -> None:
        cache, block = make_prompt_cache(self.target.model), mx.array([tokens])
        for _ in range(count):
            token = mx.argmax(self.target.model(block, cache=cache)[0, -1])
            self.known[tuple(tokens)] = int(token.item())
            tokens.append(self.known[tuple(tokens)])
            block = token.reshape(1, 1)


def greedy(logits: mx.array, step: int) -> tuple[mx.array, None]:
    return mx.argmax(logits, axis=-1).astype(mx.int32), None


def make_lane(drafter: FullModelDrafter, prompts: Sequence[Sequence[int]], prime: int | None = None) -> Lane:
    """A lane whose rows were primed in chunks of `prime` tokens (None: not at all)."""
    states = []
    for prompt in prompts:
        state = drafter.make_state()
        for start in range(0, len(prompt) - 1, prime or len(prompt)):
            if prime is not None:
                piece = prompt[start : min(start + prime, len(prompt) - 1)]
                drafter.prime(state, mx.array([piece]), {}, start)
        states.append(state)
    lane = Lane(drafter.lm, drafter, None, DraftState.merge(states))  # type: ignore[arg-type]
    lane.tokens = [list(p) for p in prompts]
    return lane


def play(lane: Lane, replies: Replies, budget: Sequence[int], draw=greedy) -> tuple[list[list[int]], list[int]]:
    """One round: propose, judge against the target's own tokens, commit, roll back. Drafts and accepted counts."""
    lane.bind_draw(draw)
    draft = lane.drafter.propose(lane, budget)
    lane.bind_draw(None)
    counts = draft.counts if draft.counts is not None else [draft.tokens.shape[1]] * lane.size
    drafts = [row[:n] for row, n in zip(draft.tokens.tolist() or [[]] * lane.size, counts, strict=True)]
    accepted = []
    for tokens, guess in zip(lane.tokens, drafts, strict=True):
        good = 0
        while good < len(guess) and replies.next(tokens) == guess[good]:
            tokens.append(guess[good])
            good += 1
        tokens.append(replies.next(tokens))
        accepted.append(good)
    lane.drafter.rollback(lane, [a + 1 for a in accepted])
    return drafts, accepted


def prompt(length: int, seed: int, vocab: int = 90) -> list[int]:
    """Ids that do not repeat too soon."""
    return [(seed * 31 + i * i * 7 + i) % vocab + 2 for i in range(length)]


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_that_drafts_for_itself_is_always_right(load, name, k):
    model = load(name)
    lane, replies = make_lane(FullModelDrafter(model), [prompt(11, 3)], prime=4), Replies(model)
    for _ in range(5):
        drafts, accepted = play(lane, replies, [k])
        assert len(drafts[0]) == k
        assert accepted == [k]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_are_what_the_drafter_says_alone(load, name):
    drafter_lm, target = load("small-llama") if name == "llama" else load("gemma3"), load("llama")
    lane = make_lane(FullModelDrafter(drafter_lm), [prompt(9, 1), prompt(17, 2), prompt(13, 4)], prime=8)
    own, replies = Replies(drafter_lm), Replies(target)
    for budget in ([3, 3, 3], [1, 4, 2], [0, 2, 5], [2, 0, 0], [4, 4, 4]):
        before = [list(t) for t in lane.tokens]
        drafts, _ = play(lane, replies, budget)
        for tokens, guess, k in zip(before, drafts, budget, strict=True):
            seen = [min(t, drafter_lm.vocab_size - 1) for t in tokens]
            assert guess == own.extend(seen, k)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_with_unequal_histories_catch_up(load, name):
    model = load(name)
    rows = [prompt(5, 1), prompt(70, 2), prompt(41, 3), prompt(6, 5)]
    lane, replies = make_lane(FullModelDrafter(model), rows), Replies(model)
    for plain in (0, 3, 40, 1):
        _, accepted = play(lane, replies, [3, 2, 3, 1])
        assert accepted == [3, 2, 3, 1]
        for tokens in lane.tokens[1:3]:  # plain steps the drafter does not see
            tokens += replies.extend(tokens, plain)


def test_a_long_history_is_fed_in_chunks(load, monkeypatch):
    model = load("long", LLAMA | {"max_position_embeddings": 4096, "num_hidden_layers": 1})
    drafter, widths, forward = FullModelDrafter(model), [], model.forward

    def spy(tokens, states, taps=()):
        widths.append(tokens.shape[1])
        return forward(tokens, states, taps)

    lane, replies = make_lane(drafter, [prompt(2 * CHUNK + 9, 7)]), Replies(model)
    replies.extend(lane.tokens[0], 3)
    monkeypatch.setattr(model, "forward", spy)
    lane.bind_draw(greedy)
    drafts = drafter.propose(lane, [2]).tokens.tolist()
    assert drafts == [replies.extend(lane.tokens[0], 2)]
    assert widths[:4] == [CHUNK, CHUNK, 9, 1]


def test_after_a_full_accept_two_tokens_are_fed(load, monkeypatch):
    model = load("llama")
    lane, replies, widths = make_lane(FullModelDrafter(model), [prompt(8, 2)], prime=16), Replies(model), []
    forward = model.forward
    play(lane, replies, [3])

    def spy(tokens, states, taps=()):
        widths.append(tokens.shape[1])
        return forward(tokens, states, taps)

    monkeypatch.setattr(model, "forward", spy)
    lane.bind_draw(greedy)
    lane.drafter.propose(lane, [3])
    assert widths == [2, 1, 1]


def test_a_round_without_rollback_is_taken_back_later(load):
    model = load("gemma3")
    lane, replies = make_lane(FullModelDrafter(model), [prompt(12, 2), prompt(7, 9)], prime=5), Replies(model)
    lane.bind_draw(greedy)
    for _ in range(3):
        lane.drafter.propose(lane, [4, 2])
        for tokens in lane.tokens:
            tokens.append(replies.next(tokens))
    _, accepted = play(lane, replies, [4, 2])
    assert accepted == [4, 2]
    lane.drafter.rollback(lane, [1, 1])  # as after a fault, with nothing committed
    _, accepted = play(lane, replies, [3, 3])
    assert accepted == [3, 3]


def test_rows_join_and_leave(load):
    model = load("gemma3")
    drafter, replies = FullModelDrafter(model), Replies(model)
    lane = make_lane(drafter, [prompt(12, 2), prompt(31, 3)], prime=7)
    play(lane, replies, [3, 1])
    other = make_lane(drafter, [prompt(20, 6)], prime=50)
    lane.draft_state = DraftState.merge([lane.draft_state, other.draft_state])
    lane.tokens += other.tokens
    assert play(lane, replies, [2, 4, 3])[1] == [2, 4, 3]
    lane.draft_state, lane.tokens = lane.draft_state.select([2, 0]), [lane.tokens[2], lane.tokens[0]]
    assert play(lane, replies, [4, 4])[1] == [4, 4]


def test_a_smaller_context_ends_drafting_with_a_note(load, caplog):
    small = load("short", LLAMA | {"max_position_embeddings": 24})
    drafter, replies = FullModelDrafter(small), Replies(small)
    lane = make_lane(drafter, [prompt(12, 2), prompt(5, 3)], prime=7)
    with caplog.at_level(logging.WARNING):
        for _ in range(8):
            long = len(lane.tokens[0])
            drafts, accepted = play(lane, replies, [3, 1])
            assert len(drafts[0]) == max(0, min(3, 24 - long + 1))
            assert accepted == [len(d) for d in drafts]
    assert len(lane.tokens[0]) > 24 and len(lane.tokens[1]) < 24
    assert drafter.explain(lane.draft_state)[1] == ""
    assert "context of 24" in drafter.explain(lane.draft_state)[0]
    assert len([r for r in caplog.records if "context of 24" in r.getMessage()]) == 1
    assert max(lane.draft_state.states.select([0]).lengths) <= 1


def test_a_prompt_longer_than_the_drafters_context_is_decoded_plainly(load):
    small = load("short", LLAMA | {"max_position_embeddings": 24})
    drafter = FullModelDrafter(small)
    lane = make_lane(drafter, [prompt(40, 2)], prime=16)
    lane.bind_draw(greedy)
    draft = drafter.propose(lane, [3])
    assert draft.counts == [0] and draft.tokens.shape == (1, 0)
    assert lane.draft_state.states.lengths == (0,)


def test_the_law_it_drew_from_is_reported(load):
    model = load("small-llama")
    lane = make_lane(FullModelDrafter(model), [prompt(6, 1), prompt(9, 2)], prime=20)
    seen: list[mx.array] = []

    def draw(logits: mx.array, step: int) -> tuple[mx.array, mx.array]:
        assert step == len(seen) and logits.shape == (2, model.vocab_size)
        seen.append(mx.softmax(logits, axis=-1))
        return mx.argmin(logits, axis=-1).astype(mx.int32), seen[-1]

    lane.bind_draw(draw)
    draft = lane.drafter.propose(lane, [3, 2])
    assert draft.probs.shape == (2, 3, model.vocab_size)
    assert draft.counts == [3, 2]
    assert all(mx.array_equal(draft.probs[:, i], q) for i, q in enumerate(seen))


def test_ids_the_drafter_does_not_know_do_no_harm(load):
    small = load("small-llama")
    lane = make_lane(FullModelDrafter(small), [[5, 120, 130, 7, 111]])
    lane.bind_draw(greedy)
    drafts = lane.drafter.propose(lane, [3]).tokens.tolist()[0]
    top = small.vocab_size - 1
    assert drafts == Replies(small).extend([5, top, top, 7, top], 3)


# -- refusals ------------------------------------------------------------------------------------------


def ref(path: Path) -> ModelRef:
    return ModelRef(path.name, path, read_config(path))


def codes(target: Path, drafter: Path) -> dict[str, str]:
    """Code -> severity of what is found."""
    return {f.code: f.severity for f in validate(ref(target), ref(drafter))}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A good pair, both with the same tokenizer."""
    made = write_model(tmp_path / "target", LLAMA), write_model(tmp_path / "drafter", SMALL_LLAMA)
    for path in made:
        write_tokenizer(path)
    return made


def rewrite(path: Path, name: str, change) -> None:
    value = json.loads((path / name).read_text())
    change(value)
    (path / name).write_text(json.dumps(value))


def test_a_good_pair_has_nothing_to_say(pair):
    assert codes(*pair) == {}


def test_missing_vocab_size(pair):
    rewrite(pair[1], "config.json", lambda c: c.pop("vocab_size"))
    findings = validate(ref(pair[0]), ref(pair[1]))
    assert [f.code for f in findings if f.severity == "error"] == ["P21"]
    assert "drafter" in findings[0].subject and "vocab_size" in findings[0].found


def test_a_larger_vocabulary_names_both_sizes(pair):
    findings = validate(ref(pair[1]), ref(pair[0]))
    larger = next(f for f in findings if f.code == "P22")
    assert larger.severity == "error"
    assert "131" in larger.found and "97" in larger.found


def test_padding_rows_may_differ(tmp_path):
    sizes = {384: 4, 352: 1}  # vocabulary -> layers
    made = [
        write_model(tmp_path / str(v), SMALL_LLAMA | {"vocab_size": v, "num_hidden_layers": layers})
        for v, layers in sizes.items()
    ]
    for path in made:
        write_tokenizer(path)
    assert max(token_names(made[0]) or ()) < 352 - 8
    assert codes(*made) == {}


@pytest.mark.parametrize(
    ("layers", "changes", "warned"),
    [(3, {}, True), (5, {}, True), (1, {}, False), (3, {"num_local_experts": 8}, False)],
)
def test_a_drafter_as_large_as_its_target_is_warned_of(tmp_path, layers, changes, warned):
    target = write_model(tmp_path / "target", SMALL_LLAMA | {"num_hidden_layers": 3})
    drafter = write_model(tmp_path / "drafter", SMALL_LLAMA | {"num_hidden_layers": layers})
    for path in (target, drafter):
        write_tokenizer(path)
    rewrite(drafter, "config.json", lambda c: c.update(changes))
    found = [f for f in validate(ref(target), ref(drafter)) if f.code == "P28"]
    assert bool(found) is warned
    if warned:
        sizes = [size(sum(info.nbytes for info in tensor_index(path).values())) for path in (drafter, target)]
        assert found[0].severity == "warning"
        assert found[0].found == f"{sizes[0]} of weights, target {ref(target).name} has {sizes[1]}"


def test_the_warning_is_given_once_by_log_and_command(tmp_path, caplog):
    target = write_model(tmp_path / "target", SMALL_LLAMA)
    write_tokenizer(target)
    given = ["-m", str(target), "--draft-model", str(target), "--draft-kind", "full-model"]
    result = CliRunner().invoke(cli, ["pair", *given, "--no-measure"])
    assert result.exit_code == 0 and result.stderr.count("warning P28: size of full-model drafter ") == 1
    assert len([r for r in caplog.records if "size of full-model drafter" in r.getMessage()]) == 1
    assert "P28" in CliRunner().invoke(cli, ["inspect", str(target), "--drafter", str(target)]).stdout


def test_a_cache_that_cannot_go_back(pair, tmp_path):
    mamba = write_model(tmp_path / "mamba", MAMBA)
    found = validate(ref(pair[0]), ref(mamba))
    state = next(f for f in found if f.code == "P23")
    assert state.severity == "error" and state.found == "model_type 'mamba', whose layers keep a state of fixed size"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"model_type": "granitemoehybrid", "layer_types": ["attention"] * 3}, ""),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
            "layers of type mamba (model_type 'granitemoehybrid')",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention", "full_attention"]}},
            "layers of type linear_attention (model_type 'qwen3_5')",
        ),
        ({"model_type": "gemma3", "layer_types": ["sliding_attention", "full_attention"]}, ""),
        ({"model_type": "someone_elses", "layer_types": ["conv"]}, ""),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_layers_of_fixed_size_are_read_from_the_config(config, found):
    assert fixed_state(config) == found


def test_every_recurrent_module_of_mlx_lm_is_known():
    folder = Path(mlx_lm.__file__).parent / "models"
    text = {file.stem: file.read_text() for file in folder.glob("*.py") if file.stem != "cache"}
    types = {name for name, code in text.items() if "ArraysCache(" in code}
    for name, code in text.items():
        if any(f"from .{other} import" in code or f"from . import {other}\n" in code for other in sorted(types)):
            types.add(name)
    assert types | {old for old, new in MODEL_REMAPPING.items() if new in types} == RECURRENT


@pytest.mark.parametrize("model_type", ["gemma4_assistant", "qwen3_5_mtp"])
def test_a_drafter_directory_is_no_full_model(pair, model_type):
    rewrite(pair[1], "config.json", lambda c: c.update(model_type=model_type))
    assert codes(*pair) == {"P20": "error"}


def test_a_head_without_embedding_is_no_full_model(pair):
    path = pair[1] / "model.safetensors"
    weights = {k: v for k, v in mx.load(str(path)).items() if "embed_tokens" not in k}
    mx.eval(weights)
    path.unlink()
    mx.save_safetensors(str(path), weights)
    assert codes(*pair) == {"P20": "error"}


def test_another_tokenizer_is_refused_with_an_example(pair):
    def shuffle(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        ids = list(vocab.values())
        tokenizer["model"]["vocab"] = dict(zip(vocab, ids[7:] + ids[:7], strict=True))

    rewrite(pair[1], "tokenizer.json", shuffle)
    found = [f for f in validate(ref(pair[0]), ref(pair[1])) if f.code == "P25"]
    assert found[0].severity == "error" and "e.g. id" in found[0].found


def test_one_renamed_reserved_token_is_only_a_warning(pair):
    def rename(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"][-1]["content"] = "<reserved>"

    rewrite(pair[1], "tokenizer.json", rename)
    assert codes(*pair) == {"P25": "warning"}


def test_more_names_on_one_side_are_fine(pair):
    rewrite(pair[0], "tokenizer.json", lambda t: t["model"]["vocab"].update(zzzz=100_000))
    assert codes(*pair) == {}


def test_without_tokenizer_it_says_so(pair):
    (pair[1] / "tokenizer.json").unlink()
    assert codes(*pair) == {"P24": "note"}


@pytest.mark.parametrize("side", [0, 1])
def test_a_damaged_tokenizer_is_no_missing_one(pair, side):
    (pair[side] / "tokenizer.json").write_text('{"model": ')
    found = [f for f in validate(ref(pair[0]), ref(pair[1])) if f.code in ("P24", "P27")]
    assert [(f.code, f.severity) for f in found] == [("P27", "warning")]
    assert found[0].subject == f"tokenizer.json in {pair[side]}"


def test_a_smaller_context_is_noted(pair):
    rewrite(pair[1], "config.json", lambda c: c.update(max_position_embeddings=320))
    found = validate(ref(pair[0]), ref(pair[1]))
    assert [(f.code, f.severity) for f in found] == [("P26", "note")]
    assert "320" in found[0].found and "512" in found[0].found


def test_unigram_vocabularies_are_read(tmp_path):
    data = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["a", -1.5]]},
        "added_tokens": [{"id": 5, "content": "<x>"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert token_names(tmp_path) == {0: "<unk>", 1: "a", 5: "<x>"}
    (tmp_path / "tokenizer.json").write_text("{}")
    assert token_names(tmp_path) is None


def test_the_card_defaults_to_what_the_model_is(load):
    drafter = FullModelDrafter(load("gemma3"))
    assert drafter.card == DrafterCard(kind="full-model", model_type="gemma3_text", vocab_size=GEMMA3["vocab_size"])
    assert drafter.kind == "full-model"

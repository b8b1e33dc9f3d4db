"""The Gemma 4 assistant: a four-layer head that attends to its target's own K/V and stores nothing.

One step (transformers 5.24 `modeling_gemma4_assistant.py`, mlx-vlm 0.7.10 `gemma4_assistant.py`):

    e       = target.embed(token)                       the target's table and scale
    x       = pre_projection([e, hidden])               embedding first, no scale of its own
    x       = layers(x)                                 queries only; K/V of the target's last sliding/full layer
    n       = norm(x)
    hidden' = post_projection(n),  logits = head(n)     no soft cap

How it differs from a plain block: attention scale is 1.0, norms multiply by the weight as stored, every
step of a block stands at one position (`POSITION_SHIFT`), and no step sees the anchor's or a draft's K/V.
"""

# mypy: disable-error-code="misc, no-any-return"
# mlx.nn is untyped to mypy: its classes and calls are Any.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.gemma4_text import geglu
from mlx_lm.models.rope_utils import initialize_rope

from mlx_spec.draft_state import DraftState
from mlx_spec.errors import LoadError
from mlx_spec.models import Drafter, Target
from mlx_spec.types import Capabilities, Draft, DrafterCard, ModelRef

from .config import FULL, SLIDING, AssistantConfig, assistant_config
from .shared import SharedKV, TargetKV
from .target import Gemma4Target
from .weights import load_assistant

if TYPE_CHECKING:
    from mlx_spec.lane import Lane

POSITION_SHIFT = -1
"""Every step of a block rotates its query to position n + POSITION_SHIFT, n committed positions.

-1 is the last committed position (mlx-vlm, vLLM); 0 would be the anchor's own (transformers). The choice
moves acceptance only, never the reply.
"""


class AssistantAttention(nn.Module):
    """The query side of attention; keys and values are the target's."""

    def __init__(self, config: AssistantConfig, layer_type: str):
        super().__init__()
        text = config.text
        self.heads, self.width = text.num_attention_heads, text.width(layer_type)
        self.key_heads = text.kv_heads(layer_type)
        self.q_proj = nn.Linear(text.hidden_size, self.heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, text.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.width, eps=text.rms_norm_eps)
        rope = text.rope_parameters[layer_type]
        self.rope = initialize_rope(
            self.width,
            base=rope.rope_theta,
            traditional=text.rope_traditional,
            scaling_config=rope.model_dump(),
            max_position_embeddings=text.max_position_embeddings,
        )

    def queries(self, x: mx.array) -> mx.array:
        """x (B, 1, h) -> (B, heads, 1, D), not rotated yet."""
        # one position per row: (B, 1, heads * D) is (B, heads, 1, D) in memory already
        return self.q_norm(self.q_proj(x).reshape(x.shape[0], self.heads, 1, self.width))

    def __call__(self, queries: mx.array, shared: SharedKV) -> mx.array:
        """queries (B, heads, 1, D) -> (B, heads, 1, D)."""
        view = shared.view
        cache = view if view.bits is not None else None  # the view carries bits and group_size
        return scaled_dot_product_attention(queries, view.keys, view.values, cache=cache, scale=1.0, mask=shared.mask)

    def merge(self, attended: mx.array) -> mx.array:
        """attended (B, heads, 1, D) -> (B, 1, h)."""
        return self.o_proj(attended.reshape(attended.shape[0], 1, self.heads * self.width))


class AssistantMLP(nn.Module):
    """down(gelu(gate x) * up x)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """x (B, 1, h) -> (B, 1, h)."""
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class AssistantLayer(nn.Module):
    """A Gemma 4 layer without K/V, per-layer inputs or experts.

    What comes before and after the attention has one shape per batch size whatever the context, so both
    parts are compiled: a step is bound by the number of operations it launches, not by arithmetic.
    """

    def __init__(self, config: AssistantConfig, layer_type: str):
        super().__init__()
        h, eps = config.text.hidden_size, config.text.rms_norm_eps
        self.layer_type = layer_type
        self.self_attn = AssistantAttention(config, layer_type)
        self.mlp = AssistantMLP(h, config.text.intermediate_size)
        self.input_layernorm = nn.RMSNorm(h, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(h, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(h, eps=eps)
        self.post_feedforward_layernorm = nn.RMSNorm(h, eps=eps)
        self.layer_scalar = mx.ones((1,))
        self._before = mx.compile(self._queries, inputs=self.state)
        self._after = mx.compile(self._rest, inputs=self.state)

    def __call__(self, x: mx.array, shared: SharedKV, offset: int | mx.array) -> mx.array:
        """x (B, 1, h), offset the position of its query -> (B, 1, h)."""
        queries = self.self_attn.rope(self._before(x), offset=offset)
        return self._after(x, self.self_attn(queries, shared))

    def _queries(self, x: mx.array) -> mx.array:
        return self.self_attn.queries(self.input_layernorm(x))

    def _rest(self, x: mx.array, attended: mx.array) -> mx.array:
        x = x + self.post_attention_layernorm(self.self_attn.merge(attended))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


class AssistantStack(nn.Module):
    """The drafter's own table, layers and final norm."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        text = config.text
        self.embed_tokens = nn.Embedding(text.vocab_size, text.hidden_size)
        self.layers = [AssistantLayer(config, kind) for kind in text.layer_types]
        self.norm = nn.RMSNorm(text.hidden_size, eps=text.rms_norm_eps)


class CentroidHead(nn.Module):
    """Scores only the tokens of the best centroids; all others are impossible (-inf).

    The published form fills the others with (smallest score - 1), which leaves them a little probability
    that a draw over the candidates would not match; with -inf the reported law is the one drawn from, and
    the argmax is the same.
    """

    def __init__(self, config: AssistantConfig):
        super().__init__()
        self.top_k = config.centroid_intermediate_top_k
        self.centroids = nn.Linear(config.text.hidden_size, config.num_centroids, bias=False)
        self.token_ordering = mx.arange(config.text.vocab_size, dtype=mx.int32)

    def __call__(self, hidden: mx.array, table: nn.Module) -> mx.array:
        """hidden (B, h), table the drafter's embedding -> logits (B, V)."""
        C, V = self.centroids.weight.shape[0], self.token_ordering.shape[0]
        best = mx.argpartition(self.centroids(hidden), kth=-self.top_k, axis=-1)[:, -self.top_k :]
        ids = self.token_ordering.reshape(C, V // C)[best].reshape(hidden.shape[0], -1)
        scores = (_rows(table, ids) @ hidden[..., None]).squeeze(-1)
        return mx.put_along_axis(mx.full((hidden.shape[0], V), -mx.inf, scores.dtype), ids, scores, axis=-1)


def _rows(table: nn.Module, ids: mx.array) -> mx.array:
    """Rows `ids` (...,) of a table or head, dequantised when it is stored so: (..., h)."""
    if "scales" not in table:
        return table.weight[ids]
    biases = table.biases[ids] if table.get("biases") is not None else None
    return mx.dequantize(table.weight[ids], table.scales[ids], biases, table.group_size, table.bits, table.mode)


class Gemma4Assistant(nn.Module):
    """The network; parameter names are those of the published checkpoints."""

    def __init__(self, config: AssistantConfig):
        super().__init__()
        h, H = config.text.hidden_size, config.backbone_hidden_size
        self.width = 2 * H
        self.model = AssistantStack(config)
        self.pre_projection = nn.Linear(2 * H, h, bias=False)
        self.post_projection = nn.Linear(h, H, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(h, config.text.vocab_size, bias=False)
        if config.use_ordered_embeddings:
            self.masked_embedding = CentroidHead(config)

    def __call__(self, x: mx.array, shared: TargetKV, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """x (B, 1, 2H), embedding first -> what `logits` reads (B, 1, V or h), next hidden (B, 1, H)."""
        x = self.pre_projection(x)
        for layer in self.model.layers:
            x = layer(x, shared[layer.layer_type], offset)
        n = self.model.norm(x)
        return n if "masked_embedding" in self else self.head(n), self.post_projection(n)

    def logits(self, read: mx.array) -> mx.array:
        """What a call gave first -> logits (B, V)."""
        read = read.squeeze(1)
        return self.head(read) if "masked_embedding" in self else read

    # -- for kernels that run modules as one operation -------------------------------------------------

    def arrange(
        self, x: mx.array, shared: TargetKV, offset: int | mx.array
    ) -> tuple[list[mx.array], dict[str, Any]] | None:
        """A call's inputs and where it reads; None for several rows, packed K/V, or K/V of another dtype."""
        if not isinstance(offset, int):
            return None
        lent = [room for room in shared.lent() if room is not None and room.keys.dtype == x.dtype]
        return ([x], {"offset": offset, "lent": lent}) if len(lent) == len(shared.lent()) else None

    def describe(self, b: Any) -> None:
        """The same as `__call__`, written onto a blueprint."""
        for made in self.write(b, b.input(self.width)):
            b.output(made)

    def write(self, b: Any, x: int) -> tuple[int, int]:
        """What a call gives, as results on a blueprint."""
        kinds = list(dict.fromkeys(layer.layer_type for layer in self.model.layers))
        x = b.apply(x, self.pre_projection)
        for layer in self.model.layers:
            a, mlp = layer.self_attn, layer.mlp
            asked = b.normed(b.apply(b.normed(x, layer.input_layernorm), a.q_proj), a.q_norm)
            asked = b.turn(asked, a.heads, a.rope)
            read = b.look(kinds.index(layer.layer_type), asked, a.heads, a.key_heads, 1.0)
            x = b.combine("add", x, b.normed(b.apply(read, a.o_proj), layer.post_attention_layernorm))
            normed = b.normed(x, layer.pre_feedforward_layernorm)
            gate, up = b.apply(normed, mlp.gate_proj), b.apply(normed, mlp.up_proj)
            down = b.apply(b.combine("gelu", gate, up), mlp.down_proj)
            x = b.combine("add", x, b.normed(down, layer.post_feedforward_layernorm))
            x = b.weighted(x, layer.layer_scalar)
        n = b.normed(x, self.model.norm)
        read = n
        if "masked_embedding" not in self:
            read = b.apply(n, self.lm_head) if "lm_head" in self else b.read_out(n, self.model.embed_tokens)
        return read, b.apply(n, self.post_projection)

    def head(self, hidden: mx.array) -> mx.array:
        """Post-norm drafter hidden (..., h), (B, h) for centroids -> logits (..., V)."""
        if "masked_embedding" in self:
            return self.masked_embedding(hidden, self.lm_head if "lm_head" in self else self.model.embed_tokens)
        if "lm_head" in self:
            return self.lm_head(hidden)
        return self.model.embed_tokens.as_linear(hidden)


class GreedyChain(nn.Module):
    """A greedy draft of one row where kernels run it in one operation; else single steps draft.

    Args:
        assistant: its step.
        table, scale: the target's embedding, and the factor of its rows.
    """

    def __init__(self, assistant: Gemma4Assistant, table: nn.Module, scale: float):
        super().__init__()
        self.assistant, self.table, self.scale = assistant, table, scale

    def __call__(
        self, hidden: mx.array, token: mx.array, shared: TargetKV, offset: int, count: int, limit: int
    ) -> tuple[mx.array] | None:
        """hidden (1, 1, H), token (1, 1) -> `count` tokens (1, count), each below `limit`; None: not as one."""
        return None

    def arrange(
        self, hidden: mx.array, token: mx.array, shared: TargetKV, offset: int, count: int, limit: int
    ) -> tuple[list[mx.array], dict[str, Any]] | None:
        """A call's inputs and where it reads; None for centroids and what the assistant's own cannot read."""
        placed = None if "masked_embedding" in self.assistant else self.assistant.arrange(hidden, shared, offset)
        return placed and ([hidden, token], placed[1] | {"repeat": count, "limit": limit})

    def describe(self, b: Any) -> None:
        """One step; its token and hidden state are what the next one begins with."""
        hidden, token = b.input(self.assistant.width // 2), b.ids()
        embedded = b.weighted(b.looked_up(token, self.table), mx.array([self.scale]))
        read, onward = self.assistant.write(b, b.join(embedded, hidden))
        chosen = b.choose(read)
        b.feed(onward, hidden)
        b.feed(chosen, token)
        b.output(chosen)


class Gemma4Drafter(Drafter):
    """An assistant bound to a target. Holds weights only: what it needs of a request is in the lane.

    Attributes:
        chain: several steps of the assistant.
    """

    taps = ("hidden",)
    capabilities = Capabilities(history="last")
    networks = ("model", "chain")

    def __init__(self, card: DrafterCard, model: Gemma4Assistant, config: AssistantConfig, target: Gemma4Target):
        self.card = card
        self.model = model
        self.chain = GreedyChain(model, *target.table)
        self.config = config
        self.sources = {kind: target.sources[kind] for kind in dict.fromkeys(config.text.layer_types)}
        self._windows = {FULL: None, SLIDING: config.text.sliding_window}

    @classmethod
    def load(cls, ref: ModelRef, card: DrafterCard, target: Target) -> Gemma4Drafter:
        """Load the assistant in `ref`. Raises LoadError when it or `target` is of another kind."""
        if not isinstance(target, Gemma4Target):
            raise LoadError(
                f"assistant {ref.name}",
                found=f"a target of model_type {target.model_type!r}",
                expected="a Gemma 4 target, whose K/V the assistant reads",
                next_step="Pair it with the Gemma 4 model it was trained for",
                code="GM04",
            )
        config = assistant_config(ref.config, ref.path)
        drafter = cls(card, load_assistant(ref.path, config), config, target)
        drafter.ref = ref
        return drafter

    def make_state(self) -> DraftState:
        """Nothing: the hidden state comes with the lane, the K/V are the target's."""
        return DraftState()

    def propose(self, lane: Lane, budget: Sequence[int]) -> Draft:
        """Draft max(budget) tokens for every row in one lazy graph; rows with nothing committed get none."""
        hidden = lane.last_tap("hidden")
        counts = _counts(lane, budget)
        if hidden is None or lane.anchors is None or not any(counts):
            return Draft(mx.zeros((lane.size, 0), dtype=mx.int32), [0] * lane.size)
        at_once = self._at_once(lane, hidden, max(counts))
        if at_once is not None:
            return Draft(at_once, counts)
        step = self.stepper(lane)
        token, tokens, laws = lane.anchors, list[mx.array](), list[mx.array]()
        for i in range(max(counts)):
            logits, hidden = step(token, hidden)
            token, law = lane.draw(logits, i)
            tokens.append(token)
            if law is not None:
                laws.append(law)
        probs = mx.stack(laws, axis=1) if len(laws) == len(tokens) else None
        return Draft(mx.stack(tokens, axis=1), counts, probs)

    def _at_once(self, lane: Lane, hidden: mx.array, count: int) -> mx.array | None:
        """`count` tokens (1, count) by one operation; None where that does not do what single steps do."""
        limit, anchors = lane.greedy_limit, lane.anchors
        if limit is None or anchors is None or lane.size > 1 or self.config.text.vocab_size != lane.target.vocab_size:
            return None
        shared, offset = self._place(lane)
        begin = mx.expand_dims(hidden, 1).astype(self._activations), mx.expand_dims(anchors, 1)
        made = self.chain(*begin, shared, offset, count, limit)
        return None if made is None else made[0]

    @property
    def _activations(self) -> mx.Dtype:
        """Of the assistant, which may be cast after this was made: norms are never quantised."""
        return self.model.model.norm.weight.dtype

    def _place(self, lane: Lane) -> tuple[TargetKV, int | mx.array]:
        """What the rows of a lane attend to, and at which position, one for all where they are equal."""
        positions = [max(n + POSITION_SHIFT, 0) for n in lane.lengths]
        shared = TargetKV(lane.states, self.sources, positions, self._windows)
        same = all(p == positions[0] for p in positions)
        return shared, positions[0] if same else mx.array(positions, dtype=mx.int32)

    def stepper(self, lane: Lane) -> Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]:
        """One draft step over the lane as it stands: (token (B,), hidden (B, H)) -> (logits, hidden)."""
        shared, offset = self._place(lane)
        embed, dtype = lane.target.embed, self._activations

        def step(token: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
            x = mx.concatenate([embed(token).astype(dtype), hidden.astype(dtype)], axis=-1)
            read, hidden = self.model(x[:, None], shared, offset)
            return self.model.logits(read), hidden.squeeze(1)

        return step


def _counts(lane: Lane, budget: Sequence[int]) -> list[int]:
    """Tokens to draft per row: its budget, or 0 where there is no committed row to start from."""
    if not lane.fresh:
        return [0] * lane.size
    rows = zip(budget, lane.lengths, lane.fresh[-1].keep, strict=True)
    return [k if n and seen else 0 for k, n, seen in rows]

"""The MTP layer of MiMo-7B: from a hidden state and the next token to the next hidden state.

    row p:   x = input_proj([hidden_layernorm(h[p]), token_layernorm(embed(token[p + 1]))])
             y = decoder_layer(x), rotated to position p, attending to rows 0..p of this layer's own K/V
             out = final_layernorm(y);   logits = target's lm_head(out) guess token[p + 2]

Facts, and where they are from:
- order [hidden, embedding], the three norms around it, final_layernorm, no norm of its own before the
  target's lm_head, and an embedding of zeros in row 0: vLLM `models/mimo_mtp.py` (in Xiaomi's fork, for 0.7.3,
  as in upstream), SGLang `models/mimo_mtp.py`;
- the decoder layer is the target's kind of layer (biased q, k, v): both use their Qwen2DecoderLayer;
- h is the target's hidden state *before* its final norm: vLLM `models/mimo.py` returns the residual stream and
  norms in compute_logits. SGLang hands out the normed one; Xiaomi's README names vLLM as the engine they
  support. The choice moves acceptance only, never the reply;
- row p stands at position p: vLLM `v1/spec_decode/eagle.py` shifts the tokens by one and keeps the positions;
- later steps of a block get this layer's own output as h (the same file, method "mtp"). The layer was trained
  for one step, so acceptance falls with depth.

Tensors: `model.mtp_layers.0.*`, with the names of the modules below. mlx-lm's `sanitize` drops them, so a
converted checkpoint has none; further layers, where config.json counts more, are not used.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.mimo import ModelArgs, TransformerBlock

from mlx_spec import ModelRef
from mlx_spec.checkpoint import check_finite, load_tensors

from .validate import PREFIX


class MimoHead(TransformerBlock):  # type: ignore[misc]
    """One decoder layer behind a projection of (hidden, embedding)."""

    def __init__(self, args: ModelArgs):
        super().__init__(args)
        D, eps = args.hidden_size, args.rms_norm_eps
        self.token_layernorm = nn.RMSNorm(D, eps=eps)
        self.hidden_layernorm = nn.RMSNorm(D, eps=eps)
        self.input_proj = nn.Linear(2 * D, D, bias=False)
        self.final_layernorm = nn.RMSNorm(D, eps=eps)

    def __call__(self, hidden: mx.array, embedded: mx.array, cache: Any) -> mx.array:
        """hidden, embedded (B, S, D), appended to `cache` (B rows) -> (B, S, D)."""
        dtype = self.final_layernorm.weight.dtype  # norms are never quantised
        parts = [self.hidden_layernorm(hidden.astype(dtype)), self.token_layernorm(embedded.astype(dtype))]
        x = self.input_proj(mx.concatenate(parts, axis=-1))
        return self.final_layernorm(super().__call__(x, create_attention_mask(x, cache), cache))


def load_head(ref: ModelRef) -> MimoHead:
    """Build and fill the layer. Raises LoadError for tensors that are missing, misshapen or not finite."""
    weights = load_tensors(ref.path, lambda name: name.startswith(PREFIX))
    weights = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    head = MimoHead(ModelArgs.from_dict(dict(ref.config)))
    packed: Any = ref.config.get("quantization")
    if packed:
        sizes = {key: packed[key] for key in ("group_size", "bits")}
        nn.quantize(head, **sizes, class_predicate=lambda name, _: f"{name}.scales" in weights)
    head.load_weights(list(weights.items()), strict=True)  # names and shapes were checked by `validate`
    check_finite(weights, f"head of {ref.name}")
    head.eval()
    return head

"""Error and finding codes of the Gemma 4 plugin, in the shape of `mlx_spec.codes`."""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code("GM01", "A key of a Gemma 4 config.json that cannot be used", "files", ("config",)),
    Code("GM02", "An assistant whose tensors are not those of an assistant", "files", ("weights",)),
    Code("GM03", "A token_ordering that is no permutation of the vocabulary", "files", ("weights",)),
    Code("GM04", "An assistant loaded for a target that is no Gemma 4", "choose", ("drafter",)),
    Code("GM05", "A prompt with placeholders for images, audio or video", "request", ("config",)),
    Code("GM06", "A tiny checkpoint of an unknown variant or vocabulary size", "request", ("tiny",)),
    Code("GM10", "An assistant of another Gemma 4 line than its target", "choose", ("validate",)),
    Code("GM11", "Another hidden size than the target's", "choose", ("validate",)),
    Code("GM12", "Another vocabulary size than the target's", "choose", ("validate",)),
    Code("GM13", "A layer type for which the target stores no K/V", "choose", ("validate",)),
    Code("GM14", "Another head width than the target's", "choose", ("validate",)),
    Code("GM15", "Query heads that do not share the target's K/V heads evenly", "choose", ("validate",)),
    Code("GM16", "Another rotation than the target's", "choose", ("validate",)),
    Code("GM17", "Another sliding window than the target's", "choose", ("validate",)),
    Code("GM18", "A configuration no assistant has", "files", ("validate",)),
    Code("GM19", "A centroid head that does not split the vocabulary evenly", "files", ("validate",)),
    Code("GM20", "Assistant tensors that are missing or unexpected", "files", ("validate",)),
    Code("GM21", "Assistant tensors of another shape", "files", ("validate",)),
    Code("GM22", "Quantisation that config.json describes otherwise, or not at all", "files", ("validate",)),
    Code("GM23", "Tensors that no assistant has: the directory is something else", "choose", ("validate",)),
    Code("GM24", "A shorter context than the target's", "none", ("validate",)),
    Code("GM25", "A logit softcap that an assistant declares and nothing applies", "none", ("validate",)),
)

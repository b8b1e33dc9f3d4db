"""Error and finding codes of the Qwen plugin, in the shape of `mlx_spec.codes`.

QW01-19 target and configuration, QW20-39 MTP heads, QW40-59 DFlash drafters, QW60-79 conversion.
"""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code("QW01", "A key of a Qwen 3.5 config.json that cannot be used", "files", ("config",)),
    Code("QW02", "A prompt with placeholders for images or video", "request", ("target",)),
    Code("QW03", "Weights of a Qwen 3.5 target in a layout that cannot be read", "files", ("weights",)),
    Code("QW04", "A tiny checkpoint of an unknown variant or drafter", "request", ("tiny",)),
    Code("QW20", "An MTP head loaded for a target that is no Qwen 3.5", "choose", ("mtp",)),
    Code("QW21", "Tensors that do not make one whole MTP head", "files", ("mtp_files", "mtp_weights")),
    Code("QW22", "An MTP head for a target of another family or line", "choose", ("mtp_validate",)),
    Code("QW23", "An MTP head of another hidden size than the target's", "choose", ("mtp_validate",)),
    Code("QW24", "An MTP head of another vocabulary size than the target's", "choose", ("mtp_validate",)),
    Code("QW25", "A projection fc that does not take two hidden states", "files", ("mtp_validate",)),
    Code("QW26", "Tensors of an MTP head that are missing or unexpected", "files", ("mtp_validate",)),
    Code("QW27", "Tensors of an MTP head of another shape", "files", ("mtp_validate",)),
    Code("QW28", "An MTP head of another depth than declared, or of more than 8 layers", "files", ("mtp_validate",)),
    Code("QW29", "An MTP head with an embedding of its own", "choose", ("mtp_validate",)),
    Code("QW30", "An MTP head quantised in a way that cannot be read", "files", ("mtp_validate",)),
    Code("QW31", "An MTP head rotated otherwise than its target", "choose", ("mtp_validate",)),
    Code("QW32", "An MTP head trained on a trunk of another form", "choose", ("mtp_validate",)),
    Code("QW33", "Norms of an MTP head whose values contradict the label of their file", "none", ("mtp_validate",)),
    Code("QW34", "An MTP head of a shorter context than its target", "none", ("mtp_validate",)),
    Code("QW35", "A draft_vocab file that is no ranking of token ids", "request", ("mtp_output",)),
    Code("QW36", "A hidden size whose output rows cannot be packed", "request", ("mtp_output",)),
)

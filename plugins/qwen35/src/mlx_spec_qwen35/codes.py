"""Error and finding codes of the Qwen plugin, in the shape of `mlx_spec.codes`.

QW01-19 target and configuration, QW20-39 MTP heads, QW40-59 DFlash drafters, QW60-79 conversion.
"""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code("QW01", "A key of a Qwen 3.5 config.json that cannot be used", "files", ("config",)),
    Code("QW02", "A prompt with placeholders for images or video", "request", ("config",)),
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
    Code("QW40", "A key of a DFlash drafter's config.json that cannot be used", "files", ("dflash_config",)),
    Code("QW41", "A DFlash drafter for a target of another family", "choose", ("dflash_validate",)),
    Code("QW42", "A DFlash drafter of another hidden size than its target", "choose", ("dflash_validate",)),
    Code("QW43", "A DFlash drafter of another vocabulary size than its target", "choose", ("dflash_validate",)),
    Code("QW44", "A drafter for a target with another number of layers", "choose", ("dflash_validate",)),
    Code(
        "QW45", "Layer numbers that do not increase, or that its own target does not have", "files", ("dflash_config",)
    ),
    Code("QW46", "A mask token outside the vocabulary", "files", ("dflash_config",)),
    Code("QW47", "A block size or width cap that leaves nothing to draft", "files", ("dflash_config",)),
    Code("QW48", "Layer types, or the sliding window they need, that make no stack", "files", ("dflash_config",)),
    Code("QW49", "DFlash query heads that do not share its K/V heads evenly", "files", ("dflash_config",)),
    Code("QW50", "A DFlash drafter with an embedding or output head of its own", "files", ("dflash_validate",)),
    Code("QW51", "DFlash tensors that are missing or unexpected", "files", ("dflash_validate",)),
    Code("QW52", "DFlash tensors of another shape", "files", ("dflash_validate",)),
    Code(
        "QW53", "A quantised DFlash drafter whose config.json says otherwise, or nothing", "files", ("dflash_validate",)
    ),
    Code("QW54", "A DSpark drafter, which this plugin does not read", "install", ("dflash_validate",)),
    Code("QW55", "DFlash2 keys that are missing or do not fit together", "files", ("dflash_config",)),
    Code("QW56", "A DFlash drafter loaded for a target that is no Qwen 3.5", "choose", ("dflash",)),
    Code("QW58", "A DFlash drafter of shorter context than its target", "none", ("dflash_validate",)),
    Code("QW60", "An MTP head that cannot be extracted, or not as asked", "files", ("split",)),
)

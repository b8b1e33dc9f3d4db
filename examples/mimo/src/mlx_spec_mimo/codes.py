"""Error and finding codes of the MiMo plugin, in the shape of `mlx_spec.codes`."""

from __future__ import annotations

from mlx_spec.codes import Code

CODES = (
    Code("MM01", "A head loaded for a target that is no MiMo", "choose", ("drafter",)),
    Code("MM10", "A MiMo head for a target of another family", "choose", ("validate",)),
    Code("MM11", "A head of a MiMo of another shape than the target", "choose", ("validate",)),
    Code("MM12", "Head tensors that are missing or unexpected", "files", ("validate",)),
    Code("MM13", "Head tensors of another shape", "files", ("validate",)),
)

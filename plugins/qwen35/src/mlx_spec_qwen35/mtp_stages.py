"""What `spec inspect` says of an MTP head: shapes, norms, quantisation; from files, no mlx here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mlx_spec.errors import Finding
from mlx_spec.head_stages import Stage
from mlx_spec.types import DrafterCard, ModelRef

from .mtp_config import HeadConfig, head_config
from .mtp_files import HeadFiles, find_head, norm_form
from .mtp_inventory import packed_modules, parts_of
from .mtp_validate import NORM_CODES, QUANTISATION_CODES, validate


def head_stages(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Stage]:
    """The three stages, in order. LoadError for an unusable config.json."""
    files = find_head(drafter)
    if files is None:
        return []
    config, findings = head_config(drafter.config, drafter.path), validate(target, drafter, card)
    return [_shapes(config, files, findings), _norms(files, findings), _quantisation(config, files, findings)]


def _shapes(config: HeadConfig, files: HeadFiles, findings: Sequence[Finding]) -> Stage:
    apart = (*NORM_CODES, *QUANTISATION_CODES)
    wrong = [f for f in findings if f.code not in apart and f.severity == "error"]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        return _as_stage("shapes", wrong[0], more)
    layers = f"{files.depth} layer{'s' * (files.depth > 1)}"
    experts = f", {config.text.num_experts} experts each" if config.text.num_experts else ""
    return Stage("shapes", "ok", f"{layers} of width {config.text.hidden_size}{experts}, as the trunk has them")


def _norms(files: HeadFiles, findings: Sequence[Finding]) -> Stage:
    doubt = next((f for f in findings if f.code in NORM_CODES), None)
    if doubt is not None:
        return Stage("norms", "open", doubt.found, doubt.next_step)
    form = norm_form(files)
    meaning = "stored as they are used" if form.form == "weights" else "stored as deltas, 1 is added on loading"
    return Stage("norms", "ok", f"{meaning} ({form.reason})")


def _quantisation(config: HeadConfig, files: HeadFiles, findings: Sequence[Finding]) -> Stage:
    wrong = next((f for f in findings if f.code in QUANTISATION_CODES), None)
    if wrong is not None:
        return _as_stage("quantisation", wrong)
    packed = packed_modules(config, files.depth, parts_of(files.index)[0])
    if not packed:
        kinds = Counter(info.dtype for info in files.index.values())
        return Stage(
            "quantisation", "ok", f"{kinds.most_common(1)[0][0]}; packed to 4 bits on loading unless turned off"
        )
    counts = Counter(f"{how.bits} bits in groups of {how.group_size}" for how in packed.values())
    return Stage("quantisation", "ok", ", ".join(f"{count} matrices in {how}" for how, count in counts.most_common()))


def _as_stage(name: str, finding: Finding, more: str = "") -> Stage:
    found = f"{finding.subject}: {finding.found}, expected {finding.expected} ({finding.code}){more}"
    return Stage(name, "no", found, finding.next_step)

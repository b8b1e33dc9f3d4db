"""The hooks of mlx-spec, grouped by life-cycle. Types are imported for type checkers only.

Rules: no default values in signatures; an implementation may take fewer arguments; a firstresult hook
returns None to say "not mine". Per-pair callers are bound once to the owner and core's defaults, so one
plugin can never answer for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

    from .errors import Finding
    from .head_stages import Stage
    from .lane import Lane
    from .models import Drafter, Target
    from .probe import ProbePlan
    from .registry import Register
    from .types import Draft, DrafterCard, ExactnessReport, ModelRef, Side, Verification

PROJECT = "mlx_spec"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- start-up: every plugin is asked -----------------------------------------------------------------


@hookspec
def spec_register(register: Register) -> None:
    """Claim model_types, drafter kinds and kernels. Called once at start-up; must not import mlx."""


@hookspec
def spec_register_commands(cli: click.Group) -> None:
    """Add commands to `spec`; a name already taken is refused."""


# -- load: only the plugin that claimed the model_type is asked ----------------------------------------


@hookspec(firstresult=True)
def spec_load_target(ref: ModelRef, config: Mapping[str, object]) -> Target | None:
    """Build the target that `config` describes; every weight is used or listed as dropped."""


@hookspec(firstresult=True)
def spec_model_classes(ref: ModelRef, config: Mapping[str, object]) -> tuple[type, type] | None:
    """The (model class, arguments class) a target is built from, as mlx-lm's loader wants them.

    A plugin whose modules are not those of mlx-lm answers it. `spec inspect` builds the modules, without weights, to
    say which kernels would run them; `spec convert` reads a model_type with them that mlx-lm does not define. The
    arguments class has `from_dict(config)`; the model has `sanitize(weights)` where names or layouts differ, and
    `quant_predicate` and `cast_predicate` where not everything is packed or cast.
    """


@hookspec(firstresult=True)
def spec_load_drafter(ref: ModelRef, card: DrafterCard, target: Target) -> Drafter | None:
    """Build the drafter that `card` describes, bound to `target`."""


@hookspec(firstresult=True)
def spec_check_prompt(ref: ModelRef, config: Mapping[str, object], tokens: Sequence[int]) -> None:
    """Refuse prompt ids that the target of `config` cannot serve, as `Target.check_prompt` does.

    Raises UsageError. Asked before any weights are loaded, of checkpoints that also serve images, audio or video: a
    prompt with their placeholders need not wait for the weights to be refused.
    """


# -- pairing: every plugin is asked, all findings are kept ---------------------------------------------


@hookspec
def spec_validate_pair(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> list[Finding] | None:
    """List what makes this pair wrong (error), slow (warning) or notable (note), from files alone.

    Called before any weights are loaded; read config.json and safetensors headers only.
    """


# -- one round: owner only; core's defaults come last --------------------------------------------------


@hookspec(firstresult=True)
def spec_propose(lane: Lane, budget: Sequence[int]) -> Draft | None:
    """Guess at most budget[b] tokens after each row's anchor; may not touch the target's state."""


@hookspec(firstresult=True)
def spec_verify(lane: Lane, draft: Draft) -> Verification | None:
    """Run the target once over [anchor, *draft.tokens]; give numbers, never decide."""


@hookspec(firstresult=True)
def spec_rollback(lane: Lane, side: Side, keep: Sequence[int]) -> Sequence[int] | None:
    """Forget `side`'s rows past keep[b]; return the lengths (B,) it now holds. Core checks the target's."""


# -- trust and tools -----------------------------------------------------------------------------------


@hookspec(firstresult=True)
def spec_probe_exactness(target: Target, drafter: Drafter, plan: ProbePlan) -> ExactnessReport | None:
    """Compare real rounds with single steps; core's default drives the three hooks above."""


@hookspec(firstresult=True)
def spec_inspect_head(target: ModelRef, drafter: ModelRef, card: DrafterCard) -> Sequence[Stage] | None:
    """Say of a drafter head, from files alone, what its shapes, norms and quantisation are worth.

    `spec inspect` asks the plugin that reads the head: one `mlx_spec.head_stages.Stage` each for "shapes", "norms" and
    "quantisation", with what was found and what to do. drafter: the directory of the head, the target's own for a
    head inside it.
    """


@hookspec(firstresult=True)
def spec_split_drafter(ref: ModelRef, out: Path, options: Mapping[str, object]) -> Path | None:
    """Extract a drafter head out of a checkpoint into the drafter directory `out`.

    `spec split-mtp` calls it, and `spec convert --keep-mtp`; the plugin that serves the model_type is asked. `out` is a
    folder of core's, which gets its name when it is complete: write config.json and weights into it, best with
    `mlx_spec.conversion.head.write_head`, and return it. Read only the tensors of the head.

    options: q_bits, q_group_size, q_mode (None: keep weights as they are), dtype of floats (None: as stored),
    block_size (L; None: the head's own), metadata (text for the weight file: the record of the trunk) and
    tick(nbytes), told what is done.
    """

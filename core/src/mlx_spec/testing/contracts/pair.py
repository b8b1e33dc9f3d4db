"""PairContract: a drafter that fits loads and drafts; another is refused by name and both values."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from ...errors import PairError, SpecError
from ..faults import broken, require
from .base import Contract, loaded_target, needs_given, tiny_folders

if TYPE_CHECKING:
    from ...errors import Finding
    from ..writers import TinyPair

ALWAYS_FREE = {
    "transformers_version": "says who wrote the file",
    "dtype": "the loader reads the tensors' own",
    "torch_dtype": "the loader reads the tensors' own",
    "_name_or_path": "says where the file came from",
    "architectures": "model_type decides",
    "attention_dropout": "nothing is dropped when decoding",
    "initializer_range": "weights are loaded",
    "use_cache": "core keeps the state",
    "pad_token_id": "the target's decide",
    "bos_token_id": "the target's decide",
    "eos_token_id": "the target's decide",
}
VALIDATE = "spec_validate_pair: compare the field with the target's, or with what the drafter can run"


@dataclass(frozen=True, slots=True)
class Mutation:
    """A wrong value for one field of the drafter's config.json.

    Attributes:
        value: what is written instead.
        names: what the message must hold; default: the wrong value and the right one.
        severity: "error" refuses the pair, "warning" and "note" only say so.
    """

    value: Any
    names: tuple[str, ...] = ()
    severity: str = "error"


class PairContract(Contract):
    """What pairing promises. Fixture: `folders` (target and drafter directories).

    Every field of the drafter's config.json is changed, one at a time, and the pair must then be refused.

    Attributes:
        mutations: dotted field -> Mutation or wrong value, where the kit's own choice does not serve.
        free: dotted field -> why any value of it is right; a trailing ".*" covers a section.
        stranger: family whose targets the drafter must refuse; None for a drafter that serves every family.
    """

    mutations: ClassVar[Mapping[str, Any]] = {}
    free: ClassVar[Mapping[str, str]] = {}
    stranger: ClassVar[str | None] = "llama"
    capabilities: ClassVar[frozenset[str] | set[str] | None] = frozenset()

    def test_a_sound_pair_has_no_errors(self, folders: TinyPair) -> None:
        """The pair as written is accepted."""
        findings = asked(*both(folders))
        errors = [f for f in findings if f.severity == "error"]
        require(
            not errors,
            "pair of the tiny target and its drafter",
            found=str(errors[0]) if errors else "",
            expected="no findings that are errors",
            look="spec_validate_pair, or the writer of the tiny checkpoints",
        )

    def test_the_pair_loads_proves_itself_and_drafts(self, folders: TinyPair) -> None:
        """mlx_spec.load of both directories: probe passed, drafting on, the plain reply."""
        from ... import generate, load

        target, drafter = both(folders)
        pair = load(str(target), str(drafter))
        require(
            pair.plan.active,
            "plan of the loaded pair",
            found=f"no drafting: {pair.plan.reason}",
            expected="drafting on, after the exactness probe",
            look="TargetContract: a block must equal single steps; and the drafter's block size",
        )
        prompt = [7, 9, 8, 7, 9, 8, 7, 9]
        found = generate(pair, prompt, None, 12, ignore_eos=True, adaptive=False)
        plain = generate(pair, prompt, None, 12, ignore_eos=True, speculative=False)
        require(
            found.token_ids == plain.token_ids,
            "reply of the loaded pair",
            found=found.token_ids,
            expected=plain.token_ids,
            look="TargetContract and DrafterContract, which narrow it down",
        )

    def test_every_changed_field_is_refused_by_both_values(self, folders: TinyPair, tmp_path: Path) -> None:
        """A wrong value in each field of the drafter's config.json is refused, naming found and expected."""
        target, drafter = both(folders)
        config = json.loads((drafter / "config.json").read_text())
        copy = tmp_path / "drafter"
        shutil.copytree(drafter, copy)
        tried, faults = 0, []
        for field, right in leaves(config):
            mutation = self.mutation_of(field, right)
            if mutation is None:
                continue
            tried += 1
            (copy / "config.json").write_text(json.dumps(changed(config, field, mutation.value)))
            fault = refusal_fault(target, copy, field, right, mutation)
            if fault:
                faults.append(fault)
        require(
            not faults,
            f"pairs with one wrong field in the drafter's config.json ({len(faults)} of {tried} fields)",
            found="\n  ".join(["", *faults]),
            expected="each refused with a message that names the wrong and the right value",
            look=f"{VALIDATE}. A field that may differ goes into `free` with the reason",
        )
        require(
            tried > 0, "fields tried", found="none", expected="some", look="`free` of your test class covers everything"
        )

    def test_declared_fields_exist(self, folders: TinyPair) -> None:
        """`mutations` and `free` name fields of the config, and every free field says why."""
        _, drafter = both(folders)
        known = [field for field, _ in leaves(json.loads((drafter / "config.json").read_text()))]
        for field in (*self.mutations, *self.free):
            require(
                any(covers(field, name) for name in known),
                f"field {field!r} of `mutations` or `free`",
                found="no such field in the drafter's config.json",
                expected=f"one of {', '.join(known)}",
                look="the spelling in your test class, or the writer of the tiny checkpoints",
            )
        empty = [field for field, reason in self.free.items() if not reason.strip()]
        require(
            not empty,
            "free fields",
            found=f"no reason for {empty}",
            expected="a reason each",
            look="`free` of your class",
        )

    @needs_given("stranger", "whether targets it was not made for are refused")
    def test_a_target_of_another_family_is_refused(
        self, folders: TinyPair, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """The drafter with a target it was not made for: refused before or while loading, by both names."""
        stranger = tiny_folders(tmp_path_factory, str(self.stranger), {}, 5).target
        _, drafter = both(folders)
        fault = refusal_fault(stranger, drafter, "model_type of the target", "", Mutation("", (model_type(stranger),)))
        require(
            not fault,
            f"pair of a {self.stranger} target and this drafter",
            found=fault,
            expected="a refusal that names the target's model_type",
            look="spec_validate_pair: first ask whether the target's model_type is one the drafter was made for",
        )

    def test_validation_reads_no_weights(self, folders: TinyPair) -> None:
        """Pairing looks at config.json and tensor headers; it imports no mlx."""
        code = (
            "import sys\n"
            "from mlx_spec.loading import choose_drafter, open_ref, validate_pair\n"
            "choice = choose_drafter(sys.argv[2], None, {})\n"
            "validate_pair(open_ref(sys.argv[1]), choice)\n"
            "print([m for m in ('mlx.core', 'mlx_lm', 'torch') if m in sys.modules])\n"
        )
        target, drafter = both(folders)
        command = [sys.executable, "-c", code, str(target), str(drafter)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["nothing"])[-1]
        require(
            found == "[]",
            "imports while the pair is validated",
            found=found,
            expected="[]: neither mlx nor mlx_lm",
            look="spec_validate_pair and detect: read files with mlx_spec.checkpoint, import mlx only to load",
        )

    def mutation_of(self, field: str, right: Any) -> Mutation | None:
        """What to write into `field`; None when its value is free."""
        given = next((v for name, v in self.mutations.items() if name == field), None)
        if given is not None:
            return given if isinstance(given, Mutation) else Mutation(given)
        if any(covers(name, field) for name in (*self.free, *ALWAYS_FREE)):
            return None
        return Mutation(another(right))


# -- fields of a config ----------------------------------------------------------------------------------


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted field, value) of everything that is no section."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def covers(declared: str, field: str) -> bool:
    """Whether a declared name stands for `field`: itself, its section, or its last part anywhere."""
    if declared.endswith(".*"):
        return field.startswith(declared[:-1])
    return field == declared or (declared in ALWAYS_FREE and field.rpartition(".")[2] == declared)


def another(value: Any) -> Any:
    """A value of the same type that is wrong."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1 if value < 2 else 2 * value
    if isinstance(value, float):
        return value * 3 + 0.125
    if isinstance(value, str):
        return f"{value}_other"
    if isinstance(value, list):
        return [another(v) for v in value] if value else [1]
    return 3


def changed(config: Mapping[str, Any], field: str, value: Any) -> dict[str, Any]:
    """A copy of the config with one field changed."""
    copy: dict[str, Any] = json.loads(json.dumps(config))
    *sections, key = field.split(".")
    place = copy
    for section in sections:
        place = place[section]
    place[key] = value
    return copy


# -- asking ----------------------------------------------------------------------------------------------


def both(folders: TinyPair) -> tuple[Path, Path]:
    """Target and drafter directory."""
    if folders.drafter is None:
        broken(
            "folders",
            found="no drafter directory",
            expected="one",
            look="the writer of your family, or the fixture `folders`",
        )
    return folders.target, folders.drafter


def model_type(path: Path) -> str:
    """model_type of a directory."""
    return str(json.loads((path / "config.json").read_text())["model_type"])


def asked(target: Path, drafter: Path) -> list[Finding]:
    """Findings of every plugin about the pair; raises PairError when one is an error."""
    from ...loading import choose_drafter, open_ref, validate_pair

    choice = choose_drafter(str(drafter), None, {})
    if choice is None:
        raise RuntimeError("a drafter directory was given")
    return validate_pair(open_ref(str(target)), choice)


def refusal_fault(target: Path, drafter: Path, field: str, right: Any, mutation: Mutation) -> str:
    """What is wrong with how a wrong field is refused, "" when nothing is."""
    try:
        said = list(asked(target, drafter))
        if mutation.severity == "error":
            _load(target, drafter)
            return f"{field}: {mutation.value!r} instead of {right!r} was accepted"
        texts = [str(f) for f in said if f.severity == mutation.severity]
    except PairError as error:
        texts = [str(f) for f in error.findings]
    except SpecError as error:
        texts = [str(error)]
    except Exception as error:  # the author's code: what it raised is what is reported
        return f"{field}: {mutation.value!r} raised {type(error).__name__}: {error}, not a message for a person"
    wanted = mutation.names or tuple(str(v) for v in (mutation.value, right))
    if any(all(word in text for word in wanted) for text in texts):
        return ""
    missing = [word for word in wanted if not any(word in text for text in texts)]
    named = " and ".join(missing or wanted)
    return f"{field} = {mutation.value!r}: the message does not name {named}: {(texts or ['nothing was said'])[0]}"


def _load(target: Path, drafter: Path) -> None:
    from ...loading import choose_drafter, load_drafter

    choice = choose_drafter(str(drafter), None, {})
    if choice is not None:
        load_drafter(choice, loaded_target(target))

"""`spec generate`: stream a reply, then say what speculation did for it."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ..errors import RefusedError, UsageError, shorten, visible
from .options import PairOptions, load_pair, pair_options, read_pair_options
from .output import note, print_json, progress, speaking
from .values import NUMBER, WHOLE, Whole

if TYPE_CHECKING:
    from ..pair import Pair
    from ..request import Request, Result
    from ..sampling import Sampling

# No sign, no underscore, no digit of another script; more digits than any vocabulary needs are no id.
_ID = re.compile(r"[ \t\n]*[0-9]{1,18}[ \t\n]*")
_IDS = re.compile(rf"{_ID.pattern}(,{_ID.pattern})*")
WARM_SECONDS, WARM_TURNS = 0.2, 20  # of both paths before a comparison: one turn at least, and no more than these
DEMO_PROMPT = "def encode(text):\n    if isinstance(text"


@click.command("generate")
@pair_options
@click.option(
    "-p",
    "--prompt",
    help="Prompt text; - reads standard input, less a line break at its end. Empty text is what the tokenizer begins "
    "every text with.",
)
@click.option("--prompt-file", type=click.Path(dir_okay=False), help="Read the prompt from a file, as - does.")
@click.option("--prompt-ids", help="Token ids, comma-separated or a JSON list.")
@click.option("-n", "--max-tokens", type=Whole(0), default=256, show_default=True, help="Longest reply.")
@click.option("--temp", "temperature", type=NUMBER, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=NUMBER, default=1.0, show_default=True, help="Sample from the likeliest share of it all.")
@click.option("--top-k", type=WHOLE, default=0, show_default=True, help="Sample from so many tokens; 0: from all.")
@click.option("--min-p", type=NUMBER, default=0.0, show_default=True, help="Least share of the likeliest token's.")
@click.option("--seed", type=WHOLE, help="Makes sampling repeatable; selects --acceptance coupled.")
@click.option(
    "--acceptance",
    type=click.Choice(["rejection", "coupled"]),
    help="What drafts keep under sampling: the distribution, or with --seed the very tokens of plain sampling. "
    "Default: coupled with --seed, else rejection.",
)
@click.option("--repetition-penalty", type=NUMBER, help="Divides scores of tokens already there; 1 changes nothing.")
@click.option("--presence-penalty", type=NUMBER, help="Taken off the score of tokens already there.")
@click.option("--frequency-penalty", type=NUMBER, help="The same, for each time they are there.")
@click.option("--min-tokens", type=WHOLE, default=0, help="No end or stop before this many reply tokens.")
@click.option("--stop", multiple=True, help="Stop string; may be given several times.")
@click.option("--logprobs", type=WHOLE, help="Log-probabilities with this many alternatives (--json).")
@click.option("--ignore-eos", is_flag=True, help="Go on past the model's end ids.")
@click.option("--fixed", is_flag=True, help="Always draft the full width (no governor).")
@click.option("--no-chat-template", is_flag=True, help="Use the prompt as it is.")
@click.option(
    "--compare/--no-compare",
    default=None,
    help="Also decode plainly, and compare tokens and speed. Default: for bundled pairs alone.",
)
@click.option("--profile", is_flag=True, help="Time of every phase of a round (each phase then waits for its result).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(**values: Any) -> None:
    """Generate text with a target, drafted ahead by its drafter; the tokens are the target's own.

    The reply goes to standard output, what is said about it to standard error.
    """
    chosen = read_pair_options(values)
    text = read_prompt(values, chosen.demo is not None)
    sampling = _sampling(values, chosen)
    if chosen.demo and text == DEMO_PROMPT:
        note(f"no prompt given (-p TEXT; -p - reads standard input): continuing\n{DEMO_PROMPT}")
    refuse_early(chosen, values, text)
    adaptive = not values["fixed"] and chosen.adaptive is not False
    made: list[tuple[Request, list[int], str]] = []

    def check(pair: Pair) -> None:
        """Refuse what this target cannot serve, before the probe."""
        from ..intake import check_request

        prompt, said = encode_prompt(pair, values, text)
        made.append((check_request(_request(prompt, sampling, values, adaptive), pair), prompt, said))

    with progress("loading and probing") as steps:
        pair = load_pair(values, chosen, steps, check)
    ((request, prompt, said),) = made
    unshown = "--logprobs are shown with --json" if values["logprobs"] is not None and not values["as_json"] else ""
    for line in [pair.plan.line(), *(f"note: {told}" for told in (*pair.plan.notes, said, unshown) if told)]:
        note(line)
    if values["profile"]:
        from ..diagnostics import force_profiling

        force_profiling()
    compare = values["compare"] if values["compare"] is not None else chosen.demo is not None
    if compare:
        _warm_up(pair, prompt)
    result: Result | None = None
    try:
        result = _run(pair, request, values["as_json"])
        plain = _plain(pair, prompt, sampling, values, result) if compare else None
    except KeyboardInterrupt as stopped:
        if (known := stopped.result if isinstance(stopped, Interrupted) else result) is not None:
            _report(pair, known, None, values)
        raise
    _report(pair, result, plain, values)
    if result.finish_reason == "error":
        raise RefusedError(
            "reply", found=result.error, expected="a complete reply", next_step="See the message above", code="R10"
        )


def read_prompt(values: dict[str, Any], demo: bool) -> str | list[int]:
    """The one prompt source that was given; the demo has a prompt of its own."""
    given = [name for name in ("prompt", "prompt_file", "prompt_ids") if values.get(name) is not None]
    if len(given) > 1:
        flags = " and ".join("--" + name.replace("_", "-") for name in given)
        raise UsageError("prompt", found=f"{flags} together", expected="one of them", next_step="Drop one", code="U31")
    if not given:
        if demo:
            return DEMO_PROMPT
        raise UsageError(
            "prompt",
            found="none",
            expected="-p TEXT (-p - reads standard input), --prompt-file or --prompt-ids",
            next_step="Give one of them",
            code="U35",
        )
    if given == ["prompt_ids"]:
        return _parse_ids(values["prompt_ids"])
    if given == ["prompt_file"]:
        return _read_text(values["prompt_file"])
    return _read_text(None) if values["prompt"] == "-" else values["prompt"]


def _read_text(name: str | None) -> str:
    """The prompt in a file, or on standard input when it has no name."""
    from ..promptfile import read_prompt_file, read_standard_input, why_not

    try:
        return read_standard_input() if name is None else read_prompt_file(name)
    except (OSError, ValueError) as exc:
        raise UsageError(
            "prompt on standard input" if name is None else f"--prompt-file {visible(name)}",
            found=why_not(exc),
            expected="readable UTF-8 text",
            next_step="Check the encoding" if name is None else "Check the path and the encoding",
            code="U33",
        ) from exc


def _parse_ids(text: str) -> list[int]:
    """Ids as they are printed: decimal digits with single commas between, or the same as a JSON list."""
    inside = text.strip()
    if inside.startswith("[") and inside.endswith("]"):
        inside = inside[1:-1]
    if not inside.strip():
        return []  # refused as a prompt without tokens
    if not _IDS.fullmatch(inside):
        wrong = next((part.strip() for part in inside.split(",") if not _ID.fullmatch(part)), inside)
        raise UsageError(
            "--prompt-ids",
            found=f"{shorten(wrong)!r} in {shorten(text)!r}"
            if wrong
            else f"nothing between two commas of {shorten(text)!r}",
            expected="decimal integers with single commas between, or a JSON list of them",
            next_step="Correct them, e.g. 2,17,9",
            code="U34",
        )
    return [int(part) for part in inside.split(",")]


def refuse_early(chosen: PairOptions, values: dict[str, Any], prompt: str | list[int]) -> None:
    """UsageError for a prompt that the target's files show to be none, before weights are loaded.

    Only checkpoints that serve media besides text are asked about it; for others the tokenizer is read once, with the
    weights.
    """
    from ..heads import text_section
    from ..intake import check_prompt, no_tokenizer
    from ..loading import open_ref
    from ..plugins import get_manager
    from ..tokenizer import lacking, load_tokenizer

    ref = open_ref(chosen.target)
    if isinstance(prompt, str) and lacking(ref.path):
        raise no_tokenizer()
    if not isinstance(prompt, str) and isinstance(vocab_size := text_section(ref.config).get("vocab_size"), int):
        check_prompt(prompt, vocab_size, len(prompt) + 1)  # how long it may be is the target's to say
    if not any(re.match(r"(vision|image|video|audio)_(config|token)", key) and ref.config[key] for key in ref.config):
        return
    owner = get_manager().registry.target_owner(ref.model_type)
    tokenizer = load_tokenizer(ref.path) if owner is not None and isinstance(prompt, str) else None
    if isinstance(prompt, str):
        if tokenizer is None:
            return  # told when the pair is there
        prompt = tokenizer.prompt(prompt, template=not values.get("no_chat_template")).ids
    if owner is not None:
        get_manager().owner_call("spec_check_prompt", owner)(ref=ref, config=ref.config, tokens=prompt)


def encode_prompt(pair: Pair, values: dict[str, Any], prompt: str | list[int]) -> tuple[list[int], str]:
    """Token ids of the prompt, through the chat template unless it is turned off, and what to say of them."""
    from ..api import encode

    if not isinstance(prompt, str) or pair.tokenizer is None:
        return encode(pair, prompt), ""
    made = pair.tokenizer.prompt(prompt, template=not values.get("no_chat_template"))
    return made.ids, made.note


def _sampling(values: dict[str, Any], chosen: PairOptions) -> Sampling:
    from ..sampling import Sampling

    names = (
        "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_tokens", "logprobs",
    )  # fmt: skip
    given = {name: values[name] for name in names if values.get(name) is not None}
    acceptance: Any = values.get("acceptance") or chosen.acceptance
    return Sampling(**given, acceptance=acceptance, stop=tuple(values["stop"]))


def _request(prompt: list[int], sampling: Sampling, values: dict[str, Any], adaptive: bool) -> Request:
    """The reply asked for; made before those that warm up, so that its number is the first."""
    from ..request import Request

    return Request(prompt, sampling, values["max_tokens"], ignore_eos=values["ignore_eos"], adaptive=adaptive)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a reply that has begun; `result` is what there is of it."""

    def __init__(self, result: Result):
        super().__init__()
        self.result = result


def _run(pair: Pair, request: Request, quiet: bool) -> Result:
    """Generate the reply, its text on standard output as it comes unless `quiet`."""
    from ..diagnostics import held
    from ..engine import Engine

    with held() as profile:
        handle = Engine(pair, max_rows=1).submit(request)
        size = len(request.prompt)
        try:
            with speaking(lambda: f"reading the prompt: {handle.prompt_done} of {size} tokens") as silence:
                for event in handle:
                    silence()
                    if not quiet and event.text:
                        sys.stdout.write(event.text)
                        sys.stdout.flush()
        except KeyboardInterrupt:
            handle.cancel()  # where it was the writing that was interrupted, and the engine goes on
            result = replace(handle.result(), finish_reason="cancelled", error="")
            if not result.token_ids:
                raise
            _end_line(quiet)
            raise Interrupted(result) from None
        result = handle.result()
    _end_line(quiet)
    for line in profile:
        note(line)
    return result


def _end_line(quiet: bool) -> None:
    """The reply's last line break."""
    if not quiet:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _warm_up(pair: Pair, prompt: list[int]) -> None:
    """Run both paths briefly, so that the comparison times neither kernel building nor first touches.

    The first dozens of steps of a process are slower than later ones, which a small model has time for here.
    """
    from ..api import generate
    from ..diagnostics import held

    end = time.monotonic() + WARM_SECONDS
    with held():
        for _ in range(WARM_TURNS):
            for speculative in (False, True):
                generate(pair, prompt, None, 8, ignore_eos=True, adaptive=False, speculative=speculative)
            if time.monotonic() > end:
                return


def _plain(pair: Pair, prompt: list[int], sampling: Sampling, values: dict[str, Any], done: Result) -> Result:
    """The same reply decoded plainly in the same process, for its speed and its tokens."""
    from ..api import generate
    from ..diagnostics import held

    if not values["as_json"]:
        note("decoding the same reply plainly, to compare ...")
    with held():
        return generate(pair, prompt, sampling, len(done.token_ids), ignore_eos=True, speculative=False)


def _report(pair: Pair, result: Result, plain: Result | None, values: dict[str, Any]) -> None:
    verdict = _verdict(result, plain)
    if values["as_json"]:
        out = result.as_dict()
        if plain is not None:
            out["plain"] = {"predicted_per_second": plain.timings.predicted_per_second, "token_ids_equal": verdict[0]}
        print_json(out)
        return
    for line in summary(pair, result, plain, verdict[1], values["max_tokens"]):
        note(line)


def _verdict(result: Result, plain: Result | None) -> tuple[bool | None, str]:
    if plain is None:
        return None, "not compared in this run (--compare does)"
    if result.speculation.law == "rejection" and result.speculation.active:
        return None, "rejection keeps the distribution, not the tokens: nothing to compare one to one"
    equal = result.token_ids == plain.token_ids
    if equal:
        return True, f"all {len(result.token_ids)} token ids equal plain decoding"
    at = next(
        (i for i, (a, b) in enumerate(zip(result.token_ids, plain.token_ids, strict=False)) if a != b),
        min(len(result.token_ids), len(plain.token_ids)),
    )
    return False, f"DIFFERS from plain decoding at reply token {at}"


def _finish(pair: Pair, result: Result, asked: int) -> str:
    """Why the reply ended; a full context is told from a reply of the length asked for."""
    if result.finish_reason == "length" and len(result.token_ids) < asked:
        return f"length (the context of {pair.target.context} positions is full)"
    return result.finish_reason


def _exactness(pair: Pair, result: Result, verdict: str) -> str:
    """How exact the drafted reply was; one without drafts is plain decoding and needs no proof."""
    if not result.token_ids:
        return "no tokens, nothing to compare"
    if not result.timings.draft_n:
        return f"nothing was drafted: this is plain decoding; {verdict}"
    return f"{pair.plan.level}; {verdict}"


def summary(pair: Pair, result: Result, plain: Result | None, verdict: str, asked: int) -> list[str]:
    """The lines under a reply for which `asked` tokens were asked."""
    timings, spec = result.timings, result.speculation
    speed = f"{timings.predicted_per_second:.1f} tokens/s"
    if plain is not None:
        base = plain.timings.predicted_per_second
        ratio = f"{timings.predicted_per_second / base:.2f}x, one run each" if base and timings.draft_n else ""
        speed += f", plain {base:.1f} tokens/s ({ratio or 'nothing drafted: no difference but noise'})" if base else ""
    depth = ", ".join(
        f"{i + 1}: {a}/{p} ({a / p:.0%})" if p else f"{i + 1}: -"
        for i, (a, p) in enumerate(zip(spec.accepted_by_position, spec.proposed_by_position, strict=True))
    )
    lines = [
        "",
        f"tokens      {len(result.token_ids)} in {timings.predicted_ms / 1e3:.2f} s: {speed}",
        f"prompt      {result.prompt_tokens} tokens in {timings.prompt_ms:.0f} ms; "
        f"finish: {_finish(pair, result, asked)}",
        f"rounds      {timings.draft_rounds} with drafts, {timings.plain_steps} plain steps; "
        f"{spec.tokens_per_round:.2f} tokens per forward",
        f"acceptance  {depth or 'no drafts'} (accepted/proposed by position)",
        f"speculation {'on' if spec.active else 'off'}: {spec.method}, {spec.reason}",
    ]
    if spec.governor:
        lines.append(f"governor    {spec.governor}")
    lines += [f"fallback    {reason}" for reason in spec.fallbacks]
    lines.append(f"exactness   {_exactness(pair, result, verdict)}")
    if timings.phases_ms:
        lines.append("phases      " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in timings.phases_ms.items()))
    return lines

"""Every error and finding code of core: what it means, where it is raised, which way out there is.

A code has one meaning and never changes it; a new meaning gets a new code. Letters: U usage, L loading,
C a checkpoint that contradicts itself, P a pair, G plugins, R a run that cannot go on, X exactness. Plugins
keep a table of the same shape, `CODES`, in a module `codes` beside their plugin module, under two letters
of their own. docs/errors.md is made from these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CODES", "STEPS", "Code", "Step"]

Step = Literal["request", "settings", "files", "choose", "install", "author", "output", "report", "none"]

STEPS: dict[Step, str] = {
    "request": "change the flag, field or prompt",
    "settings": "change or unset the environment variable",
    "files": "repair the files, or download them again",
    "choose": "choose another target, drafter or kind",
    "install": "install, update or uninstall a distribution",
    "author": "correct the plugin or processor",
    "output": "make room, or write elsewhere",
    "report": "report it, with the message",
    "none": "nothing has to be done",
}


@dataclass(frozen=True, slots=True)
class Code:
    """One row of a table.

    Attributes:
        code: stable identifier, e.g. "L03".
        meaning: one line; what is wrong, whatever the occasion.
        step: the kind of way out; the message itself names the exact one.
        where: modules that raise it, relative to their package, without ".py".
    """

    code: str
    meaning: str
    step: Step
    where: tuple[str, ...]


def _table(*rows: tuple[str, str, Step, str]) -> tuple[Code, ...]:
    """Rows (code, meaning, step, "module module ...") as codes."""
    return tuple(Code(code, meaning, step, tuple(where.split())) for code, meaning, step, where in rows)


CODES = _table(
    ("E00", "An error raised without a code of its own", "report", "errors"),
    # -- usage ------------------------------------------------------------------------------------------
    ("U00", "A usage error raised without a code of its own", "request", "errors"),
    ("U01", "A model name that is neither a directory nor a hub id", "request", "refs"),
    ("U02", "A model name that leaves the model root", "request", "refs"),
    ("U03", "An environment variable with a value that means nothing", "settings", "settings"),
    ("U04", "No home directory and no cache folder named", "settings", "settings"),
    ("U05", "MLX_SPEC_KERNELS names a kernel that no plugin brings", "settings", "kernels"),
    ("U10", "A prompt without a single token", "request", "intake"),
    ("U11", "A prompt token that is no integer", "request", "intake"),
    ("U12", "A prompt token outside the vocabulary", "request", "intake"),
    ("U13", "A prompt that leaves no room in the context", "request", "intake"),
    ("U14", "A text prompt, or messages, for a target without a tokenizer", "request", "intake"),
    ("U15", "A reply length that is no integer of at least 0", "request", "intake"),
    ("U17", "A message with a part that is no text", "request", "tokenizer"),
    ("U18", "Messages the chat template does not accept, or no template for them", "request", "intake tokenizer"),
    ("U19", "Text with bytes that are no UTF-8", "request", "tokenizer"),
    ("U20", "A sampling setting of the wrong type or out of range", "request", "sampling text"),
    ("U21", "A drafter directory for a kind that needs none", "request", "loading"),
    ("U22", "A kind that needs a drafter directory, and none given", "request", "loading"),
    ("U23", "A kind that contradicts the drafter directory", "request", "loading"),
    ("U24", "A directory no installed plugin knows as a drafter of that kind", "install", "loading"),
    ("U25", "An unknown dtype", "request", "asked"),
    ("U26", "An unknown drafter kind", "request", "loading"),
    ("U27", "A number of K/V bits other than 4 and 8", "request", "state/quantised"),
    ("U28", "A K/V group size that MLX does not have", "request", "state/quantised"),
    ("U29", "A request, or a field of one, of the wrong type", "request", "intake"),
    ("U30", "No target given, and no plugin that ships a demo pair", "request", "demos"),
    ("U31", "Several prompts where one is wanted", "request", "cli/generate"),
    ("U33", "A prompt file, or standard input, that cannot be read", "request", "cli/generate"),
    ("U34", "Prompt ids that are no list of integers", "request", "cli/generate"),
    ("U35", "No prompt", "request", "cli/generate"),
    ("U36", "Stop strings for a target without a tokenizer", "request", "intake"),
    ("U37", "An engine for less than one request", "request", "intake"),
    ("U38", "A prompt that is neither text nor a list of token ids or messages", "request", "intake"),
    ("U39", "Quantised K/V for a target that keeps none", "request", "pair"),
    ("U40", "A probe of a pair that has no drafter in use", "request", "cli/probe"),
    ("U41", "A demo pair of a name that no installed plugin has", "request", "demos"),
    ("U42", "An unknown level of exactness", "request", "asked"),
    ("U43", "Something other than a loaded pair in the place of one", "request", "intake"),
    ("U50", "An option or argument with a value of the wrong type or out of range", "request", "asked cli/usage"),
    ("U51", "An argument or a value that is missing, or a switch with a value", "request", "cli/usage"),
    ("U52", "An option the command does not have", "request", "cli/usage"),
    ("U53", "An unknown command", "request", "cli/usage"),
    ("U54", "A command line that is not as the command's usage says", "request", "cli/usage"),
    ("U60", "A plugin name that is misspelt or taken", "request", "scaffold/__init__"),
    ("U61", "A folder for a new plugin that is there already", "request", "scaffold/__init__"),
    ("U62", "A folder for a new plugin that cannot be written", "request", "scaffold/__init__"),
    ("U65", "An output folder that is there already", "request", "conversion/refusals"),
    ("U66", "An output folder that is the source, or inside it", "request", "conversion/refusals"),
    ("U67", "Quantisation settings that MLX does not have", "request", "conversion/quantise"),
    ("U68", "A conversion option that does not fit the source", "request", "cli/convert"),
    ("U69", "An output folder inside another checkpoint", "request", "conversion/refusals"),
    ("U70", "A block size or draft length that is no whole number in range", "request", "width"),
    ("U71", "A block size wider than the drafter can run", "request", "width"),
    ("U72", "A --spec-config that is no JSON object", "request", "spec_config"),
    ("U73", "An unknown key in --spec-config", "request", "spec_config"),
    ("U74", "One thing said twice, by two keys or by a key and a flag", "request", "lookup spec_config"),
    ("U75", "Block size and draft length that contradict each other", "request", "spec_config"),
    ("U76", "Match lengths of prompt-lookup that cannot be used", "request", "lookup spec_config"),
    ("U77", "A key of --spec-config with a value of the wrong type or out of range", "request", "spec_config"),
    ("U78", "A drafting option that the chosen kind of drafter does not read", "request", "loading"),
    ("U80", "A prompt file of the benchmark that cannot be used", "request", "benchmark/workloads"),
    ("U81", "A benchmark on a target without a tokenizer", "files", "benchmark/method"),
    ("U82", "A benchmark whose replies do not fit in the context", "request", "benchmark/method"),
    ("U83", "An output folder that cannot be written", "request", "benchmark/report conversion/refusals"),
    ("U84", "Arms of a benchmark that are unknown, repeated or too few", "request", "cli/bench"),
    ("U90", "An option the writer of a tiny checkpoint does not know", "request", "testing/tiny testing/writers"),
    ("U91", "A family nobody installed writes tiny checkpoints of", "install", "testing/writers"),
    ("U92", "A command line of the conformance kit that cannot be used", "request", "testing/__main__"),
    # -- loading ----------------------------------------------------------------------------------------
    ("L00", "A load error raised without a code of its own", "files", "errors"),
    ("L01", "A path that is no readable model directory", "request", "refs checkpoint"),
    ("L02", "A hub model that is not here and cannot be fetched", "request", "refs"),
    ("L03", "A file the system will not let us read", "files", "tensorfiles"),
    ("L04", "A JSON file, config.json above all, that is missing, damaged or has a bad key", "files",
     "checkpoint generic_target tensorfiles"),
    ("L05", "A directory of another kind than is needed here", "choose", "checkpoint identify loading"),
    ("L06", "A model_type nobody installed can build", "install", "checkpoint"),
    ("L07", "A target that cannot be taken apart as this drafter needs it", "choose", "generic_target"),
    ("L08", "A model class that fails on these files", "files", "checkpoint generic_target"),
    ("L11", "A weight file that is missing", "files", "partialfiles tensorfiles"),
    ("L12", "An index that is damaged or does not match its shards", "files", "tensorfiles"),
    ("L13", "A tensor that occurs in two files", "files", "tensorfiles"),
    ("L14", "Several weight files and nothing that says which ones count", "files", "tensorfiles"),
    ("L15", "A weight file that is cut short or too long", "files", "tensorfiles"),
    ("L16", "A weight file that is damaged or no safetensors file", "files", "tensorfiles"),
    ("L17", "Tensors that are missing", "files", "checkpoint gguf/refusals tensorfiles"),
    ("L18", "Weights that hold NaN or infinity", "files", "conversion/stream gguf/refusals tensorfiles"),
    ("L19", "Tensors the model does not have, or of another shape", "files", "checkpoint"),
    ("L20", "A checkpoint asked to draft for itself that carries no head", "choose", "conversion/head errors loading"),
    ("L21", "A plugin claimed a directory and then did not load it", "report", "loading"),
    ("L30", "A layer whose cache cannot be rolled back", "choose", "state/group"),
    ("L31", "A saved state that is missing, damaged or of another format", "files", "state/files"),
    ("L32", "A saved state of a kind no installed plugin registered", "install", "state/registry"),
    ("L33", "A K/V group size that does not divide the head size", "request", "state/quantised"),
    ("L34", "A drafter whose drafts branch", "choose", "pair"),
    ("L40", "Tokenizer files that cannot be loaded", "files", "tokenizer"),
    ("L41", "A model without the files of its tokenizer", "files", "inspection"),
    ("L50", "A GGUF file that is none, or is cut short or damaged", "files", "gguf/refusals"),
    ("L51", "A GGUF file of an architecture that is not converted", "choose", "gguf/refusals"),
    ("L52", "GGUF tensors of types that MLX cannot hold", "choose", "gguf/refusals"),
    ("L53", "GGUF metadata that is missing, of the wrong type, or contradicts the tensors", "files", "gguf/refusals"),
    ("L54", "A GGUF model with something the checkpoint could not express", "choose", "gguf/refusals"),
    ("L55", "A GGUF tokenizer of a kind that is not converted", "choose", "gguf/refusals"),
    ("L60", "A tensor that cannot be read or computed while converting", "files", "conversion/stream"),
    ("L61", "Weights that are quantised already, and are to be quantised", "choose", "conversion/quantise"),
    ("L62", "A model whose head no installed plugin can extract", "install", "conversion/head"),
    ("L63", "A record of a head's trunk that cannot be read", "files", "conversion/trunk"),
    ("L64", "An extracted head that its own plugin does not recognise", "report", "conversion/head"),
    ("L65", "A model_type that neither mlx-lm nor its plugin gives classes for", "choose", "conversion/quantise"),
    ("L66", "Experts in half precision, which MLX cannot multiply on a CPU without kernels", "choose", "pair"),
    # -- a checkpoint that contradicts itself -------------------------------------------------------------
    ("C01", "A head that config.json promises and no tensor makes", "choose", "heads"),
    ("C02", "Head tensors that config.json does not mention", "files", "heads"),
    ("C03", "A head that is not whole", "files", "heads"),
    ("C04", "Sizes in config.json that are not those of the tensors", "files", "heads"),
    ("C05", "Quantisation in config.json or in the tensors, not in both", "files", "heads"),
    ("C06", "A tokenizer with more tokens than the model", "files", "inspection"),
    ("C07", "End ids outside the vocabulary", "files", "inspection"),
    # -- pairs ------------------------------------------------------------------------------------------
    ("P00", "A pair refused without a code of its own", "choose", "errors"),
    ("P20", "A full-model drafter that is no complete language model", "choose", "full_model_checks"),
    ("P21", "A side of a full-model pair that declares no vocab_size", "files", "full_model_checks"),
    ("P22", "A full-model drafter with a larger vocabulary than its target", "choose", "full_model_checks"),
    ("P23", "A full-model drafter whose caches cannot be rolled back", "choose", "full_model_checks"),
    ("P24", "A side of a full-model pair without a tokenizer to compare", "none", "full_model_checks"),
    ("P25", "Token ids that mean other tokens on the two sides", "choose", "full_model_checks"),
    ("P27", "A tokenizer of a full-model pair that cannot be read to be compared", "files", "full_model_checks"),
    ("P26", "A full-model drafter with a shorter context than its target", "none", "full_model_checks"),
    ("P28", "A full-model drafter about as large as its target, or larger", "choose", "full_model_checks"),
    ("P30", "A head that was recorded for another trunk", "choose", "conversion/trunk"),
    ("P31", "A head whose trunk has other weights but the same norms as the target", "none", "conversion/trunk"),
    ("P32", "A head without a record of the trunk it belongs to", "none", "conversion/trunk"),
    # -- plugins ----------------------------------------------------------------------------------------
    ("G00", "A plugin error raised without a code of its own", "report", "errors"),
    ("G01", "An entry-point name that is taken", "install", "discovery plugins"),
    ("G02", "A name in MLX_SPEC_PLUGINS that nothing installed provides", "install", "discovery"),
    ("G03", "A claim of spec_register that makes no sense", "author", "registry"),
    ("G04", "A model_type, kind or directory claimed by two distributions", "install", "registry"),
    ("G05", "A detect function that failed", "report", "registry"),
    ("G06", "A hook call for a plugin that is not loaded", "install", "plugins"),
    ("G07", "A plugin that cannot be loaded, or was written for another hook API", "author", "plugins"),
    ("G08", "A command name that is taken", "author", "cli/__init__"),
    ("G09", "A state name that two classes claim", "author", "state/registry"),
    ("G10", "A state class that was never registered", "author", "state/registry"),
    ("G11", "A writer of tiny checkpoints that cannot be imported", "author", "testing/writers"),
    # -- a run that cannot go on --------------------------------------------------------------------------
    ("R00", "A request error raised without a code of its own", "report", "errors"),
    ("R01", "Layers of one model that disagree about their lengths", "report", "state/group"),
    ("R02", "A drafter's state that has no form in a file", "choose", "draft_state"),
    ("R10", "A reply that ended in an error", "report", "cli/generate"),
    ("R11", "An output that takes no more", "output", "cli/__init__"),
    ("R12", "Logits of which no token can be chosen", "files", "emit"),
    ("R13", "A logits processor that failed, or returned no logits", "author", "emit"),
    ("R30", "A benchmark that is void, or whose arms reply differently", "report", "cli/bench cli/tune"),
    ("R31", "A benchmark of drafting on a pair that does not draft", "choose", "cli/bench cli/tune"),
    ("R40", "A disk without room for what is written", "output", "benchmark/report conversion/refusals"),
    ("R41", "A conversion to a folder that another process writes", "output", "conversion/refusals"),
    # -- exactness --------------------------------------------------------------------------------------
    ("X00", "An exactness level that is not reached", "choose", "errors"),
    ("X01", "A pair that is less exact than was demanded", "choose", "pair"),
)  # fmt: skip

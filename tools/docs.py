"""Generated parts of the documentation: `python tools/docs.py` checks them, `--update` rewrites them.

A page holds blocks of the form

    <!-- generated: errors core -->
    ...
    <!-- end -->

whose contents are made from the code by the function of that name in `docblocks`. Everything around them is
written by hand. Two goldens beside the tests are rewritten too, when nothing was taken away: the names
`mlx_spec` exports, and the arguments of every hook.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import docblocks

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
GOLDEN = ROOT / "tests" / "golden" / "api.json"
BLOCK = re.compile(
    r"<!-- generated: (?P<name>[\w-]+)(?: (?P<argument>[^ >]+))? -->\n(?P<body>.*?)<!-- end -->", re.DOTALL
)


def render(text: str) -> str:
    """A page with every generated block made anew."""

    def fresh(match: re.Match[str]) -> str:
        maker = docblocks.MAKERS.get(match["name"])
        if maker is None:
            raise SystemExit(f"docs: found block {match['name']!r}, expected one of {', '.join(docblocks.MAKERS)}.")
        head = match[0].partition("\n")[0]
        return f"{head}\n{maker(match['argument'] or '').strip()}\n<!-- end -->"

    return BLOCK.sub(fresh, text)


def blocks(page: Path) -> list[tuple[str, str]]:
    """(name, argument) of every generated block of a page, in order."""
    return [(m["name"], m["argument"] or "") for m in BLOCK.finditer(page.read_text())]


def stale() -> list[Path]:
    """Pages whose generated blocks are not what the code says now."""
    return [page for page in PAGES if render(page.read_text()) != page.read_text()]


def lost(old: dict[str, dict[str, list[str]]], new: dict[str, dict[str, list[str]]]) -> list[str]:
    """What `old` promised and `new` no longer keeps: names, hooks, and hook arguments in their order."""
    found = []
    for group, entries in old.items():
        for name, arguments in entries.items():
            have = new.get(group, {}).get(name)
            if have is None:
                found.append(f"{group} {name}")
            elif have[: len(arguments)] != arguments:
                found.append(f"{group} {name}: arguments {', '.join(arguments)}")
    return found


def update() -> list[Path]:
    """Rewrite what is stale; returns the files written. Refuses to drop a promise from the golden."""
    written = []
    for page in stale():
        page.write_text(render(page.read_text()))
        written.append(page)
    surface = docblocks.api_surface()
    known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    gone = lost(known, surface)
    if gone:
        raise SystemExit(f"public API: found {'; '.join(gone)} taken away, expected additions only. Put it back.")
    text = json.dumps(surface, indent=1, sort_keys=True) + "\n"
    if not GOLDEN.exists() or GOLDEN.read_text() != text:
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(text)
        written.append(GOLDEN)
    return written


def main() -> None:
    """Check, or rewrite with --update."""
    docblocks.use_workspace_plugins()
    if "--update" in sys.argv[1:]:
        for path in update():
            print(f"wrote {path.relative_to(ROOT)}")
        return
    for page in stale():
        print(f"{page.relative_to(ROOT)}: found generated blocks of another state of the code. Run make docs-update.")
    sys.exit(bool(stale()))


if __name__ == "__main__":
    main()

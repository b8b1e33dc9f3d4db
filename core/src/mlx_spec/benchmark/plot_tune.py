"""One picture of a sweep over block sizes: speed per workload, acceptance by position, time per round."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

from .plot import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found]

LINES = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 2, 1, 2)))  # workloads, told apart without colours


def draw(doc: dict[str, Any]) -> bytes:
    """PNG of a document of `tune.tune_document`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found]
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure(figsize=(8, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, height_ratios=(2, 1, 1))
    _speed(top, doc)
    _acceptance(middle, doc)
    _times(bottom, doc)
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(doc), fontsize="medium", x=0.02, ha="left")
    file = BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _title(doc: dict[str, Any]) -> str:
    pair, machine = doc["pair"], doc["machine"]
    drafter = pair["drafter"]["name"] if pair["drafter"] else "no drafter files"
    chosen = f"L={doc['chosen']} chosen" if doc["chosen"] else "no width beats plain decoding"
    return (
        f"{pair['target']['name']} with {drafter}, {pair['kind']}: {chosen}\n"
        f"{machine['device']}, mlx {doc['versions'].get('mlx', '?')}, "
        f"{doc['method']['pairs']} alternating runs of {doc['method']['max_tokens']} tokens per workload and width"
    )


def _speed(axes: Axes, doc: dict[str, Any]) -> None:
    """Gain over plain per workload (range as whiskers), and of all together with the noise bound."""
    names = list(dict.fromkeys(entry["workload"] for entry in doc["summary"]))
    for name, line in zip(names, LINES * len(names), strict=False):
        entries = [e for e in doc["summary"] if e["workload"] == name and e.get("decode_gain")]
        x = [int(e["arm"].removeprefix("L=")) for e in entries]
        gains = [e["decode_gain"] for e in entries]
        y = [g["median"] for g in gains]
        whiskers = [
            [m - g["low"] for m, g in zip(y, gains, strict=True)],
            [g["high"] - m for m, g in zip(y, gains, strict=True)],
        ]
        axes.errorbar(x, y, whiskers, color=COLOURS[1], linestyle=line, marker="o", capsize=3, label=name)
    x = [w["block_size"] for w in doc["sweep"]]
    y = [w["gain"] for w in doc["sweep"]]
    axes.plot(x, y, color=COLOURS[2], linewidth=3, label="all workloads")
    axes.fill_between(x, [w["low"] for w in doc["sweep"]], y, color=COLOURS[2], alpha=0.25, label="less noise")
    axes.axhline(1.0, color=COLOURS[0], label=f"plain, {doc['plain_per_second']:.1f} tokens/s")
    if doc["chosen"]:
        axes.axvline(doc["chosen"], color="black", linewidth=0.8, linestyle=":")
    axes.set_ylabel("decode speed over plain")
    axes.set_xticks(x)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize="small", ncols=3)


def _acceptance(axes: Axes, doc: dict[str, Any]) -> None:
    """Accepted / proposed by draft position, one line per width."""
    count = max(len(doc["sweep"]) - 1, 1)
    for i, width in enumerate(doc["sweep"]):
        rates = width["acceptance_by_position"]
        axes.plot(
            range(1, len(rates) + 1), rates, marker=".", color=COLOURS[1], alpha=0.3 + 0.7 * i / count,
            label=f"L={width['block_size']}",
        )  # fmt: skip
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)


def _times(axes: Axes, doc: dict[str, Any]) -> None:
    """Milliseconds per round: drafting below, verifying on top of it."""
    shown = [w for w in doc["sweep"] if w["verify_ms"] is not None]
    x, draft = [w["block_size"] for w in shown], [w["draft_ms"] for w in shown]
    axes.bar(x, draft, color=COLOURS[2], label="draft", width=0.6)
    axes.bar(x, [w["verify_ms"] for w in shown], bottom=draft, color=COLOURS[1], label="verify", width=0.6)
    axes.set_xlabel("block size L (anchor counted)")
    axes.set_ylabel("ms per round")
    axes.set_xticks([w["block_size"] for w in doc["sweep"]])
    axes.legend(frameon=False, fontsize="small")

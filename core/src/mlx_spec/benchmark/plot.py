"""One picture of a benchmark: medians as bars, every run as a dot, the range as a whisker."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # type: ignore[import-not-found]

COLOURS = ("#7f7f7f", "#0072b2", "#e69f00")  # told apart by people with any colour vision
MISSING = "no plot: matplotlib is not installed; the extra mlx-spec[bench] adds it: pip install -e './core[bench]'"


def available() -> bool:
    """Whether matplotlib can be imported."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def draw(doc: dict[str, Any]) -> bytes:
    """PNG of decode speed and time to the first token, per workload and arm of a result document."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found]
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure(figsize=(max(6.5, 1.7 * len(_names(doc)) + 2), 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1))
    _bars(top, doc, "decode_per_second", 1.0)
    top.set_ylabel("decode, tokens/s")
    top.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1.0))
    _gains(top, doc)
    _bars(bottom, doc, "first_token_s", 1e3)
    bottom.set_ylabel("first token, ms")
    figure.suptitle(_title(doc), fontsize="medium", x=0.02, ha="left")
    file = BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _names(doc: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(entry["workload"] for entry in doc["summary"]))


def _arms(doc: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(entry["arm"] for entry in doc["summary"]))


def _title(doc: dict[str, Any]) -> str:
    pair, machine = doc["pair"], doc["machine"]
    drafter = pair["drafter"]["name"] if pair["drafter"] else "no drafter files"
    state = "VOID: " if doc["void"] else ""
    return (
        f"{state}{pair['target']['name']} with {drafter}, {pair['kind']}, L={pair['block_size']}\n"
        f"{machine['device']}, mlx {doc['versions'].get('mlx', '?')}, "
        f"medians of {doc['method']['pairs']} runs of {doc['method']['max_tokens']} tokens; dots are single runs"
    )


def _bars(axes: Axes, doc: dict[str, Any], clock: str, scale: float) -> None:
    names, arms = _names(doc), _arms(doc)
    width = 0.8 / len(arms)
    for entry in doc["summary"]:
        arm = arms.index(entry["arm"])
        x = names.index(entry["workload"]) + (arm - (len(arms) - 1) / 2) * width
        spread = entry[clock]
        middle, low, high = (spread[name] * scale for name in ("median", "low", "high"))
        label = entry["arm"] if entry["workload"] == names[0] else None
        axes.bar(x, middle, width * 0.92, color=COLOURS[arm], label=label, hatch="//" if entry["void"] else None)
        axes.errorbar(x, middle, [[middle - low], [high - middle]], color="black", capsize=3, linewidth=1)
        values = [value * scale for value in spread["values"]]
        axes.plot([x] * len(values), values, "o", color="white", markeredgecolor="black", markersize=4)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def _gains(axes: Axes, doc: dict[str, Any]) -> None:
    """The gain above each bar that has one."""
    names, arms = _names(doc), _arms(doc)
    width = 0.8 / len(arms)
    for entry in doc["summary"]:
        gain = entry.get("decode_gain")
        if not gain:
            continue
        x = names.index(entry["workload"]) + (arms.index(entry["arm"]) - (len(arms) - 1) / 2) * width
        text = "VOID" if entry["void"] else f"{gain['median']:.2f}x"
        place = (x, entry["decode_per_second"]["high"])
        axes.annotate(text, place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize="small")

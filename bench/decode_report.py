"""How bench.decode tells what it found: lines, speed-ups over the peers, a figure."""

import pathlib

import numpy as np

from jax_warp_decode.measure import parts

OURS = "auto"


def describe_row(row: dict) -> str:
    head = f"{row['format']:6} {row['strategy']:20} {row['attention']:7} B={row['batch']:<3} {row['context']:6} "
    if "us" not in row:
        return head + row.get("error", "no trace")
    text = head + (f"{row['us']:8.0f} us (wall {row['wall_us']:.0f})  {row['tokens_per_s']:7.0f} tokens/s  "
                   f"{row['fraction_of_read']:5.1%} of the read  ")
    return text + " ".join(f"{name} {part['us']:.0f}/{part['kernels']:.0f}"
                           for name, part in row.get("parts", {}).items())


def details(row: dict, most: int = 4) -> str:
    """The longest kernels of every part."""
    lines = [describe_row(row)]
    for name, part in row.get("parts", {}).items():
        longest = list(part["names"].items())[:most]
        lines.append(f"    {name:12} {part['us']:7.1f} us in {part['kernels']:.0f}: "
                     + ", ".join(f"{kernel[:44]} {us:.1f}" for kernel, us in longest))
    return "\n".join(lines)


def experts_us(row: dict) -> float:
    return sum(row["parts"][name]["us"] for name in ("gate_up", "down", "experts") if name in row["parts"])


def speedups(results: list[dict]) -> list[dict]:
    """Per batch size and context: ours over the best path that is not ours, of the whole step and of the experts.

    The step around the peer's experts has the form of ours, or another one: `form`.
    """
    timed = [r for r in results if "parts" in r]
    own = timed[0]["attention"] if timed else ""
    found = []
    for batch, context, form in dict.fromkeys((r["batch"], r["context"], r["attention"]) for r in timed):
        here = [r for r in timed if (r["batch"], r["context"]) == (batch, context)]
        peers = [r for r in here if r["strategy"].startswith(("tokamax", "lax")) and r["attention"] == form]
        if not peers:
            continue
        best = min(peers, key=lambda r: r["us"])
        for ours in (r for r in here if r["strategy"] == OURS and r["attention"] == own):
            found.append(dict(
                batch=batch, context=context, format=ours["format"], peer=best["strategy"], peer_format=best["format"],
                form=form, tokens_per_s=best["us"] / ours["us"], experts=experts_us(best) / experts_us(ours)))
    return found


STYLES = {1: "-", 4: "--"}  # of the batch sizes whose curves are drawn


def plot(path: pathlib.Path, results: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = [r for r in results if "parts" in r]
    timed = [r for r in timed if r["attention"] == timed[0]["attention"]]
    fig, ((left, right), (last, beside)) = plt.subplots(2, 2, figsize=(14, 10))
    colors: dict[tuple, str] = {}
    for format, strategy, batch in dict.fromkeys((r["format"], r["strategy"], r["batch"]) for r in timed):
        rows = sorted((r for r in timed if (r["format"], r["strategy"], r["batch"]) == (format, strategy, batch)),
                      key=lambda r: r["context"])
        if batch not in STYLES or strategy != OURS and len(rows) == 1:
            continue  # a point is no curve
        color = colors.setdefault((format, strategy), f"C{len(colors)}")
        left.plot([r["context"] for r in rows], [r["tokens_per_s"] for r in rows], STYLES[batch], marker="o",
                  markersize=4, color=color, label=f"{format} {strategy}, B={batch}")
    left.set(xscale="log", yscale="log", xlabel="context", ylabel="tokens/s", title="Qwen3-30B-A3B shape, one GPU")
    beside.legend(*left.get_legend_handles_labels(), title="tokens/s", loc="center left")  # the curves fill their axes
    beside.axis("off")
    left.grid(alpha=0.3)
    bars = [r for r in timed if r["batch"] == 1 and r["context"] == min(x["context"] for x in timed)]
    names = ["\n".join((r["format"], *r["strategy"].split("_"))) for r in bars]
    bottom = np.zeros(len(bars))
    for name in parts.PARTS:
        us = np.array([r["parts"].get(name, dict(us=0.0))["us"] for r in bars])
        right.bar(range(len(bars)), us, bottom=bottom, label=name)
        bottom += us
    # One that takes many times longer than most would leave nothing to see of the others.
    top = 1.15 * max((total for total in bottom if total <= 4 * np.median(bottom)), default=1.0)
    for at, total in enumerate(bottom):
        if total > top:
            right.text(at, 0.97 * top, f"to {total / 1000:,.1f} ms", ha="center", va="top", fontsize=8,
                       bbox=dict(facecolor="white", edgecolor="none", alpha=0.8))
    right.set_xticks(range(len(bars)), names, fontsize=7)
    right.set(ylabel="us per step", title=f"One step at B = 1, context {bars[0]['context']:,}" if bars else "",
              ylim=(0, top))
    right.legend(fontsize=7)
    for at, name, values in ((-0.2, "stages", [r["expert_stages"] for r in bars]),
                             (0.2, "KB written", [r["expert_bytes_written"] / 1024 for r in bars])):
        last.bar_label(last.bar(np.arange(len(bars)) + at, values, 0.4, label=name), fmt="{:,.0f}", fontsize=8)
    last.set_xticks(range(len(bars)), names, fontsize=7)
    last.set(yscale="log", ylabel="stages; KB", title="Experts of one layer, B = 1: stages, and what they write")
    last.legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)

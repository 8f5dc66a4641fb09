"""How bench.accuracy tells what it found: lines, a figure."""

import pathlib


def layer_summary(rows: list[dict]) -> str:
    lines, good = [], [r for r in rows if "error" not in r]
    for case, format, path in dict.fromkeys((r["case"], r["format"], r["path"]) for r in good):
        mine = [r for r in good if (r["case"], r["format"], r["path"]) == (case, format, path)]
        worst = {key: f(r[key] for r in mine) for key, f in (
            ("relative_l2", max), ("over_rounding_once", max), ("min_cosine", min), ("max_abs", max),
            ("correctly_rounded", min))}
        lines.append(f"{case:24} {format:6} {path:15} worst over B: relative L2 {worst['relative_l2']:.2e} "
                     f"({worst['over_rounding_once']:.2f} x rounding once), cosine {worst['min_cosine']:.7f}, max abs "
                     f"{worst['max_abs']:.6f}, correctly rounded {worst['correctly_rounded']:.1%}")
    return "\n".join([*lines, *(f"error: {e}" for e in {r["error"] for r in rows if "error" in r})])


def plot(path: pathlib.Path, rows: list[dict]) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(17, 4.8))
    good = [r for r in rows if "error" not in r]
    rows, found, drift = ([r for r in good if r["part"] == part] for part in ("layer", "perplexity", "drift"))
    for case, format, name in dict.fromkeys((r["case"], r["format"], r["path"]) for r in rows):
        mine = [r for r in rows if (r["case"], r["format"], r["path"]) == (case, format, name)]
        color = {"ours": "C0", "expert_centric": "C2", "conventional": "C3"}[name]
        left.plot([r["batch"] for r in mine], [r["relative_l2"] for r in mine], color=color, alpha=0.7,
                  linestyle="-" if format == "mxfp8" else ":", marker=".")
    for name, color in (("ours", "C0"), ("expert_centric", "C2"), ("conventional, MXFP8 activations", "C3")):
        left.plot([], [], color=color, label=name)
    scale = "log" if rows else "linear"
    left.set(xscale=scale, yscale=scale, xlabel="tokens B", ylabel="relative L2 against float64",
             title="One layer, every case (dotted: bf16 weights)")
    left.legend(fontsize=8)
    names = [f"{r['format']}\n{r['path']}" for r in found]
    middle.bar(range(len(found)), [r["perplexity"] for r in found])
    middle.set_xticks(range(len(found)), names, fontsize=7, rotation=30)
    if found:
        low, high = min(r["perplexity"] for r in found), max(r["perplexity"] for r in found)
        middle.set_ylim(low - (high - low) - 1e-3, high + 0.3 * (high - low) + 1e-3)
    middle.set(ylabel="perplexity per byte (axis does not start at 0)", title="Bundled model, held-out text")
    for name in dict.fromkeys(r["path"] for r in drift):
        mine = [r for r in drift if r["path"] == name]
        right.plot([r["layer"] for r in mine], [r["relative_l2"] for r in mine], label=name)
    right.set(yscale="log" if drift else "linear", xlabel="layer", title="Random 48-layer model, MXFP8 experts",
              ylabel="relative L2 of the residual stream against float32")
    if drift:
        right.legend(fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    plt.close(fig)

"""Writes the measured parts of README.md and bench/RESULTS.md from bench/results/*.json: python -m bench.readme"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
NAMES = {
    "auto": "**`auto`**", "read": "reading the weights, nothing else",
    "warp_decode": "**`warp_decode`**", "shared_decode": "**`shared_decode`**",
    "expert_centric": "`expert_centric`", "expert_centric_mxfp8": "`expert_centric`, MXFP8 activations",
    "tokamax_mosaic": "tokamax 0.0.17 Mosaic ragged dot",
    "tokamax_mosaic_large": "the same with larger tiles",
    "lax_ragged_dot": "`jax.lax.ragged_dot`"}


SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 8192)  # tokens that have a column in the first table
PART_ORDER = ("router", "gate_up", "down", "experts", "attention", "projections", "norm", "head", "other", "gaps")


def source(meta: dict, name: str, *, image: str = "") -> list[str]:
    """The last lines of a part: the command, the commit and the file, and the picture of the same name."""
    commands = [f"`{c.replace('OUT', 'bench/results')}`" for c in (*meta.get("filled", ()), meta["command"])]
    lines = ["", f"{', then '.join(commands)}, commit `{meta['commit'][:10]}`, data in "
             f"[`bench/results/{name}`](bench/results/{name})."]
    return [*lines, "", f"![{image}](bench/results/{pathlib.Path(name).stem}.png)"] if image else lines


def table(head: list, rows: list[list]) -> list[str]:
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def layer(name: str, report: dict) -> list[str]:
    """Microseconds per layer, a row per format and strategy, a column per batch size."""
    results, meta = [r for r in report["results"] if "us" in r], report["meta"]
    batches = [b for b in sorted({r["batch"] for r in results}) if b in SHOWN]
    rows = []
    for format in dict.fromkeys(r["format"] for r in results):
        for strategy, title in NAMES.items():
            row = {r["batch"]: r for r in results if r["format"] == format and r["strategy"] == strategy}
            share = "" if strategy == "read" else " ({:.0%})"
            if row:
                rows.append([format, title, *(
                    f"{row[b]['us']:.1f}" + share.format(row[b]["fraction_of_read"]) if b in row else ""
                    for b in batches)])
    return [*table(["weights", "strategy", *(f"B={b}" for b in batches)], rows),
            *source(meta, name, image="Time and share of the read against tokens")]


def suite(name: str, report: dict) -> list[str]:
    """Microseconds and multiple of the read, a row per layer and strategy, a column per batch size."""
    results = [r for r in report["results"] if "us" in r and r["strategy"] != "read"]
    batches, rows = sorted({r["batch"] for r in results}), []
    what = lambda r: (r["model"], r["format"], r["pattern"], f"`{r['strategy']}`")
    for key in dict.fromkeys(map(what, results)):
        row = {r["batch"]: r for r in results if what(r) == key}
        rows.append([*key, *(f"{row[b]['us']:.1f} ({row[b]['us'] / row[b]['read_us']:.2f})" if b in row else ""
                             for b in batches)])
    head = ["model", "weights", "routing", "strategy", *(f"B={b}" for b in batches)]
    return [*table(head, rows), *source(report["meta"], name)]


def parallel(name: str, report: dict) -> list[str]:
    """Microseconds per layer on two GPUs; in brackets, their share of one GPU's, and that of the all-reduce in them."""
    results = [r for r in report["results"] if "us" in r and r["collectives"] in (None, "none", "nccl")]
    batches, rows = sorted({r["batch"] for r in results}), []
    one = {r["batch"]: r["us"] for r in results if r["layout"] == "one"}
    for layout, title in (("one", "one GPU"), ("EP2", "two GPUs, experts split"), ("TP2", "two GPUs, I split")):
        row = {r["batch"]: r for r in results if r["layout"] == layout}
        rows.append([results[0]["model"], title, *(
            "" if b not in row else f"{row[b]['us']:.1f}" if layout == "one" else
            f"{row[b]['us']:.1f} ({row[b]['us'] / one[b]:.2f}, {row[b]['collective_us'] / row[b]['us']:.0%})"
            for b in batches)])
    return [*table(["model", "devices", *(f"B={b}" for b in batches)], rows), *source(report["meta"], name)]


def decode(name: str, report: dict) -> list[str]:
    """Tokens per second of a whole decoder, a row per batch size, format and strategy, a column per context."""
    rows = [r for r in report["results"] if "tokens_per_s" in r and r["attention"] == "fused"]
    contexts, lines = sorted({r["context"] for r in rows}), []
    what = lambda r: (r["batch"], r["format"], r["strategy"])
    for case in sorted(dict.fromkeys(map(what, rows)), key=lambda case: case[0]):
        found = {r["context"]: r for r in rows if what(r) == case}
        lines.append([*case[:2], NAMES[case[2]], *(
            f"{found[c]['tokens_per_s']:,.0f} ({found[c]['fraction_of_read']:.0%})" if c in found else ""
            for c in contexts)])
    drawn = (RESULTS / name).with_suffix(".png").exists()
    return [*table(["B", "weights", "strategy", *(f"context {c:,}" for c in contexts)], lines),
            *source(report["meta"], name, image="Tokens per second, where time goes, stages and their bytes" * drawn)]


def parts(name: str, report: dict) -> list[str]:
    """Microseconds of a step's parts, and the launches and bytes of a layer's experts: a row per case with a trace."""
    rows = [r for r in report["results"] if r.get("parts") and r["attention"] == "fused" and r["context"] == 1024]
    columns = [part for part in PART_ORDER if any(part in r["parts"] for r in rows)]
    lines = [[r["batch"], r["format"], NAMES[r["strategy"]],
              *(f"{r['parts'][part]['us']:.0f}" if part in r["parts"] else "" for part in columns),
              f"{r['us']:.0f}", f"{r['expert_stages']:.0f}", f"{r['expert_bytes_written'] / 1e3:,.0f}"]
             for r in sorted(rows, key=lambda r: r["batch"])]
    head = ["B", "weights", "strategy", *(part.replace("_", "/") for part in columns), "step", "launches", "KB written"]
    return [*table(head, lines), *source(report["meta"], name)]


def accuracy(name: str, report: dict) -> list[str]:
    """How far a layer is from float64, the worst over batch sizes and weights; perplexity where it was measured."""
    paths = {"ours": NAMES["auto"], "warp_decode": NAMES["warp_decode"], "float32": "`reference`",
             "expert_centric": NAMES["expert_centric"], "conventional": "conventional, MXFP8 activations"}
    measured, rows = [r for r in report["results"] if r["part"] == "layer" and "error" not in r], []
    case = lambda r: (r["format"], "bundled model" if r["case"].startswith("bundled") else "random", paths[r["path"]],
                      "1 to 8" if r["batch"] <= 8 else "32 and 128")
    for key in dict.fromkeys(map(case, measured)):
        worst = {what: [r[what] for r in measured if case(r) == key] for what in measured[0]}
        rows.append([*key, f"{max(worst['relative_l2']):.1e}", f"{max(worst['over_rounding_once']):.2f}",
                     f"{min(worst['min_cosine']):.7f}", f"{max(worst['max_abs']):.6f}",
                     f"{min(worst['correctly_rounded']):.2%}"])
    lines = table(["weights", "values", "strategy", "B", "relative L2", "times rounding once", "cosine", "max abs",
                   "correctly rounded"], rows)
    models = [["float32" if r["path"] == "float32" else r["format"], paths[r["path"]], f"{r['perplexity']:.5f}"]
              for r in report["results"] if r["part"] == "perplexity"]
    if models:
        lines += ["", "Perplexity per byte of the bundled model on held-out text:", "",
                  *table(["weights", "strategy", "perplexity"], models)]
    drawn = (RESULTS / name).with_suffix(".png").exists()
    return [*lines, *source(report["meta"], name, image="Error of a layer, perplexity, drift over 48 layers" * drawn)]


def formats(name: str, report: dict) -> list[str]:
    """Microseconds per layer and multiple of the read, a row per format; the fastest configuration of each."""
    results = [r for r in report["results"] if "us" in r]
    batches, rows = sorted({r["batch"] for r in results}), []
    for format in dict.fromkeys(r["format"] for r in results):
        best = {b: min((r for r in results if (r["format"], r["batch"]) == (format, b)), key=lambda r: r["us"],
                       default=None) for b in batches}
        rows.append([format, *(f"{r['us']:.1f} ({r['of_read']:.2f})" if (r := best[b]) else "" for b in batches)])
    return [*table(["weights", *(f"B={b}" for b in batches)], rows), *source(report["meta"], name)]


def shared_formats(name: str, report: dict) -> list[str]:
    """Microseconds per layer and multiple of the read, a row per format and strategy, a column per batch size."""
    us = {(r["format"], r["strategy"], r["batch"]): r["us"] for r in report["results"] if "us" in r}
    batches, rows = sorted({batch for _, _, batch in us}), []
    for format, strategy in dict.fromkeys((f, s) for f, s, _ in us if s != "read"):
        rows.append([format, NAMES[strategy], *(
            f"{us[format, strategy, b]:.1f} ({us[format, strategy, b] / us[format, 'read', b]:.2f})" for b in batches)])
    return [*table(["weights", "strategy", *(f"B={b}" for b in batches)], rows), *source(report["meta"], name)]


def forms(name: str, report: dict) -> list[str]:
    """Microseconds per layer with and without its router, and out of a stack, a column per batch size."""
    results = [r for r in report["results"] if "us" in r]
    batches, rows = sorted({r["batch"] for r in results}), []
    for what in dict.fromkeys((r["format"], r["form"]) for r in results):
        row = {r["batch"]: r for r in results if (r["format"], r["form"]) == what}
        rows.append([*what, *(f"{row[b]['us']:.1f}" if b in row else "" for b in batches)])
    return [*table(["weights", "form", *(f"B={b}" for b in batches)], rows), *source(report["meta"], name)]


def first_token(name: str, report: dict) -> list[str]:
    """Milliseconds to the first token, a row per format and strategy, a column per length of the prompt."""
    results = [r for r in report["results"] if "ms" in r]
    lengths, rows = sorted({r["tokens"] for r in results}), []
    for format, strategy in dict.fromkeys((r["format"], r["strategy"]) for r in results):
        row = {r["tokens"]: r for r in results if (r["format"], r["strategy"]) == (format, strategy)}
        rows.append([format, NAMES[strategy], *(
            f"{row[n]['ms']:.1f}" if n in row else "" for n in lengths)])
    return [*table(["weights", "strategy", *(f"{n:,} tokens" for n in lengths)], rows), *source(report["meta"], name)]


def training(name: str, metrics: dict) -> list[str]:
    nats = metrics["held_out_nats_per_byte"]
    return [f"Its loss on {metrics['bytes']['held_out'] / 1e3:.0f} kB of held-out text: "
            + ", ".join(f"{nats[format]:.3f} nats per byte in {format}" for format in ("float32", "bf16", "mxfp8"))
            + f" ({metrics['parameters'] / 1e6:.1f} M parameters; `bench/results/{name}`)."]


PARTS = {  # file: {name of a block in it: (how it is written, from which files)}
    "README.md": {
        "layer": (layer, ["range-bf16.json", "range-mxfp8.json"]),
        "decode": (decode, ["decode_steps.json"]),
        "first_token": (first_token, ["first_token.json"]),
        "accuracy": (accuracy, ["accuracy-layer.json"])},
    "bench/RESULTS.md": {
        "suite": (suite, ["suite.json"]),
        "forms": (forms, ["layer_forms.json"]),
        "formats": (formats, ["formats-qwen3-30b-a3b.json"]),
        "shared_formats": (shared_formats, ["shared_formats-qwen3-30b-a3b-uniform.json"]),
        "parts": (parts, ["decode_steps.json"]),
        "accuracy": (accuracy, ["accuracy.json"]),
        "parallel": (parallel, ["parallel-qwen3-30b-a3b.json", "parallel-deepseek-v3.json"]),
        "training": (training, ["tiny_docs_training.json"])}}


def rendered(file: str, text: str) -> str:
    """A file's text with all its measured parts brought up to date."""
    for name, (write, files) in PARTS[file].items():
        part = "\n\n".join("\n".join(write(data, json.loads((RESULTS / data).read_text()))) for data in files)
        part = part.replace("](bench/results/", "](results/") if file.startswith("bench/") else part
        block = re.compile(rf"(<!-- measured: {name} -->\n).*?(\n?<!-- end -->)", re.DOTALL)
        if len(block.findall(text)) != 1:
            raise SystemExit(f"{file} needs one block '<!-- measured: {name} -->' ... '<!-- end -->'")
        text = block.sub(lambda found, part=part: found[1] + part + "\n" + found[2].lstrip("\n"), text)
    return text


if __name__ == "__main__":
    for file in PARTS:
        path = ROOT / file
        path.write_text(rendered(file, path.read_text()))

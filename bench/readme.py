"""Writes the measured parts of README.md from the JSON under bench/results: python -m bench.readme"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
NAMES = {
    "read": "reading the weights, nothing else", "warp_decode": "**`warp_decode`**",
    "shared_decode": "**`shared_decode`**",
    "expert_centric": "`expert_centric`", "expert_centric_mxfp8": "`expert_centric`, MXFP8 activations",
    "tokamax_mosaic": "tokamax 0.0.17 Mosaic ragged dot",
    "tokamax_mosaic_large": "the same with larger tiles",
    "lax_ragged_dot": "`jax.lax.ragged_dot`"}


SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 8192)  # tokens that have a column in the first table


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
    return [
        f"One Qwen3-30B-A3B layer (H 2048, I 768, E 128, K 8), routed experts only, cold weights, uniform routing, "
        f"microseconds on one {meta['device']}, jax {meta['jax']}. In brackets: share of the speed of a kernel that "
        f"only reads the same unique bytes, in the same run.", "",
        *table(["weights", "strategy", *(f"B={b}" for b in batches)], rows),
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
        lines.append([*case[:2], {"auto": "**`auto`**", **NAMES}[case[2]], *(
            f"{found[c]['tokens_per_s']:,.0f} ({found[c]['fraction_of_read']:.0%})" if c in found else ""
            for c in contexts)])
    drawn = (RESULTS / name).with_suffix(".png").exists()
    return [*table(["B", "weights", "strategy", *(f"context {c:,}" for c in contexts)], lines),
            *source(report["meta"], name, image="Tokens per second, where time goes, stages and their bytes" * drawn)]


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
        rows.append([format, {"auto": "**`auto`**", **NAMES}[strategy], *(
            f"{row[n]['ms']:.1f}" if n in row else "" for n in lengths)])
    return [*table(["weights", "strategy", *(f"{n:,} tokens" for n in lengths)], rows), *source(report["meta"], name)]


def training(name: str, metrics: dict) -> list[str]:
    nats = metrics["held_out_nats_per_byte"]
    return [f"Its loss on {metrics['bytes']['held_out'] / 1e3:.0f} kB of held-out text: "
            + ", ".join(f"{nats[format]:.3f} nats per byte in {format}" for format in ("float32", "bf16", "mxfp8"))
            + f" ({metrics['parameters'] / 1e6:.1f} M parameters; `bench/results/{name}`)."]


PARTS = {  # name of the block in README.md: (how it is written, from which files)
    "layer": (layer, ["range-bf16.json", "range-mxfp8.json"]),
    "suite": (suite, ["suite.json"]),
    "forms": (forms, ["layer_forms.json"]),
    "first_token": (first_token, ["first_token.json"]),
    "formats": (formats, ["formats-qwen3-30b-a3b.json"]),
    "shared_formats": (shared_formats, ["shared_formats-qwen3-30b-a3b-uniform.json"]),
    "decode": (decode, ["decode_steps.json"]),
    "parallel": (parallel, ["parallel-qwen3-30b-a3b.json", "parallel-deepseek-v3.json"]),
    "training": (training, ["tiny_docs_training.json"])}


def rendered(readme: str) -> str:
    """README.md with all measured parts brought up to date."""
    for name, (write, files) in PARTS.items():
        text = "\n\n".join("\n".join(write(file, json.loads((RESULTS / file).read_text()))) for file in files)
        block = re.compile(rf"(<!-- measured: {name} -->\n).*?(\n?<!-- end -->)", re.DOTALL)
        if len(block.findall(readme)) != 1:
            raise SystemExit(f"README.md needs one block '<!-- measured: {name} -->' ... '<!-- end -->'")
        readme = block.sub(lambda found, text=text: found[1] + text + "\n" + found[2].lstrip("\n"), readme)
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rendered(path.read_text()))

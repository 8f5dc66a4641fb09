"""Writes the measured parts of README.md from the JSON under bench/results: python -m bench.readme"""

import json
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
LAYER = "small_batch-qwen3-30b-a3b-uniform.json"
NAMES = {
    "read": "reading the weights, nothing else", "warp_decode": "**`warp_decode`**",
    "shared_decode": "**`shared_decode`**",
    "expert_centric": "`expert_centric`", "tokamax_mosaic": "tokamax 0.0.17 Mosaic ragged dot",
    "lax_ragged_dot": "`jax.lax.ragged_dot`"}


def layer_table(report: dict) -> str:
    """Microseconds per layer, a row per format and strategy, a column per batch size."""
    results, meta = [r for r in report["results"] if "us" in r], report["meta"]
    batches = sorted({r["batch"] for r in results})
    lines = [
        f"One Qwen3-30B-A3B layer (H 2048, I 768, E 128, K 8), routed experts only, cold weights, uniform routing, "
        f"microseconds on one {meta['device']}, jax {meta['jax']}. In brackets: share of the speed of a kernel that "
        f"only reads the same unique bytes, in the same run.", "",
        "| weights | strategy | " + " | ".join(f"B={b}" for b in batches) + " |",
        "| --- | --- |" + " --- |" * len(batches)]
    for format in dict.fromkeys(r["format"] for r in results):
        for name, title in NAMES.items():
            row = {r["batch"]: r for r in results if r["format"] == format and r["strategy"] == name}
            if row:
                cells = [f"{row[b]['us']:.1f}" + ("" if name == "read" else f" ({row[b]['fraction_of_read']:.0%})")
                         if b in row else "" for b in batches]
                lines.append(f"| {format} | {title} | " + " | ".join(cells) + " |")
    command = meta["command"].replace("OUT", "bench/results")
    lines += ["", f"`{command}`, commit `{meta['commit'][:10]}`, data in "
              f"[`bench/results/{LAYER}`](bench/results/{LAYER}), notes in [`bench/NOTES.md`](bench/NOTES.md).", "",
              f"![Time and share of the read against tokens](bench/results/{pathlib.Path(LAYER).stem}.png)"]
    return "\n".join(lines)


def suite_table(report: dict) -> str:
    """Microseconds and multiple of the read, a row per model and format, a column per batch size."""
    results, meta = [r for r in report["results"] if "us" in r and r["strategy"] != "read"], report["meta"]
    batches = sorted({r["batch"] for r in results})
    lines = ["| model | weights | routing | " + " | ".join(f"B={b}" for b in batches) + " |",
             "| --- | --- | --- |" + " --- |" * len(batches)]
    for key in dict.fromkeys((r["model"], r["format"], r["pattern"]) for r in results):
        row = {r["batch"]: r for r in results if (r["model"], r["format"], r["pattern"]) == key}
        cells = [f"{row[b]['us']:.1f} ({row[b]['us'] / row[b]['read_us']:.2f})" if b in row else "" for b in batches]
        lines.append(f"| {' | '.join(key)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"`{meta['command'].replace('OUT', 'bench/results')}`, commit "
                      f"`{meta['commit'][:10]}`, data in [`bench/results/suite.json`](bench/results/suite.json)."])


def training_line(metrics: dict) -> str:
    nats = metrics["held_out_nats_per_byte"]
    return (f"Its loss on {metrics['bytes']['held_out'] / 1e3:.0f} kB of held-out text: "
            + ", ".join(f"{nats[name]:.3f} nats per byte in {name}" for name in ("float32", "bf16", "mxfp8"))
            + f" ({metrics['parameters'] / 1e6:.1f} M parameters; `bench/results/tiny_docs_training.json`).")


def rendered(readme: str) -> str:
    """README.md with both measured parts brought up to date."""
    parts = {"layer": layer_table(json.loads((RESULTS / LAYER).read_text())),
             "suite": suite_table(json.loads((RESULTS / "suite.json").read_text())),
             "training": training_line(json.loads((RESULTS / "tiny_docs_training.json").read_text()))}
    for name, text in parts.items():
        block = re.compile(rf"(<!-- measured: {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if len(block.findall(readme)) != 1:
            raise SystemExit(f"README.md needs one block '<!-- measured: {name} -->' ... '<!-- end -->'")
        readme = block.sub(lambda found, text=text: found[1] + text + found[2], readme)
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(rendered(path.read_text()))

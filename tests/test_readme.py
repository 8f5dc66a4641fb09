"""README stays true: its examples run, its commands are the tested ones, its map matches the tree."""

import pathlib
import re

import pytest

from bench.readme import PARTS, rendered

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.S | re.M)
MAP = README.split("## Map of the code")[1]
PACKAGE = ROOT / "jax_warp_decode"


def test_the_examples_run_in_order():
    """A reader goes from top to bottom, so that an example may use what one above it has made."""
    assert len(EXAMPLES) == README.count("```python") >= 5
    names = {}
    for code in EXAMPLES:
        exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape == (2, 256)


def test_commands_are_one_line_each_and_known():
    commands = re.findall(r"^pip install uv && uv run (.+)$", README, re.M)
    assert [re.sub(r"--\S+ (cuda\d+|aot) |--isolated ", "", command) for command in commands] == [
        "jax-warp-decode demo", "pytest -n auto --dist loadfile", "jax-warp-decode demo", "pytest --gpu"]


def mapped_paths():
    """Paths in backticks in the first column of the map; a bare name stands beside the path in front of it."""
    for row in re.findall(r"^\| (`.+?) \|", MAP, re.M):
        folder = ROOT
        for name in re.findall(r"`([^`]+)`", row):
            path = ROOT / name if "/" in name else folder / name
            folder = path.parent
            yield path


def test_the_map_names_what_exists():
    assert [str(path) for path in mapped_paths() if not path.exists()] == []
    files = {path.name for folder in ("jax_warp_decode", "tests", "bench") for path in (ROOT / folder).rglob("*.py")}
    assert [name for name in re.findall(r"`(\w+\.py)`", MAP) if name not in files] == []


def test_the_map_covers_every_module():
    paths = list(mapped_paths())
    missing = [
        str(file.relative_to(ROOT)) for file in PACKAGE.rglob("*.py")
        if file not in paths and not any(folder in file.parents for folder in paths if folder != PACKAGE)]
    assert missing == []


@pytest.mark.parametrize("file", PARTS)
def test_the_measured_parts_come_from_the_results(file):
    """`python -m bench.readme` would change nothing: every figure in the tables is the one in the JSON."""
    text = (ROOT / file).read_text(encoding="utf8")
    assert rendered(file, text) == text


@pytest.mark.parametrize("file", [*PARTS, "bench/NOTES.md"])
def test_links_lead_somewhere(file):
    """To a file of the repository, and to a heading that its target has."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(encoding="utf8"), flags=re.S | re.M)
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", prose):
        path = (ROOT / file).parent / target if target else ROOT / file
        assert path.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf8"), re.M)
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], heading

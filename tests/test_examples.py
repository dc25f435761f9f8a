"""What a reader runs: the examples, the Python and the commands of docs/library.md; and what every public name says."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import pytest

import keyformer

PROJECT = Path(__file__).resolve().parent.parent
GUIDE = (PROJECT / "docs" / "library.md").read_text(encoding="utf-8")


def python(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    line = [sys.executable, *map(str, arguments)]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def example(name: str, *arguments: object, folder: Path) -> str:
    path = PROJECT / "examples" / name
    assert f"python examples/{name} --model MODEL" in path.read_text(encoding="utf-8")
    done = python(path, *arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_lines(tiny_model_folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("The code of the blue door is 4821. " * 30)
    arguments = ("--model", tiny_model_folder, "--max-tokens", 8, "--file", text)
    assert len(example("two_lines.py", *arguments, folder=tmp_path).strip()) > 0
    script = (PROJECT / "examples" / "two_lines.py").read_text(encoding="utf-8")
    assert sum("keyformer" in line for line in script.splitlines()) == 2


def test_compare_policies(tiny_model_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_model_folder, "--read", 200, "--fed", 10, "--budget", 0.25)
    first, _, *rows = example("compare_policies.py", *arguments, folder=tmp_path).splitlines()
    assert first == "200 tokens read, 10 fed"
    table = {name: (kept, kib, agreement) for name, kept, kib, agreement in map(str.split, rows)}
    assert list(table) == list(keyformer.POLICIES)
    row = 2 * 2 * 2 * 16 * 4 / 1024  # keys and values of 2 heads of 16 float32 in 2 layers
    assert table["full"] == ("210", f"{210 * row:.0f}", "100%")
    assert {(kept, kib) for kept, kib, _ in list(table.values())[1:]} == {("50", f"{50 * row:.0f}")}


def test_batch_and_cache(tiny_model_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", tiny_model_folder, "--budget", 64, "--max-tokens", 5)
    out = example("batch_and_cache.py", *arguments, folder=tmp_path)
    rows = [int(n) for n in re.findall(r"^-- a prompt of \d+ tokens, now in (\d+) rows:$", out, re.MULTILINE)]
    assert rows[0] <= 64 and rows[1:] == [64, 64]
    assert (tmp_path / "conversation.safetensors").is_file()
    assert out.endswith("-- still 64 rows per head\n")


@pytest.fixture(scope="module")
def readers_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the guide assumes it: a model at path/to/model and a text, long.txt."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "model").symlink_to(tiny_model_folder)
    (folder / "long.txt").write_text("The code of the blue door is 4821, the code of the green door is 7365. " * 20)
    return folder


def test_the_guides_python_runs_from_top_to_bottom(readers_folder: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    program = readers_folder / "guide.py"
    program.write_text("\n".join(blocks))
    done = python(program, folder=readers_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "{'KeyformerKVCache': 2}\n"


COMMANDS = re.findall(r"^python -m (keyformer\.\w+) (.*)$", GUIDE, re.MULTILINE)


@pytest.mark.parametrize(("module", "arguments"), COMMANDS, ids=[module for module, _ in COMMANDS])
def test_the_guides_commands_run(module: str, arguments: str, readers_folder: Path) -> None:
    # a server would go on; that it has these options is what its help, asked for behind them, shows
    more = ("--help",) if module == "keyformer.server" else ()
    done = python("-m", module, *shlex.split(arguments), *more, folder=readers_folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_guide_names_every_command_policy_and_option() -> None:
    assert [module for module, _ in COMMANDS] == ["keyformer.generate", "keyformer.inspect", "keyformer.server"]
    assert "\npython -m keyformer.selftest\n" in GUIDE  # tests/keyformer/test_selftest.py runs it
    table = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", GUIDE, re.MULTILINE)
    assert table == [(name, policy.__name__) for name, policy in keyformer.POLICIES.items()]
    need_no_queries = {name for name, p in keyformer.POLICIES.items() if p.attention != "query"} - {"full"}
    sentence = re.search(r"instead of guessing;\n(.*) run without it", GUIDE)
    assert sentence and set(re.findall(r"`(\w+)`", sentence[1])) == need_no_queries
    for option in inspect.signature(keyformer.make_prompt_cache).parameters:
        assert option in GUIDE


@pytest.mark.parametrize("name", keyformer.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(keyformer, name)
    if not isinstance(thing, (type, FunctionType)):
        assert name == "POLICIES"  # a dict has no docstring of its own
        return
    said = {name: inspect.getdoc(thing)}
    if isinstance(thing, type):
        public = [n for n, part in vars(thing).items() if n[0] != "_" and isinstance(part, (FunctionType, property))]
        said |= {f"{name}.{n}": inspect.getdoc(getattr(thing, n)) for n in public}
    # what a dataclass says of itself is its signature
    silent = [where for where, text in said.items() if not text or text.startswith(f"{name}(")]
    assert silent == []

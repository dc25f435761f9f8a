"""The commands as a person uses them: what they print and write, what they refuse, and how they end."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import batch_generate, generate, load
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models import mamba
from PIL import Image
from small import randomize, tiny_llama

from keyformer import H2O, Full, Keyformer, KeyformerKVCache, Streaming, attached, make_prompt_cache
from keyformer import generate as generate_command
from keyformer import inspect as inspect_command
from keyformer import server as server_command
from keyformer.command import EVICTION_OPTIONS, Refusal, refusing, run
from keyformer.picture import Panel, draw

PROJECT = Path(__file__).resolve().parent.parent.parent
# output is buffered, as it is for most people: what could not be written is then tried again when Python ends
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PROJECT), "PYTHONUNBUFFERED": ""}
PROMPT = (
    "The code of the blue door is 4821, the code of the green door is 7365. Some additional rules apply for certain "
    "operators, and extensions must define their own conversion behaviour. Question: where does Alice live?"
)


@pytest.fixture(scope="session")
def tiny(tiny_model_folder: Path) -> tuple[Any, Any]:
    return load(str(tiny_model_folder))


@pytest.fixture(scope="session")
def stateless(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model without any attention, and so without rows to evict."""
    folder = tmp_path_factory.mktemp("models") / "mamba"
    shutil.copytree(tiny_model_folder, folder)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = {
        "model_type": "mamba",
        "vocab_size": vocabulary,
        "hidden_size": 16,
        "intermediate_size": 32,
        "state_size": 4,
        "num_hidden_layers": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = mamba.Model(mamba.ModelArgs(**config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    return folder


def command(name: str, *arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"keyformer.{name}", *map(str, arguments)]
    return subprocess.run(line, input=stdin, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)


def figures(errors: str) -> dict[str, str]:
    """The lines of standard error by their names."""
    return {line[:11].strip(): line[12:] for line in errors.splitlines()}


# -- generate ----------------------------------------------------------------------------------------------------------


def test_the_text_goes_to_stdout_and_what_it_took_to_stderr(tiny: Any, tiny_model_folder: Path) -> None:
    model, tokenizer = tiny
    done = command(
        *("generate", "--model", tiny_model_folder, "--policy", "h2o", "--budget", 24, "--set", "recent=0.25"),
        *("--set", "n_sink=2", "--max-tokens", 30, "--prompt", PROMPT, "--ignore-chat-template"),
    )
    assert done.returncode == 0, done.stderr
    prompt = tokenizer.encode(PROMPT)
    caches = make_prompt_cache(model, H2O(recent=0.25, n_sink=2), 24)
    with attached(model):
        text = generate(model, tokenizer, prompt, max_tokens=30, prompt_cache=caches)
    assert done.stdout == text + "\n"
    seen, row = len(prompt) + 30, 2 * 2 * 16 * 4  # keys and values of 2 heads of 16 float32
    lines = figures(done.stderr)
    assert re.fullmatch(rf"{len(prompt)} tokens, [\d.]+ tokens/s", lines["prompt"])
    assert re.fullmatch(r"30 tokens, [\d.]+ tokens/s", lines["generation"])
    assert lines["policy"].startswith("h2o (n_sink=2, recent=0.25), budget 24 rows, prefill full, positions original")
    assert lines["layers"] == "2 of 2 evict"
    assert lines["rows kept"] == f"24 of {seen} in every KV head"
    kept, full = (f"{2 * rows * row / 1024:.1f} KiB" for rows in (24, seen))
    assert lines["bytes kept"] == f"{kept} of the full cache's {full} ({24 / seen:.1%}), keys and values"
    assert lines["allocated"].startswith(f"{sum(c.nbytes for c in caches) / 1024:.1f} KiB")
    assert caches[0].offset == seen


def in_process(main: Callable[[list[str]], int], *arguments: object) -> int:
    try:
        return main([str(a) for a in arguments])
    except SystemExit as end:  # argparse
        assert isinstance(end.code, int)
        return end.code


def test_full_is_what_mlx_lm_writes(
    tiny: Any, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    arguments = ("--model", tiny_model_folder, "--policy", "full", "--prompt-file", file, "--max-tokens", 12)
    assert in_process(generate_command.main, *arguments, "--system-prompt", "Be brief.") == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    out, err = capsys.readouterr()
    assert out == generate(model, tokenizer, prompt, max_tokens=12) + "\n"
    assert figures(err)["policy"] == "full: every row is kept"
    assert figures(err)["rows kept"] == f"{len(prompt) + 12} of {len(prompt) + 12} in every KV head"


def test_a_fraction_is_of_the_prompt_and_stdin_is_read(tiny: Any, tiny_model_folder: Path) -> None:
    tokens = len(tiny[1].encode(PROMPT))
    done = command(
        *("generate", "--model", tiny_model_folder, "--budget", 0.25, "--prompt", "-", "--ignore-chat-template"),
        *("--max-tokens", 3, "--allocate", "3,1", "--prefill", "chunked", "--prefill-step-size", 7),
        stdin=PROMPT,
    )
    assert done.returncode == 0, done.stderr
    rows = -(-tokens // 4)
    lines = figures(done.stderr)
    assert lines["policy"] == (
        f"keyformer, budget {rows} rows (0.25 of {tokens} prompt tokens), prefill chunked, positions original, "
        "allocate 3,1"
    )
    found = re.fullmatch(rf"\d+ to \d+ of {tokens + 3} per KV head, layer by layer: (\d+) (\d+)", lines["rows kept"])
    assert found
    first, second = map(int, found.groups())
    assert first + second == 2 * rows
    assert abs(first - 3 * second) <= 3
    with attached(tiny[0], Keyformer(), rows, "chunked", allocate=(3, 1)):
        text, other = (generate(*tiny, PROMPT, max_tokens=3, prefill_step_size=step) for step in (7, 2048))
    assert done.stdout == text + "\n" != other + "\n"


def test_layers_that_do_not_evict_are_counted(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sliding"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ("--model", folder, "--budget", 16, "-p", PROMPT, "--ignore-chat-template", "--max-tokens", 2)
    assert in_process(generate_command.main, *arguments) == 0
    lines = figures(capsys.readouterr().err)
    assert lines["layers"] == "1 of 2 evict; the others keep mlx-lm's own: 1 RotatingKVCache"
    assert lines["bytes kept"].startswith("4.0 KiB of")  # 16 rows, keys and values, 2 heads of 16 float32


def test_sampling_is_repeated_by_its_seed(tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*sampling: object) -> str:
        arguments = ("--model", tiny_model_folder, "--budget", 30, "-p", PROMPT, "--max-tokens", 15)
        assert in_process(generate_command.main, *arguments, *sampling) == 0
        return capsys.readouterr().out

    first = text("--temp", 1, "--top-p", 0.95, "--seed", 1)
    assert first == text("--temp", 1, "--top-p", 0.95, "--seed", 1)
    assert first != text("--temp", 1, "--top-p", 0.95, "--seed", 2)
    assert text("--temp", 1, "--top-p", 1e-6, "--seed", 2) == text()  # only the likeliest token is left


def test_a_conversation_is_saved_and_goes_on(
    tiny: Any, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = tiny
    file = tmp_path / "talk.safetensors"
    eviction = ("--policy", "streaming", "--budget", 0.5, "--positions", "contiguous")
    turn = ("--model", tiny_model_folder, "--max-tokens", 9, "--ignore-chat-template", "--prompt-cache-file", file)
    assert in_process(generate_command.main, *turn, *eviction, "-p", PROMPT) == 0
    first, _ = capsys.readouterr()
    assert in_process(generate_command.main, *turn, "-p", "Go on: ") == 0
    second, figures_of_second = capsys.readouterr()

    prompt, more = tokenizer.encode(PROMPT), tokenizer.encode("Go on: ")
    rows = -(-len(prompt) // 2)
    caches = make_prompt_cache(model, Streaming(), rows, positions="contiguous")
    with attached(model):
        for tokens, text in ((prompt, first), (more, second)):
            assert text == generate(model, tokenizer, tokens, max_tokens=9, prompt_cache=caches) + "\n"
    seen = len(prompt) + 9 + len(more) + 9
    assert figures(figures_of_second)["rows kept"] == f"{rows} of {seen} in every KV head"

    # the same options again are no contradiction, others are
    assert in_process(generate_command.main, *turn, *eviction, "-p", "Go on: ") == 0
    capsys.readouterr()
    for wrong, message in (
        (("--budget", 30), "--budget: expected the options .*streaming, budget"),
        (("--policy", "h2o", "--budget", 0.5), "--policy: expected the options"),
        (("--system-prompt", "Be brief."), "--system-prompt: expected to be left out"),
        (("--model", tiny_model_folder.parent), "--model: expected .*tiny, with which"),
    ):
        assert in_process(generate_command.main, *turn, "-p", "Go on: ", *wrong) == 2
        out, err = capsys.readouterr()
        assert re.search(message, err), err
        assert out == ""


def bad(*arguments: object) -> Any:
    return pytest.param(arguments[:-1], arguments[-1], id=" ".join(map(str, arguments[:-1])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        bad("--policy", "best", "policy: expected one of full, .*, got 'best'"),
        bad("--budget", "many", "--budget: expected a whole number of rows .* got 'many'"),
        bad("--budget", "1.5", r"budget: expected a fraction in \(0, 1\].* got 1.5"),
        bad("--budget", "0", "budget: expected an integer of at least 1, got 0"),
        bad("--budget", "4", "--set", "n_sink=8", "budget: expected more rows than are protected .*, got 4"),
        bad("--policy", "full", "--budget", "64", "--budget: expected to be left out, .* got '64'"),
        bad("--policy", "h2o", "--set", "window=4", "--budget: policy h2o needs"),
        bad("--set", "recent", "--set: expected name=value .* got 'recent'"),
        bad("--set", "name=h2o", "--set: expected a choice of the policy, got name=h2o; use --policy"),
        bad("--set", "recnt=1", "unknown choice recnt; expected some of attention"),
        bad("--set", "redraw=maybe", "redraw: expected true or false, got 'maybe'"),
        bad("--set", "recent=true", "recent: expected a whole number .* got True"),
        bad("--prefill", "some", "argument --prefill: invalid choice: 'some'"),
        bad("--allocate", "3;1", "--allocate: expected uniform, pyramid or one positive weight .* got '3;1'"),
        bad("--allocate", "3,1,1", "allocate: expected 2 weights, .* got 3"),
        bad("--allocate", "3,-1", "allocate: expected positive numbers as weights, got -1.0"),
        bad("--max-tokens", "0", "argument --max-tokens/-m: expected a whole number of at least 1, got '0'"),
        bad("--temp", "-1", "argument --temp: expected a number of at least 0, got '-1'"),
        bad("--temp", "hot", "argument --temp: expected a number of at least 0, got 'hot'"),
        *(
            bad("--seed", seed, rf"argument --seed: expected a whole number from 0 to 2\*\*64 - 1, got '{seed}'")
            for seed in ("x", "-1", str(2**64), "1180591620717411303424", "1" * 5000)
        ),
        bad("--max-tokens", str(2**64), "argument --max-tokens/-m: expected a whole number of at least 1, got '18446"),
        bad(
            "--set",
            f"anneal_steps=1{'0' * 400}",
            r"--set: expected numbers below 2\*\*64, got anneal_steps of 401 digits",
        ),
        bad("--set", f"tau_init=-1{'0' * 400}", r"--set: expected numbers below 2\*\*64, got tau_init of 402 digits"),
        bad("--prompt", "caf\udce9", "--prompt: expected text in UTF-8, got other bytes"),
        bad("--system-prompt", "caf\udce9", "--system-prompt: expected text in UTF-8, got other bytes"),
        bad(
            "--prompt-cache-file", "caf\udce9.safetensors", "--prompt-cache-file: expected a file that can be read and"
        ),
        bad("--prompt-cache-file", f"{'n' * 300}.safetensors", "--prompt-cache-file: .*File name too long"),
        bad("--prompt-cache-file", f"{'n' * 300}/talk.safetensors", "--prompt-cache-file: .*File name too long"),
        bad("--top-p", "0", "argument --top-p: expected a number above 0 and at most 1, got '0'"),
        bad("--prompt", "x", "--prompt-file", "y", "argument --prompt-file: not allowed with argument --prompt"),
        bad("--prompt", "", "--prompt: expected some text, got none"),
        bad("--system-prompt", "x", "--ignore-chat-template", "--system-prompt: needs a chat template, got none"),
        bad("--prompt-cache-file", "talk.bin", "--prompt-cache-file: expected a .safetensors file"),
        bad("--prompt-cache-file", "no/talk.safetensors", "--prompt-cache-file: .* in a folder that exists"),
        bad(
            "--model", "no such folder", "--model: expected a folder of an mlx-lm model or a hub id, got 'no such fold"
        ),
    ],
)
def test_bad_input_is_one_message(
    arguments: tuple[str, ...], message: str, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual: dict[str, object] = {"--model": tiny_model_folder, "--budget": 64, "--prompt": "Hello"}
    if "full" in arguments or "h2o" in arguments:
        del usual["--budget"]  # what these cases are about
    line = [str(a) for name, value in usual.items() if name not in arguments for a in (name, value)]
    assert in_process(generate_command.main, *line, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(rf"keyformer\.generate: .*{message}", err), err
    assert len(err.splitlines()) == 1


def test_files_that_cannot_be_read_are_one_message(
    tiny_model_folder: Path, stateless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    binary, foreign = tmp_path / "binary.txt", tmp_path / "foreign.safetensors"
    binary.write_bytes(b"\xff\xfe\x00")
    mx.save_safetensors(str(foreign), {"a": mx.zeros(3)})
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model_folder, broken)
    (broken / "config.json").write_text("{")
    for arguments, message in (
        (("--model", tiny_model_folder, "--prompt-file", binary), "--prompt-file: expected text in UTF-8"),
        (("--model", tiny_model_folder, "--prompt-file", tmp_path), "--prompt-file: .*Is a directory"),
        (("--model", tiny_model_folder, "--prompt-file", "n" * 300), "--prompt-file: .*File name too long"),
        (("--model", tiny_model_folder, "-p", "x", "--prompt-cache-file", foreign), "expected a cache saved by"),
        (("--model", broken, "-p", "x"), "--model: expected a folder of an mlx-lm model .*JSONDecodeError"),
        (("--model", stateless, "-p", "x"), "there is nothing to evict"),
    ):
        assert in_process(generate_command.main, *arguments, "--budget", 64) == 2
        out, err = capsys.readouterr()
        assert re.search(message, err), err
        assert out == "" and len(err.splitlines()) == 1


def test_a_chat_template_that_refuses_is_one_message(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    for arguments, message in (
        (
            ("--system-prompt", "Be brief."),
            "--model: expected a chat template for messages of system and user, .*no system",
        ),
        ((), "--prompt: expected text of at least one token, got none"),  # this template writes nothing
    ):
        assert in_process(generate_command.main, "--model", folder, "--budget", 64, "-p", "x", *arguments) == 2
        out, err = capsys.readouterr()
        assert re.search(message, err), err
        assert out == "" and len(err.splitlines()) == 1


def test_only_refusals_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> None:
        raise Refusal("--this: expected that, got this.")

    def faulty() -> None:
        raise ValueError("a fault of ours")

    assert run("keyformer.test", refused) == 2
    assert capsys.readouterr().err == "keyformer.test: --this: expected that, got this.\n"
    with pytest.raises(ValueError, match="a fault of ours"):
        run("keyformer.test", faulty)
    with pytest.raises(Refusal, match="a judgement"), refusing():
        raise ValueError("a judgement of the library")


has_a_full_device = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full, without space, is Linux's")


@pytest.mark.parametrize(
    ("redirected", "message"),
    [
        ("<&-", "--prompt: expected text from standard input, got none, since it is closed."),
        (">&-", "standard output: expected that it can be written, got none, since it is closed."),
        pytest.param(
            ">/dev/full",
            r"standard output: expected that .* written, got an error \(.*No space left on device\)\.",
            marks=has_a_full_device,
        ),
    ],
)
@pytest.mark.parametrize("name", ["generate", "inspect"])
def test_streams_that_do_not_work_are_one_message(
    name: str, redirected: str, message: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    arguments = [f"keyformer.{name}", "--model", str(tiny_model_folder), "--budget", "32"]
    arguments += ["-o", str(tmp_path)] if name == "inspect" else ["-m", "3"]
    line = f'exec "$@" -p - {redirected}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", *arguments],
        **({} if "<" in redirected else {"input": PROMPT}),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"keyformer\.{name}: {message}\n", done.stderr), done.stderr


@has_a_full_device
def test_help_that_cannot_be_written_is_one_message(tiny_model_folder: Path) -> None:
    for name in ("generate", "inspect", "server"):
        with open("/dev/full", "w") as full:
            line = [sys.executable, "-m", f"keyformer.{name}", "--help"]
            done = subprocess.run(line, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
        assert done.returncode == 2
        assert re.fullmatch(rf"keyformer\.{name}: standard output: .*No space left on device\)\.\n", done.stderr)


def test_what_it_took_never_goes_to_stdout(tiny: Any, tiny_model_folder: Path, tmp_path: Path) -> None:
    line = 'exec "$@" 2>&-'
    arguments = ("--model", tiny_model_folder, "--policy", "full", "-p", PROMPT, "-m", 3, "--ignore-chat-template")
    command_line = ["sh", "-c", line, "sh", sys.executable, "-m", "keyformer.generate", *map(str, arguments)]
    done = subprocess.run(command_line, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, generate(*tiny, PROMPT, max_tokens=3) + "\n")


def test_characters_that_the_output_has_no_bytes_for_are_escaped(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    line = [sys.executable, "-m", "keyformer.inspect", "--model", str(tiny_model_folder), "--budget", "16"]
    line += ["-p", PROMPT, "-o", str(folder)]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [os.fsencode(f"{tmp_path}/caf\\xe9/kept.{kind}") for kind in ("html", "png")]
    arguments = ("--model", tiny_model_folder, "--budget", 16, "-p", PROMPT, "-m", 40, "--temp", 2, "--seed", 1)
    texts = []
    for encoding in ("utf-8", "ascii"):
        environment = ENVIRONMENT | {"PYTHONIOENCODING": encoding}
        line = [sys.executable, "-m", "keyformer.generate", *map(str, arguments)]
        done = subprocess.run(line, env=environment, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout.decode())
    assert not texts[0].isascii()
    assert texts[1] == texts[0].encode("ascii", "backslashreplace").decode()


# -- a conversation in a file ------------------------------------------------------------------------------------------


def saved(file: Path, model: Path, *arguments: object) -> bytes:
    """A conversation of one turn in `file`; returns its bytes."""
    turn = ("--model", model, "--budget", 30, "--max-tokens", 3, "-p", PROMPT, "--prompt-cache-file", file, *arguments)
    assert in_process(generate_command.main, *turn) == 0
    return file.read_bytes()


def small_files() -> None:
    """No file of this process grows beyond 8 KiB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))


def test_a_save_that_fails_leaves_the_old_conversation(tiny_model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    before = saved(file, tiny_model_folder)
    assert len(before) > 8192
    for existing in (True, False):
        arguments = ("--model", tiny_model_folder, "-p", "Go on: ", "-m", 3, "--prompt-cache-file", file)
        line = [
            sys.executable,
            "-m",
            "keyformer.generate",
            *map(str, arguments),
            *(() if existing else ("--budget", "30")),
        ]
        # no byte code is to be written, which would fail too
        environment = ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            line, env=environment, preexec_fn=small_files, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 2
        assert re.fullmatch(
            r"keyformer\.generate: --prompt-cache-file: expected a file that can be written.*\n", done.stderr
        )
        assert [f.read_bytes() for f in tmp_path.iterdir()] == ([before] if existing else [])
        file.unlink(missing_ok=True)


def test_a_conversation_in_use_is_refused_and_survives_a_kill(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.safetensors"
    usual = ("--model", tiny_model_folder, "-p", PROMPT, "--prompt-cache-file", file)
    for begun in (False, True):
        before = saved(file, tiny_model_folder) if begun else b""
        budget = () if begun else ("--budget", 30)
        first = started("generate", *usual, *budget, "--max-tokens", 10**7, stdout=subprocess.PIPE)
        assert first.stdout and first.stdout.read(10)
        capsys.readouterr()
        assert in_process(generate_command.main, *usual, *budget, "--max-tokens", 3) == 2
        out, err = capsys.readouterr()
        assert re.fullmatch(r"keyformer\.generate: --prompt-cache-file: .* which another process has in use; .*\n", err)
        assert out == ""
        first.kill()
        first.wait()
        assert file.read_bytes() == before
        assert in_process(generate_command.main, *usual, *budget, "--max-tokens", 3) == 0
        assert len(file.read_bytes()) > 8192
        assert [f.name for f in tmp_path.iterdir()] == [file.name]
        file.unlink()


def test_an_interrupted_conversation_is_as_if_it_had_not_begun(tiny_model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    arguments = ("--model", tiny_model_folder, "--budget", 32, "-p", PROMPT, "-m", 10**7, "--prompt-cache-file", file)
    process = started("generate", *arguments, stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert list(tmp_path.iterdir()) == []


def test_what_was_read_is_not_what_is_in_the_file_later(tiny_model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.safetensors"
    content = saved(file, tiny_model_folder)
    options = argparse.Namespace(model=str(tiny_model_folder), system_prompt=None, **dict.fromkeys(EVICTION_OPTIONS))
    caches, _ = generate_command._saved(file, options)
    with file.open("r+b") as opened:  # in place, as a program other than ours may save
        opened.seek(-8192, os.SEEK_END)
        opened.write(bytes(8192))
    later = [[np.array(a) for a in c.state if isinstance(a, mx.array)] for c in caches]
    file.write_bytes(content)
    for cache, found in zip(mlx_lm_cache.load_prompt_cache(str(file)), later, strict=True):
        for a, b in zip((a for a in cache.state if isinstance(a, mx.array)), found, strict=True):
            np.testing.assert_array_equal(np.array(a), b)


def test_a_saved_conversation_keeps_its_permissions_and_links(tiny_model_folder: Path, tmp_path: Path) -> None:
    os.umask(before := os.umask(0o022))
    file, link = tmp_path / "talk of today", tmp_path / "talk.safetensors"
    link.symlink_to(file.name)
    saved(link, tiny_model_folder)
    assert file.stat().st_mode & 0o777 == 0o666 & ~before
    file.chmod(0o640)
    content = file.read_bytes()
    assert in_process(generate_command.main, "--model", tiny_model_folder, "-p", "x", "--prompt-cache-file", link) == 0
    assert link.is_symlink() and file.read_bytes() != content
    assert file.stat().st_mode & 0o777 == 0o640


def test_options_belong_to_the_file(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.safetensors"
    saved(file, tiny_model_folder, "--policy", "streaming")
    turn = ("--model", tiny_model_folder, "-m", 1, "-p", "x", "--prompt-cache-file", file)
    for same in (("--policy", "streaming"), ("--budget", 30), ("--prefill", "full"), ("--allocate", "uniform")):
        assert in_process(generate_command.main, *turn, *same) == 0
    capsys.readouterr()
    for name, other in (
        ("--policy", "h2o"),
        ("--policy", "full"),
        ("--policy", "best"),
        ("--budget", "31"),
        ("--budget", "4"),
        ("--set", "n_sink=2"),
        ("--prefill", "chunked"),
        ("--positions", "contiguous"),
        ("--allocate", "2,1"),
    ):
        assert in_process(generate_command.main, *turn, name, other) == 2
        out, err = capsys.readouterr()
        message = (
            f"{name}: expected the options .* was made with .streaming, budget 30 rows.*since they belong to the file"
        )
        assert re.match(rf"keyformer\.generate: {message}, got .*{other}", err), err
        assert out == "" and len(err.splitlines()) == 1


def test_a_file_that_is_no_conversation_of_this_model_is_one_message(
    tiny: Any, tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "talk.safetensors"
    content = saved(file, tiny_model_folder)
    ours, metadata = mlx_lm_cache.load_prompt_cache(str(file), return_metadata=True)
    plain = [mlx_lm_cache.KVCache() for _ in ours]
    with attached(tiny[0]):
        generate(*tiny, PROMPT, max_tokens=3, prompt_cache=plain)
    made_with = json.loads(metadata["keyformer"])
    no_conversation, other_model = "expected a cache saved by keyformer.generate", "expected the caches of "
    turn = ("--model", tiny_model_folder, "-p", "x", "--prompt-cache-file", file)
    for caches, said, message in (
        (ours, "{", no_conversation),
        (ours, "{}", no_conversation),
        (ours, "[1]", no_conversation),
        (ours, "null", no_conversation),
        (ours, json.dumps(made_with | {"seen": "5"}), no_conversation),
        (ours, json.dumps(made_with | {"seen": 1}), no_conversation),
        (ours, json.dumps(made_with | {"policy": "best"}), no_conversation),
        (ours, json.dumps(made_with | {"set": 5}), no_conversation),
        (ours, json.dumps(made_with | {"budget": "31"}), other_model),
        (plain, metadata["keyformer"], other_model),
        (ours[:1], metadata["keyformer"], other_model),
        (ours[::-1], metadata["keyformer"], other_model),
    ):
        mlx_lm_cache.save_prompt_cache(str(file), caches, {"keyformer": said})
        capsys.readouterr()
        assert in_process(generate_command.main, *turn) == 2
        out, err = capsys.readouterr()
        assert re.match(rf"keyformer\.generate: --prompt-cache-file: {message}", err), err
        assert out == "" and len(err.splitlines()) == 1
    for damaged in (content[:4], content[:500], content[:-1], b"{}", bytes(100)):
        file.write_bytes(damaged)
        assert in_process(generate_command.main, *turn) == 2
        _, err = capsys.readouterr()
        assert no_conversation in err and len(err.splitlines()) == 1
        assert file.read_bytes() == damaged
    file.unlink()
    for make in (file.mkdir, lambda: (file.rmdir(), os.mkfifo(file))):
        make()
        assert in_process(generate_command.main, *turn, "--budget", 30) == 2
        _, err = capsys.readouterr()
        assert re.search("--prompt-cache-file: expected a (regular )?file", err) and len(err.splitlines()) == 1


def started(name: str, *arguments: object, **pipes: Any) -> subprocess.Popen[bytes]:
    """A command as a terminal starts it: it may be interrupted, even where this test may not."""
    line = [sys.executable, "-m", f"keyformer.{name}", *map(str, arguments)]
    handle = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    return subprocess.Popen(line, env=ENVIRONMENT, preexec_fn=handle, **pipes)


def test_ctrl_c_ends_it_quietly(tiny_model_folder: Path) -> None:
    arguments = ("--model", tiny_model_folder, "--budget", 32, "-p", PROMPT, "--max-tokens", 10**7)
    process = started("generate", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.read(10)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == b""


def test_a_reader_that_leaves_ends_it_quietly(tiny_model_folder: Path) -> None:
    arguments = ("--model", tiny_model_folder, "--budget", 32, "-p", PROMPT, "--max-tokens", 10**7)
    process = started("generate", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141


# -- inspect -----------------------------------------------------------------------------------------------------------

ODD = f'<script>alert("x")</script></b> & &amp; @data@ "quoted" \u6f22\u5b57 \U0001f642\tTab\n\n{PROMPT}\n</script>'


class Page(HTMLParser):
    """What the page holds: the tokens with their classes, the data, and every attribute that could fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str]] = []
        self.data: Any = None
        self.fetching: list[str] = []
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.fetching += [str(value) for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self._inside = {"b": "token", "script": str(given.get("id"))}.get(tag)
        if tag == "b":
            self.tokens.append((str(given["class"]), ""))

    def handle_data(self, data: str) -> None:
        if self._inside == "token":
            kind, text = self.tokens[-1]
            self.tokens[-1] = kind, text + data
        elif self._inside == "data":
            self.data = json.loads(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


@pytest.fixture(scope="module")
def inspected(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the command wrote, as a process of its own."""
    folder = tmp_path_factory.mktemp("inspect") / "a" / "b"
    done = command(
        *("inspect", "--model", tiny_model_folder, "--policy", "keyformer", "--budget", 40, "--set", "seed=3"),
        *("--allocate", "3,2", "--prompt", "-", "--ignore-chat-template", "--tokens", 5, "--output", folder),
        *("--prefill-step-size", 50),
        stdin=ODD,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(folder / "kept.html"), str(folder / "kept.png")]
    return folder


@pytest.fixture(scope="module")
def expected(tiny: Any) -> dict[str, Any]:
    """The same, by mlx-lm and the library: tokens, and kept positions and ranks at both moments."""
    model, tokenizer = tiny
    prompt = tokenizer.encode(ODD)
    moments = []
    for more in (0, 5):
        caches = make_prompt_cache(model, Keyformer(seed=3), 40, allocate=(3, 2))
        with attached(model):
            written = [t for t, _ in generate_step(mx.array(prompt), model, max_tokens=more, prompt_cache=caches)]
        moments.append({"kept": [np.array(c.kept()) for c in caches], "ranks": [np.array(c.ranks()) for c in caches]})
    return {"prompt": prompt, "tokens": prompt + written, "moments": moments}


def test_the_page_holds_what_was_kept(inspected: Path, expected: dict[str, Any], tiny: Any) -> None:
    page = Page((inspected / "kept.html").read_text())
    tokens = expected["tokens"]
    assert page.data["prompt"] == len(expected["prompt"])
    assert page.data["layers"] == [[0, 2], [1, 2]]
    assert [m["title"] for m in page.data["stages"]] == ["after the prompt", "after 5 more tokens"]
    assert [m["seen"] for m in page.data["stages"]] == [len(tokens) - 5, len(tokens)]
    for shown, moment in zip(page.data["stages"], expected["moments"], strict=True):
        assert [len(positions) for positions in shown["kept"]] == [48, 48, 32, 32]
        assert shown["kept"] == [row.tolist() for layer in moment["kept"] for row in layer]
        for scores, row in zip(shown["scores"], (row for layer in moment["ranks"] for row in layer), strict=True):
            np.testing.assert_allclose(scores, row, rtol=1e-3)
    counts = sum((np.bincount(row, minlength=len(tokens)) for layer in moment["kept"] for row in layer), start=0)
    assert [kind for kind, _ in page.tokens] == [f"k{-(-5 * count // 4)}" for count in counts]
    assert "".join(text for _, text in page.tokens) == tiny[1].decode(tokens)


def test_the_page_needs_no_network_and_no_text_can_break_it(inspected: Path) -> None:
    text = (inspected / "kept.html").read_text()
    assert Page(text).fetching == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert text.count("<script") == 2 and text.count("</script>") == 2


def test_names_and_tokens_of_any_kind_are_text() -> None:
    texts = ["</b><script>alert(1)</script>", "<img src=http://x>", "&lt;", '"', "", "@text@"]
    moment = inspect_command.Moment("then", len(texts), [[[0, 2, 5]]], [[[1.0, -np.inf, 1e-9]]])
    kept = inspect_command.Kept(list(range(len(texts))), len(texts), [4], [moment], [64])
    text = inspect_command.page(kept, texts, "<i>model</i> @policy@", "<a href=x>")
    page = Page(text)
    assert [shown for _, shown in page.tokens] == texts
    assert [kind for kind, _ in page.tokens] == ["k5", "k0", "k5", "k0", "k0", "k5"]
    assert page.fetching == []
    assert "<i>model" not in text and "&lt;i&gt;model&lt;/i&gt; @policy@" in text
    assert page.data["stages"][0]["scores"] == [[1.0, None, 1e-9]]  # JSON has no infinity


def test_the_picture_shows_the_same(inspected: Path, expected: dict[str, Any]) -> None:
    pixels = np.array(Image.open(inspected / "kept.png").convert("RGB")).astype(int)
    blue = (pixels == (22, 92, 182)).all(axis=2)
    n = len(expected["tokens"])
    scale = 1400 // n
    left = 96
    # every head's line is the only one with its pattern of blue; legend and texts lie left of or above the plot
    lines = blue[:, left + scale // 2 : left + n * scale : scale]
    rows = [tuple(line) for line in lines if line.sum() > 1]
    distinct = [row for i, row in enumerate(rows) if i == 0 or row != rows[i - 1]]
    wanted = []
    for moment in expected["moments"]:
        for layer in moment["kept"]:
            for kept in layer:
                wanted.append(tuple(p in set(kept.tolist()) for p in range(n)))
    assert distinct == wanted
    ends = (pixels == (214, 84, 32)).all(axis=2).sum(axis=0)  # a line through both panels, two pixels wide
    end = left + len(expected["prompt"]) * scale
    assert ends[end] == ends[end + 1] > 200
    assert ends[left:end].sum() < 200


def test_many_positions_share_pixels() -> None:
    kept = np.zeros((3, 2800), bool)
    kept[1, :1400] = True
    kept[2, ::2] = True
    picture = draw("Title", "and more: 50 %", [Panel("then", kept)], [(7, 1), (9, 2)], 2800, 2800)
    pixels = np.array(Image.open(io.BytesIO(picture)).convert("RGB")).astype(int)
    colours = [tuple(c) for c in pixels[:, 96 + 100]]
    empty, full, half = (236, 239, 244), (22, 92, 182), (129, 165, 213)
    assert [c for i, c in enumerate(colours) if c in (empty, full, half) and colours[i - 1] != c] == [empty, full, half]
    assert tuple(pixels[colours.index(full), 96 + 900]) == empty


def test_token_texts_join_to_the_text_and_split_characters_belong_to_their_last_token(tiny: Any) -> None:
    _, tokenizer = tiny
    tokens = tokenizer.encode("Rome \u6f22\u5b57 \U0001f642 the name")
    texts = inspect_command.token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == tokenizer.decode(tokens)
    assert {"\u6f22", "\u5b57", "\U0001f642"} < set(texts)
    assert texts.count("") == 2 + 2 + 3
    cut = inspect_command.token_texts(tokenizer, tokens[: texts.index("\u6f22")])
    assert "".join(cut) == tokenizer.decode(tokens[: len(cut)])


def test_watching_without_more_tokens_is_one_moment_and_sliding_layers_are_left_out() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = randomize(tiny_llama(num_hidden_layers=4, layer_types=kinds, sliding_window=6))
    kept = inspect_command.watch(model, list(range(30)), {"policy": H2O(), "budget": 8})
    assert kept.layers == [1, 3]
    assert [m.seen for m in kept.moments] == [30]
    assert [len(head) for layer in kept.moments[0].kept for head in layer] == [8] * 4
    everything = inspect_command.watch(model, [5], {"policy": Full(), "budget": None}, 2)
    assert everything.moments[1].kept == [[[0, 1, 2]] * 2] * 2


def test_what_inspect_refuses(tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (tmp_path / "taken" / "kept.html").mkdir(parents=True)
    usual = ("--model", tiny_model_folder, "--budget", 64, "-p", PROMPT)
    for arguments, message in (
        ((), "the following arguments are required: --output/-o"),
        (("--output", file), "--output: expected a folder that can be written, got .*file"),
        (("--output", tmp_path / "taken"), "--output: expected a folder that can be written, .*kept.html is there"),
        (("--output", tmp_path / ("n" * 300)), "--output: expected a folder that can be written, .*File name too long"),
        (("--output", tmp_path, "--tokens", "-3"), "argument --tokens/-n: expected a whole number"),
        (("--output", tmp_path, "--set", "tau_init=0"), "tau_init: "),
    ):
        assert in_process(inspect_command.main, *usual, *arguments) == 2
        out, err = capsys.readouterr()
        assert re.match(rf"keyformer\.inspect: .*{message}", err), err
        assert out == "" and len(err.splitlines()) == 1


def test_a_page_that_cannot_be_written_leaves_the_old_one(tiny_model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "kept.html").write_text("old")
    line = [
        sys.executable,
        "-m",
        "keyformer.inspect",
        "--model",
        str(tiny_model_folder),
        "--budget",
        "16",
        "-p",
        PROMPT,
    ]
    environment = ENVIRONMENT | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*line, "-o", str(tmp_path)],
        env=environment,
        preexec_fn=small_files,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"keyformer\.inspect: --output: expected a file that can be written, got .*\n", done.stderr)
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


@pytest.mark.browser
def test_the_page_in_a_browser(inspected: Path, expected: dict[str, Any]) -> None:
    from playwright import sync_api as playwright

    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert chromium, "expected chromium, got none: apt-get install chromium, or set CHROMIUM"
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    complaints: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=flags.split())
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((inspected / "kept.html").as_uri())
        before = expected["moments"][0]["kept"]
        last = len(expected["prompt"]) - 1  # kept by every head, since it is the most recent one
        page.hover(f"#text b >> nth={last}")
        assert "kept by 4 of 4 heads" in page.inner_text("#tip")
        # another moment, another head: the text is coloured anew
        page.click("text=after the prompt")
        page.select_option("#which", "2")
        colours = page.eval_on_selector_all("#text b", "spans => spans.map(span => span.className)")
        assert [i for i, c in enumerate(colours) if c == "k5"] == before[1][0].tolist()
        assert colours[-5:] == ["new"] * 5
        # the map: a click on the first row chooses that head, hovering says what it is
        box = page.locator("#map").bounding_box()
        assert box
        page.mouse.click(box["x"] + 300, box["y"] + 55)
        assert page.input_value("#which") == "0"
        assert re.search("layer 0, head 0: (evicted|kept, score)", page.inner_text("#tip"))
        assert complaints == []
        assert len(requests) == 1
        browser.close()


# -- server ------------------------------------------------------------------------------------------------------------


class Server:
    """A running `keyformer.server`."""

    def __init__(self, *arguments: object, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = log
        with log.open("wb") as file:
            self.process = started("server", "--port", self.port, *arguments, stdout=file, stderr=file)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", data, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ready(self) -> Server:
        until = time.monotonic() + 60
        while True:
            assert self.process.poll() is None and time.monotonic() < until, self.log.read_text()
            try:
                assert self.ask("/health") == (200, {"status": "ok"})
                return self
            except urllib.error.URLError:
                time.sleep(0.1)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def server(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    eviction = ("--policy", "h2o", "--budget", 20, "--set", "recent=0.25")
    running = Server("--model", tiny_model_folder, "--max-tokens", 25, *eviction, log=log)
    try:
        yield running.ready()
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait()


def test_requests_are_answered_from_caches_that_evict(server: Server, tiny: Any) -> None:
    model, tokenizer = tiny
    prompt = tokenizer.encode(PROMPT)
    with attached(model, H2O(recent=0.25), 20):
        alone = generate(model, tokenizer, prompt, max_tokens=25)
        batched = batch_generate(model, tokenizer, [prompt], max_tokens=25).texts[0]
    assert alone == batched != generate(model, tokenizer, prompt, max_tokens=25)  # the full cache says other things
    for one_by_one in ({}, {"seed": 1}):
        status, answer = server.ask("/v1/completions", {"prompt": PROMPT, **one_by_one})
        assert status == 200
        assert answer["choices"][0]["text"] == alone
        assert answer["usage"]["prompt_tokens"] == len(prompt)
    status, answer = server.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]})
    messages = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}], add_generation_prompt=True)
    with attached(model, H2O(recent=0.25), 20):
        expected = generate(model, tokenizer, messages, max_tokens=25)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, expected)


def test_what_cannot_evict_is_an_error_to_the_client_and_the_server_goes_on(server: Server, stateless: Path) -> None:
    for body, message in (
        ({"draft_model": str(stateless)}, "draft_model: expected none"),
        ({"model": str(stateless)}, "there is nothing to evict"),
        ({"model": str(stateless), "seed": 3}, "there is nothing to evict"),
        ({"model": "/no/such/folder"}, "/no/such/folder"),
    ):
        status, answer = server.ask("/v1/completions", {"prompt": PROMPT, **body})
        assert status == 404
        assert message in answer["error"]
        status, answer = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        *(
            ({"prompt": p}, 400, "prompt: expected some text, got")
            for p in ("", ["a", "b"], [1, 2], [], 5, None, {"a": 1})
        ),
        *(({"prompt": "x", "stop": s}, 400, "stop: expected a text or") for s in ([1], 5, [["a"]], {"a": 1}, [None])),
        *(({"prompt": "x", "seed": s}, 400, "seed: expected an integer from 0") for s in (-1, 2**64)),
        ({"prompt": "x", "logit_bias": {"1": None}}, 400, "NoneType"),
        ({"prompt": "x", "logit_bias": {"1": 10**400}}, 400, "OverflowError"),
        ({"prompt": "\ud800"}, 404, "TextEncodeInput"),
        ({"prompt": "x", "stop": ["\ud800"]}, 404, "TextEncodeInput"),
        ({"prompt": "x", "top_k": 100000, "temperature": 1}, 404, "top_k"),
        ({"prompt": "x", "temperature": 10**400}, 404, ""),
        ({"prompt": "x", "repetition_penalty": 10**400}, 404, ""),
        ({"prompt": "x", "presence_penalty": 10**400}, 404, ""),
        ({"prompt": "x", "repetition_penalty": 1.1, "repetition_context_size": 10**30}, 404, ""),
        ({"prompt": "x", "logit_bias": {str(10**20): 1}}, 404, "logit_bias: expected tokens from 0 to"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, 404, "logit_bias: expected tokens from 0 to"),
        ({"prompt": "x", "xtc_probability": 1.0, "xtc_threshold": 0.9, "temperature": 1}, 404, "threshold"),
        ({"prompt": "x", "top_logprobs": True}, 404, ""),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"chat_template": ""}},
            404,
            "prompt: ",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"return_tensors": "np"}},
            404,
            "prompt: ",
        ),
    ],
)
@pytest.mark.parametrize("joins", [False, True])
def test_no_request_ends_the_answers_to_others(
    server: Server, body: dict[str, Any], status: int, message: str, joins: bool
) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    alone = {} if joins or "seed" in body else {"seed": 1}  # mlx-lm serves requests with a seed outside the batch
    found, answer = server.ask(path, {"max_tokens": 2, **alone, **body})
    assert (found, message in answer["error"]) == (status, True), answer
    assert server.ask("/health") == (200, {"status": "ok"})
    right, answer = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 2})
    assert (right, answer["usage"]["completion_tokens"]) == (200, 2)


def test_another_model_of_a_request_evicts_too(
    server: Server, tiny: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = tiny
    other = tmp_path / "other"
    shutil.copytree(tiny_model_folder, other)
    with attached(model, H2O(recent=0.25), 20):
        expected = generate(model, tokenizer, PROMPT, max_tokens=25)
    for name in (str(other), "default_model", str(other)):
        status, answer = server.ask("/v1/completions", {"prompt": PROMPT, "model": name})
        assert (status, answer["choices"][0]["text"]) == (200, expected)


def test_models_come_and_go_and_leave_mlx_lm_as_it_was(tiny_model_folder: Path, stateless: Path) -> None:
    options = argparse.Namespace(
        model=str(tiny_model_folder),
        **dict.fromkeys(("adapter_path", "draft_model", "kv_bits", "chat_template", "use_default_chat_template")),
        **dict.fromkeys(("pipeline", "trust_remote_code"), False),
        **dict.fromkeys(EVICTION_OPTIONS) | {"policy": "streaming", "budget": "32"},
    )
    step = sys.modules["mlx_lm.generate"].generate_step  # type: ignore[attr-defined]
    provider = server_command.EvictingModelProvider(options)
    provider.load_default()
    first = provider.model
    assert [type(c) for c in mlx_lm_cache.make_prompt_cache(first)] == [KeyformerKVCache] * 2
    with pytest.raises(ValueError, match="there is nothing to evict"):
        provider.load(str(stateless))
    assert provider.model is None
    assert [type(c) for c in mlx_lm_cache.make_prompt_cache(first)] == [mlx_lm_cache.KVCache] * 2
    provider.load("default_model")
    assert provider.model is not first
    assert sys.modules["mlx_lm.generate"].generate_step is not step  # type: ignore[attr-defined]
    provider.reset()
    assert sys.modules["mlx_lm.generate"].generate_step is step  # type: ignore[attr-defined]


def test_ctrl_c_ends_the_server_quietly(server: Server) -> None:
    assert server.stop() == 0
    assert "Traceback" not in server.log.read_text()


def test_the_servers_help_has_both_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["keyformer.server", "--help"])
    with pytest.raises(SystemExit, match="0"):
        server_command.main()
    shown = capsys.readouterr().out
    for option in ("--policy", "--budget", "--set", "--allocate", "--draft-model", "--prompt-cache-size", "--top-k"):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--budget 0.5", "--budget: expected a whole number of rows, got 0.5"),
        ("--budget 64 --draft-model x", "--draft-model: expected none, since caches evict, got x"),
        ("--budget 64 --kv-bits 4", "--kv-bits: expected none, since caches evict, got 4"),
        ("--budget 64 --top-k x", "argument --top-k: invalid int value: 'x'"),
        ("--budget 64 --policy best", "policy: expected one of full, "),
    ],
)
def test_the_server_does_not_start_with_what_cannot_work(
    arguments: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["keyformer.server", *arguments.split()])
    assert in_process(lambda _: server_command.main()) == 2
    _, err = capsys.readouterr()
    assert err.startswith(f"keyformer.server: {message}")
    assert len(err.splitlines()) == 1


def test_a_model_that_cannot_evict_ends_the_server_that_was_started_with_it(stateless: Path, tmp_path: Path) -> None:
    server = Server("--model", stateless, "--budget", 64, log=tmp_path / "log.txt")
    assert server.process.wait(timeout=60) == 2
    log = server.log.read_text()
    assert re.search("^keyformer.server: --model: .*there is nothing to evict", log, re.MULTILINE)
    assert "Traceback" not in log


@pytest.mark.parametrize("address", [("--port", 99999), ("--port", -1), ("--host", "no.such.host.invalid"), ()])
def test_an_address_that_cannot_be_had_ends_the_server_at_once(
    address: tuple[object, ...], tiny_model_folder: Path, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = ("--model", tiny_model_folder, "--budget", 64, "--port", port, *address)
        done = command("server", *line)  # which waits for it to end
    assert done.returncode == 2
    host, given = (address[1], port) if "--host" in address else ("127.0.0.1", address[1] if address else port)
    message = rf"keyformer\.server: --host, --port: expected an address to listen at, got {host}, {given} \(.*\)\.\n"
    assert re.fullmatch(message, done.stderr), done.stderr


def test_ranks_are_those_of_the_rows_that_kept_names(tiny: Any) -> None:
    model, tokenizer = tiny
    caches = make_prompt_cache(model, H2O(), 16)
    with attached(model):
        generate(model, tokenizer, PROMPT, max_tokens=8, prompt_cache=caches)
    batch = KeyformerKVCache.merge([caches[0], caches[0]])
    for cache, sequence in ((caches[0], 0), (batch, 1)):
        keys, _, scores, positions, *_ = cache.state if cache is caches[0] else cache.state[sequence]
        assert keys.shape[2] == 16
        np.testing.assert_array_equal(np.array(cache.kept(sequence)), np.array(positions[0]))
        np.testing.assert_array_equal(np.array(cache.ranks(sequence)), np.array(scores[0]))

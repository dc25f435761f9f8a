"""The store of shared prefills: bounded, safe against damage, and never a reason to fail. (What it stores:
test_language_model.)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load

import keyformer
from keyformer import H2O, Keyformer
from pipeline.prefill import PrefillStore

TOKENS = list(range(40, 90))


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    return load(str(tiny_model_folder))[0]


def prompt_of(store: PrefillStore, model: Any, tokens: list[int] = TOKENS) -> Any:
    with keyformer.attached(model):
        return store.prompt(model, tokens)


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime)


def test_what_differs_is_stored_apart(model: Any, tmp_path: Path) -> None:
    for identity, step, tokens in (("a", 16, TOKENS), ("b", 16, TOKENS), ("a", 8, TOKENS), ("a", 16, TOKENS[:-1])):
        prompt_of(PrefillStore(tmp_path, identity, step, 1 << 30), model, tokens)
    assert len(files(tmp_path)) == 4
    store = PrefillStore(tmp_path, "a", 16, 1 << 30)
    prompt = prompt_of(store, model)
    assert len(files(tmp_path)) == 4
    # scores depend on the policy's noise, first temperature, window and decay; on the seed only with noise, on the
    # budget never
    for policy in (
        H2O(),
        H2O(seed=1),
        H2O(window=4),
        H2O(recent=0.1),
        Keyformer(),
        Keyformer(seed=1),
        Keyformer(tau_end=3.0),
        Keyformer(distribution="gaussian"),
        H2O(decay=0.9),
        H2O(tau_init=2.0),
        H2O(normalize="count", pooling=3),
    ):
        for budget in (10, 20):
            store.fill(keyformer.make_prompt_cache(model, policy, budget), prompt)
    assert len(files(tmp_path)) == 4 + 7


def test_the_least_recently_used_go_first(model: Any, tmp_path: Path) -> None:
    unlimited = PrefillStore(tmp_path, "a", 16, 1 << 30)
    prompt_of(unlimited, model)
    size = files(tmp_path)[0].stat().st_size
    for last in (49, 48):
        prompt_of(unlimited, model, TOKENS[:last])
    first, second, third = files(tmp_path)
    for age, path in enumerate((first, third, second)):  # `first` was used last
        os.utime(path, (1000 - age, 1000 - age))
    prompt_of(unlimited, model)  # reading it counts as use
    bounded = PrefillStore(tmp_path, "a", 16, 3 * size)
    prompt_of(bounded, model, TOKENS[:47])
    assert first.exists() and third.exists() and not second.exists()
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 3 * size


def test_a_prompt_larger_than_the_store_is_not_stored(model: Any, tmp_path: Path) -> None:
    prompt = prompt_of(PrefillStore(tmp_path / "none", "a", 16, 1000), model)
    assert prompt.keys[0].shape[2] == len(TOKENS)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", [b"", b"nonsense", "half", "no header"])
def test_a_damaged_file_is_computed_again(model: Any, tmp_path: Path, damage: bytes | str) -> None:
    store = PrefillStore(tmp_path, "a", 16, 1 << 30)
    expected = prompt_of(store, model)
    mx.eval(expected.keys)
    (path,) = files(tmp_path)
    content = path.read_bytes()
    if damage == "half":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "no header":
        mx.save_safetensors(str(path), {"k0": mx.zeros(3)})
    else:
        assert isinstance(damage, bytes)
        path.write_bytes(damage)
    again = prompt_of(store, model)
    assert all(mx.array_equal(a, b).item() for a, b in zip(expected.keys, again.keys, strict=True))
    assert len(mx.load(str(path))) == 6  # whole again: q, k and v of two layers


def test_no_place_to_store_is_no_reason_to_stop(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("a file where the folder should be")
    prompt = prompt_of(PrefillStore(tmp_path / "file", "a", 16, 1 << 30), model)
    assert prompt.keys[0].shape[2] == len(TOKENS)
    assert "going on without" in caplog.text

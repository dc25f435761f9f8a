"""memory_need against what real jobs took: never below, and not so far above that a fitting host is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipeline import memory, models
from pipeline.__main__ import _compose, _composer, main
from pipeline.errors import BadInput
from pipeline.load import DataFolder
from pipeline.memory import Need, memory_need
from tests import conftest
from tests.conftest import write_tiny_model

PROJECT = Path(__file__).resolve().parents[2]
# Large enough that what MLX takes beside the arrays of a job does not matter.
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 2, "head_dim": 32}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setitem(conftest.TINY_CONFIG, name, size)
        return write_tiny_model(tmp_path_factory.mktemp("models") / "small")


def jobs_of(outputs: Path, *overrides: str) -> list[tuple[str, float, Need]]:
    """Name, measured peak and estimate of each job of a sweep, run in a process of its own."""
    line = [sys.executable, "-m", "pipeline", "-m", f"outputs={outputs}", "stages=[load,generate]", *overrides]
    ended = subprocess.run(line, cwd=PROJECT, text=True, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = []
    for telemetry in sorted(outputs.glob("jobs/*/telemetry.json")):
        job = json.loads((telemetry.parent / "job.json").read_text())
        config: Any = OmegaConf.load(telemetry.parent / "config.yaml")
        data = outputs / "data" / job["data"]["hash"]
        folder = models.resolve(config.model, outputs / "models")
        requests = DataFolder(data, data.name, config.task.name, job["data"]["requests"])
        peak = json.loads(telemetry.read_text())["metrics"]["memory/peak_bytes"]
        found.append((job["name"], peak, memory_need(config, folder, requests)))
    return found


@pytest.mark.parametrize(
    ("most", "overrides"),
    [  # the first: a job whose prompts another one has stored takes less than it would alone
        (3.2, ["policy=full,h2o,snapkv,keyformer_proxy", "budget=0.25", "task=fact", "task.tokens=900"]),
        (2.2, ["policy=keyformer,knorm", "budget=64", "prefill=chunked", "task=fact", "task.tokens=900"]),
        (2.2, ["policy=full,streaming", "budget=128", "task=perplexity", "task.tokens=600"]),
        (2.2, ["policy=full,h2o", "budget=0.5", "generate.share_prefill_gb=0", "task=niah", "task.tokens=700"]),
    ],
    ids=["shared prompts", "chunked", "rolling", "without the store"],
)
def test_no_job_takes_more_than_it_was_said_to(model: Path, tmp_path: Path, most: float, overrides: list[str]) -> None:
    small = ["task.items=3", "generate.prefill_step_size=128"]
    jobs = jobs_of(tmp_path, "model=local", f"model.path={model}", *small, *overrides)
    assert len(jobs) >= 2
    for name, peak, need in jobs:
        assert peak <= need.total <= most * peak, (name, peak, need)


# What MLX's CUDA back-end held at most beside the weights (MB), on an H200 on 2026-11-30: a random llama of 16 layers,
# 16 heads on 4 KV heads, hidden size 1024; 8 requests. Longest prompt -> head size -> what ran -> its peak.
ON_AN_H200 = {
    ("float32", 12000, 64): {
        "knorm 0.25": 8495, "h2o 0.25": 8699, "keyformer_proxy 0.25": 8698, "snapkv 0.25": 8871, "streaming 0.25": 8211,
        "full": 10438, "keyformer_proxy 256 chunked": 553, "keyformer 256 chunked": 427, "knorm 256 chunked": 406,
    },
    ("float32", 12000, 96): {
        "knorm 0.25": 5581, "h2o 0.25": 5235, "keyformer_proxy 0.25": 6842, "snapkv 0.25": 5747, "streaming 0.25": 5401,
        "full": 11724, "keyformer_proxy 256 chunked": 533, "keyformer 256 chunked": 426, "knorm 256 chunked": 335,
    },
    ("float32", 6000, 64): {
        "knorm 0.25": 964, "h2o 0.25": 1241, "keyformer_proxy 0.25": 2992, "snapkv 0.25": 1338, "streaming 0.25": 1124,
        "full": 4599, "full unstored": 4008, "h2o 0.5 unstored": 2986, "keyformer_proxy 256 chunked": 514,
    },
    ("float32", 3000, 64): {"full continuation": 2305},
    ("bfloat16", 6000, 64): {
        "knorm 0.25": 577, "h2o 0.25": 612, "keyformer_proxy 0.25": 3904, "snapkv 0.25": 804, "streaming 0.25": 541,
        "full": 1943, "full unstored": 1943, "h2o 0.5 unstored": 977, "keyformer_proxy 256 chunked": 227,
        "keyformer 256 chunked": 119, "knorm 256 chunked": 102,
    },
    ("bfloat16", 3000, 64): {"full continuation": 1012},
}  # fmt: skip


@pytest.mark.parametrize("case", ON_AN_H200, ids=lambda case: "-".join(map(str, case)))
def test_no_job_of_a_gpu_took_more(
    case: tuple[str, int, int], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, longest, head_dim = case
    monkeypatch.setattr(memory, "default_score_bytes", lambda: 150_754_820_096 // 64)  # as on that GPU
    sizes = {"num_hidden_layers": 16, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 4, "head_dim": head_dim}
    config = json.loads((model / "config.json").read_text()) | sizes
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = models.ModelFolder(tmp_path, "local", "", "cuda", dtype, 65536)
    (tmp_path / "data.json").write_text(json.dumps({"prompt_tokens": {"max": longest}}))
    request = {"id": "a", "type": "generate_until", "task": "t", "doc_id": 0, "idx": 0, "repeat": 0, "prompt": ""}
    request |= {"question_start": None, "continuation": None, "gen_kwargs": {"max_gen_toks": 8}, "target": ""}
    for job, took in ON_AN_H200[case].items():
        policy, *rest = job.split()
        request["gen_kwargs"]["max_gen_toks"] = 72 if "continuation" in rest else 8
        (tmp_path / job).mkdir()
        (tmp_path / job / "data.json").write_text((tmp_path / "data.json").read_text())
        (tmp_path / job / "requests.jsonl").write_text(json.dumps(request) + "\n")
        given = [f"policy={policy}", *(f"budget={word}" for word in rest if word[0].isdigit())]
        given += ["prefill=chunked"] * ("chunked" in rest) + ["generate.share_prefill_gb=0"] * ("unstored" in rest)
        with _composer():
            _, (one,) = _compose(["model=local", f"model.path={model}", "task=fact", *given], True)
        need = memory_need(one.cfg, folder, DataFolder(tmp_path / job, "", "t", 8))
        assert need.model_bytes == 0
        assert took <= need.total / 1e6 <= 6.5 * took, (job, took, need)


def test_a_real_model_in_another_number_type(smollm2: models.ModelFolder, tmp_path: Path) -> None:
    task = ["task=fact", "task.tokens=150", "task.items=2", "task.max_gen_toks=4"]
    (full, cut) = jobs_of(tmp_path, "model=local", f"model.path={smollm2.path}", "policy=full,h2o", *task)
    for name, peak, need in (full, cut):
        assert peak <= need.total <= 1.5 * peak, (name, peak, need)
        assert need.model_bytes == 4 * 134_515_008  # the weights, in float32


def test_each_part_grows_with_what_it_is_for(model: Path, tmp_path: Path) -> None:
    def need(budget: float | int, tokens: int = 4000, **settings: Any) -> Need:
        data = tmp_path / f"{tokens}"
        data.mkdir(exist_ok=True)
        (data / "data.json").write_text(json.dumps({"prompt_tokens": {"max": tokens}}))
        request = {"id": "a", "type": "generate_until", "task": "t", "doc_id": 0, "idx": 0, "repeat": 0, "prompt": ""}
        request |= {"question_start": None, "continuation": None, "gen_kwargs": {"max_gen_toks": 8}, "target": ""}
        (data / "requests.jsonl").write_text(json.dumps(request) + "\n")
        generate = {"prefill_step_size": 128, "batch_size": 8, "share_prefill_gb": 0}
        config = {"stages": ["load"], "outputs": "o", "experiment_name": "e", "generate": generate, "seed": 0}
        config |= {
            "model": {},
            "policy": {"name": "h2o"},
            "task": {},
            "tracking": {"port": None, "wait_s": 0},
            "prefill": "full",
        }
        config |= {"positions": "original", "allocate": "uniform", "budget": budget} | settings
        return memory_need(OmegaConf.create(config), folder, DataFolder(data, "", "t", 8))

    local = OmegaConf.create({"name": "local", "source": "local", "path": str(model)})
    folder = models.resolve(local, tmp_path / "models")
    rows = 2 * 2 * 32 * 4 * 4  # bytes of a token: keys and values, KV heads, head size, float32, layers
    small, large = need(0.1), need(0.5)
    assert 1600 * rows * 8 < large.kv_bytes - small.kv_bytes < 1600 * rows * 8 * 3
    assert small.model_bytes == large.model_bytes == (model / "model.safetensors").stat().st_size - header(model)
    assert need(1.0).kv_bytes > large.kv_bytes
    assert need(0.1, prefill="chunked").prefill_bytes < small.prefill_bytes / 2
    assert need(0.1, tokens=2000).prefill_bytes < small.prefill_bytes
    for each in (small, large):
        assert each.total == each.model_bytes + max(each.kv_bytes, each.prefill_bytes)


def test_the_dry_run_says_it(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    large = ["model=local", f"model.path={model}", "task=fact", "task.tokens=2000", "generate.prefill_step_size=2000"]
    assert main(["-m", *large, f"outputs={tmp_path}", "policy=full,h2o", "--dry-run"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [re.search(r"(\S+) GB +(\S+)", line)[2] for line in lines[:2]] == ["full-fact", "h2o-25pct-fact"]  # type: ignore[index]
    assert all(0.1 < float(line.split(" GB")[0].split()[-1]) < 1 for line in lines[:2])


def header(model: Path) -> int:
    with (model / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_a_model_that_does_not_tell_its_sizes_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["num_attention_heads"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = models.ModelFolder(tmp_path, "local", "", "cpu", "float32", 4096)
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.json").write_text('{"prompt_tokens": {"max": 10}}')
    settings: dict[str, Any] = {"stages": ["load"], "outputs": "o", "experiment_name": "e", "model": {}, "task": {}}
    settings |= {"generate": {"prefill_step_size": 8, "batch_size": 1, "share_prefill_gb": 0}, "positions": None}
    settings |= {"policy": {"name": "full"}, "tracking": {"port": None, "wait_s": 0}, "prefill": "full", "budget": None}
    with pytest.raises(BadInput, match=r"num_attention_heads.*config\.json"):
        memory_need(OmegaConf.create(settings | {"seed": None}), folder, DataFolder(data, "", "t", 1))

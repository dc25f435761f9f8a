"""Finished job folders as pipeline.run leaves them, made by hand: what tracking publishes and report reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

SWEEP_KEY = "5eed5eed5eed"


def fabricate(
    outputs: Path,
    key: str,
    accuracies: Sequence[float] | None,
    *,
    policy: str = "keyformer",
    budget: float | int | None = 0.25,
    seed: int = 0,
    task: str = "fact",
    experiment: str = "trial",
    sweep_key: str = SWEEP_KEY,
    metrics: Mapping[str, float] | None = None,
    nll: Sequence[float] | None = None,
    settings: Mapping[str, Any] | None = None,
    host: str = "studio-1",
) -> Path:
    """A job folder `outputs`/jobs/`key` with one sample per accuracy; accuracies=None: begun but without a result.

    metrics: into telemetry.json, over the usual ones; nll: per-item negative log-likelihoods; settings: dotted config.
    """
    folder = outputs / "jobs" / key
    folder.mkdir(parents=True)
    config = OmegaConf.create(
        {
            "experiment_name": experiment,
            "stages": ["load", "generate", "score", "publish"],
            "budget": budget,
            "seed": seed,
            "prefill": "full",
            "model": {"name": "smollm2", "revision": "main"},
            "policy": {"name": policy, "recent": 0.25, "sinks": None, "noise": policy == "keyformer"},
            "task": {"name": task, "description": "x" * 600},
        }
    )
    for name, value in (settings or {}).items():
        OmegaConf.update(config, name, value, force_add=True)
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config))
    kept = budget if isinstance(budget, float) else 1.0 if budget is None else budget / 512
    job = {
        "key": key,
        "name": f"{policy}-{budget}-s{seed}-{task}",
        "experiment_name": experiment,
        "sweep_key": sweep_key,
        "git_commit": "0123abc",
        "host": host,
        "chip": "Apple M4 Max",
        "versions": {"mlx": "0.32.4", "mlx-lm": "0.32.2"},
        "model": {"revision": "sha256:feed", "dtype": "float32"},
        "data": {"hash": f"data-of-{task}", "items": len(accuracies or [])},
        "dataset_path": None,
        "budget_rows": round(512 * kept),
    }
    (folder / "job.json").write_text(json.dumps(job))
    count = len(accuracies or [])
    responses = [
        {"id": f"{n:016x}", "task": task, "doc_id": n, "idx": 0, "repeat": 0, "response": "Paris"} for n in range(count)
    ]
    (folder / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in responses))
    if accuracies is None:
        return folder
    samples: list[dict[str, Any]] = []
    for number, accuracy in enumerate(accuracies):
        sample = {"doc_id": number, "prompt_head": "Alice lives in", "prompt_tail": "Where?", "target": "Paris"}
        samples.append(sample | {"response": "Paris é", "accuracy": accuracy})
        if nll:
            samples[-1]["nll_per_token"] = nll[number]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    whole = 23.6e6
    usual = {
        "kv/bytes_decode_peak": whole * kept,
        "kv/bytes_prefill_peak": whole,
        "kv/bytes_full": whole,
        "kv/saved_fraction": 1 - kept,
        "speed/decode_tok_per_s": 12.5,
        "time/generate_s": 3.0,
    }
    series = {"kv/bytes": [[step, 46080.0 * step] for step in range(1, 1201)], "kv/rows": [[1, 1.0], [2, 2.0]]}
    (folder / "telemetry.json").write_text(json.dumps({"metrics": usual | dict(metrics or {}), "series": series}))
    score: dict[str, float] = {
        "accuracy": sum(accuracies) / len(accuracies),
        "task/contains": sum(accuracies) / len(accuracies),
    }
    if nll:
        score["task/nll_per_token"] = sum(nll) / len(nll)
    (folder / "score.json").write_text(json.dumps({"metrics": score}))
    return folder

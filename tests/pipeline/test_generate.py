"""Stage 2: one line per response, written at once; what is there is kept, what is damaged is done again; and the same
numbers through lm-eval live as through the stored responses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from lm_eval.evaluator import evaluate
from mlx_lm import load as load_model
from omegaconf import OmegaConf

from keyformer import H2O, Keyformer
from pipeline import tasks
from pipeline.errors import BadInput
from pipeline.generate import _append, check_responses, generate
from pipeline.language_model import KeyformerLM
from pipeline.load import DataFolder, Request, load, read_requests
from pipeline.score import score

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> tuple[Any, Any]:
    return load_model(str(tiny_model_folder))


def task(choice: str, **options: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(PROJECT / "conf" / "task" / f"{choice}.yaml"), options)


@pytest.fixture(scope="module")
def facts(tiny: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> DataFolder:
    return load(task("fact", items=7, tokens=250), tiny[1], 4096, tmp_path_factory.mktemp("data"))


def language_model(tiny: tuple[Any, Any], budget: float = 40) -> KeyformerLM:
    return KeyformerLM(*tiny, Keyformer(), budget, context=4096, prefill_step_size=64, batch_size=3, query_aware=False)


def run(tiny: tuple[Any, Any], data: DataFolder, job: Path, **options: Any) -> list[Request]:
    requests = read_requests(data.path / "requests.jsonl")
    generate(language_model(tiny, **options), requests, job, lambda done: None)
    return requests


def lines(job: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job / "responses.jsonl").read_text().splitlines()]


def untimed(job: Path) -> dict[str, Any]:
    """The responses by id without what differs from run to run: clocks, and the order after a repair."""
    out = {}
    for line in lines(job):
        line["telemetry"] = {k: v for k, v in line["telemetry"].items() if not k.endswith("_seconds")}
        out[line["id"]] = line
    return out


def test_one_line_per_request_in_order(tiny: tuple[Any, Any], facts: DataFolder, tmp_path: Path) -> None:
    requests = read_requests(facts.path / "requests.jsonl")
    told: list[int] = []
    generate(language_model(tiny), requests, tmp_path, told.append)
    assert told == [*range(len(requests) + 1)]
    assert [line["id"] for line in lines(tmp_path)] == [r.id for r in requests]
    assert check_responses(facts.path / "requests.jsonl", tmp_path / "responses.jsonl") == (0, 0)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_an_interrupted_job_goes_on_and_ends_the_same(
    tiny: tuple[Any, Any], facts: DataFolder, tmp_path: Path, after: int
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    run(tiny, facts, whole)
    requests = read_requests(facts.path / "requests.jsonl")

    def interrupt(done: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(language_model(tiny), requests, broken, interrupt)
    assert len(lines(broken)) == after
    kept = (broken / "responses.jsonl").read_bytes()
    run(tiny, facts, broken)
    assert (broken / "responses.jsonl").read_bytes().startswith(kept)
    assert untimed(broken) == untimed(whole)


UNSOUND: dict[str, Any] = {
    "telemetry empty": {"telemetry": {}},
    "telemetry null": {"telemetry": None},
    "response null": {"response": None},
    "response of another type": {"response": {"logprob": -1.0}},
    "prompt tokens a word": {"prompt_tokens": "x"},
}


@pytest.mark.parametrize(
    "damage", ["cut", "garbage", "foreign", "twice", "not an object", "not text", "deep", *UNSOUND]
)
def test_an_unusable_line_is_done_again_and_said(
    tiny: tuple[Any, Any], facts: DataFolder, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny, facts, tmp_path)
    expected = untimed(tmp_path)
    path = tmp_path / "responses.jsonl"
    stored = path.read_bytes().splitlines(keepends=True)
    bad = {
        "cut": [*stored[:-1], stored[-1][:40]],
        "garbage": [stored[0], b'{"id": "' + stored[1][30:], *stored[2:]],
        "foreign": [*stored[:2], b'{"id": "0000000000000000", "response": "x", "telemetry": {}}\n', *stored[3:]],
        "twice": [*stored, stored[0]],
        "not an object": [b"17\n", *stored[1:]],
        "not text": [b"\xff\xfe\x00\n", *stored[1:]],
        "deep": [b"[" * 100_000 + b"\n", *stored[1:]],
    } | {
        name: [json.dumps(json.loads(stored[0]) | change).encode() + b"\n", *stored[1:]]
        for name, change in UNSOUND.items()
    }
    path.write_bytes(b"".join(bad[damage]))
    assert check_responses(facts.path / "requests.jsonl", path) == (damage != "twice", 1)
    run(tiny, facts, tmp_path)
    assert untimed(tmp_path) == expected
    assert len(lines(tmp_path)) == len(expected)
    assert "1 unusable line(s)" in caplog.text


def test_a_finished_job_runs_no_model(tiny: tuple[Any, Any], facts: DataFolder, tmp_path: Path) -> None:
    requests = run(tiny, facts, tmp_path)
    before = (tmp_path / "responses.jsonl").read_bytes()
    no_model = KeyformerLM(None, tiny[1], Keyformer(), 40, context=4096, batch_size=3)
    generate(no_model, requests, tmp_path, lambda done: None)
    assert (tmp_path / "responses.jsonl").read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full, a device without space, is Linux's")
def test_a_full_disk_is_one_clear_message() -> None:
    with (
        pytest.raises(BadInput, match=r"No space left .* responses\.jsonl.*goes on at the next request"),
        Path("/dev/full").open("ab", buffering=0) as out,
    ):
        _append(out, {"id": "x"}, Path("responses.jsonl"))


def test_telemetry_is_about_real_arrays(tiny: tuple[Any, Any], facts: DataFolder, tmp_path: Path) -> None:
    run(tiny, facts, tmp_path)
    summary = json.loads((tmp_path / "telemetry.json").read_text())
    metrics = summary["metrics"]
    row = 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head size, float32
    each = lines(tmp_path)
    full = sum(line["telemetry"]["all_rows"] for line in each) / len(each)
    assert metrics["kv/rows_peak"] == 41
    assert metrics["kv/bytes_decode_peak"] == 41 * row
    assert metrics["kv/bytes_full"] == pytest.approx(full * row)
    assert metrics["kv/saved_fraction"] == pytest.approx(1 - 41 / full)
    assert metrics["kv/bytes_allocated"] >= 41 * row
    assert metrics["kv/budget_floored"] == 0
    assert metrics["tokens/prompt"] == sum(line["prompt_tokens"] for line in each)
    first = summary["series"]["kv/rows"]
    assert [rows for _, rows in first] == [40] * len(first)
    assert [position for position, _ in first] == sorted(position for position, _ in first)


# -- live lm-eval and stored responses --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def yaml_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's own lm-eval tasks: a multiple choice and a rolling text."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"q": f"The capital of {c} is", "choices": ["Paris", "Rome", "Oslo"], "gold": g} for c, g in
            (("France", 0), ("Italy", 1), ("Norway", 2))]  # fmt: skip
    texts = [
        {"text": f"The garden of {name} is a place in which things were kept."} for name in ("Alice", "Bob", "Eve")
    ]
    for name, docs in (("choice", rows), ("rolling", texts)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(d) + "\n" for d in docs))
    common = "dataset_path: json\ntest_split: test\nmetadata: {version: 1.0}\n"
    (folder / "choice.yaml").write_text(
        f"task: our_choice\n{common}dataset_kwargs: {{data_files: {{test: {folder / 'choice.jsonl'}}}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\ndoc_to_target: '{{gold}}'\n"
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (folder / "rolling.yaml").write_text(
        f"task: our_rolling\n{common}dataset_kwargs: {{data_files: {{test: {folder / 'rolling.jsonl'}}}}}\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]\n"
    )
    return folder


@pytest.mark.parametrize(
    ("name", "chat"),
    [
        ("fact", False),
        ("fact", True),
        ("perplexity", False),
        ("our_choice", False),
        ("our_choice", True),
        ("our_rolling", False),
    ],
)
def test_stored_responses_score_as_a_live_run_does(
    tiny: tuple[Any, Any], yaml_tasks: Path, tmp_path: Path, name: str, chat: bool
) -> None:
    if name in ("fact", "perplexity"):
        cfg = task(name, items=3, tokens=300, apply_chat_template=chat)
    else:
        cfg = task("lm_eval", name=name, include_path=str(yaml_tasks), apply_chat_template=chat)
    data = load(cfg, tiny[1], 4096, tmp_path / "data")
    lm = KeyformerLM(*tiny, H2O(), 16, context=4096, batch_size=3, query_aware=cfg.query_aware)
    job = tmp_path / "job"
    job.mkdir()
    generate(lm, read_requests(data.path / "requests.jsonl"), job, lambda done: None)
    stored = score(cfg, data.path, job / "responses.jsonl").metrics
    made = tasks.make(tasks.settings(cfg), tiny[1]).task
    live = evaluate(lm=lm, task_dict={name: made}, apply_chat_template=chat, bootstrap_iters=0)["results"][name]
    compared = 0
    for metric, value in live.items():
        base, _, filter_ = metric.partition(",")
        if filter_ == "none" and not base.endswith("_stderr") and isinstance(value, float):
            assert stored[f"task/{base}"] == value, metric
            compared += 1
    assert compared >= 1

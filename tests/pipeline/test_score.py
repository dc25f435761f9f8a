"""The score stage: the same numbers as lm-eval with the model at hand, hand-worked metrics, and what is refused."""

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from mlx_lm.tokenizer_utils import load as load_tokenizer
from omegaconf import OmegaConf

from pipeline.errors import BadInput
from pipeline.load import DataFolder, load, read_requests
from pipeline.score import LogLikelihood, Score, _names, _per_item, score
from pipeline.tasks.prompt import render_chat

CONF = Path(__file__).parents[2] / "conf" / "task"
PLACES = [("key", "drawer"), ("cat", "old attic"), ("book", "old attic"), ("hat", "drawer"), ("pen", "drawer")]
DOCS = [
    {
        "passage": f"The {thing} is in the {place}.",
        "question": f"Where is the {thing}?",
        "answer": place,
        "choices": ["drawer", "old attic"],
        "gold": int(place == "old attic"),
    }
    for thing, place in PLACES
]
HEAD = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
training_split: train
process_docs: !function helpers.number
metadata: {{version: 1.0}}
"""
TASKS = {
    "generating": """
output_type: generate_until
doc_to_text: "{{passage}}\\n{{question}}"
doc_to_target: answer
gen_prefix: "The place is the"
generation_kwargs: {until: ["."], max_gen_toks: 6}
repeats: 2
filter_list:
  - {name: first, filter: [{function: take_first}]}
  - name: letters
    filter: [{function: regex, regex_pattern: "([a-z ]+)"}, {function: majority_vote}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
""",
    "choosing": """
output_type: multiple_choice
doc_to_text: "{{passage}}\\n{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
  - {metric: f1, aggregation: f1, higher_is_better: true}
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{passage}} {{question}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
""",
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return load_tokenizer(tiny_model_folder)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def config(task: str, **overrides: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(CONF / f"{task}.yaml"), overrides)


def user_task(folder: Path, name: str, **overrides: Any) -> Any:
    """Write the task of that name as a user would and return the config that names it."""
    folder.mkdir(exist_ok=True)
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / f"{name}.yaml").write_text(HEAD.format(name=name, data=data) + TASKS[name])
    (folder / "helpers.py").write_text(
        "def number(docs):\n"
        "    return docs.map(lambda doc, i: {'passage': f'{i + 1}. ' + doc['passage']}, with_indices=True)\n"
    )
    return config("lm_eval", **{"name": name, "include_path": str(folder)} | overrides)


def answer(kind: str, prompt: str, continuation: str | None, repeat: int) -> Any:
    """What the model of these tests says: a pure function of the request, in the form of a stored response."""
    number = int(hashlib.sha256(f"{kind}{prompt}{continuation}{repeat}".encode()).hexdigest(), 16)
    if kind == "generate_until":
        place = (re.findall(r"is in the ([a-z ]+)\.", prompt) or ["nowhere"])[-1]  # of the last passage
        return f"{[*[place, place.upper()] * 2, 'moon', '42'][number % 6]}"
    response = {"logprob": -(number % 997) / 31, "tokens": 5, "top1": number % 6}
    return response | ({"is_greedy": number % 2 == 0} if kind == "loglikelihood" else {})


class Live(LM):
    """The same model for lm-eval at first hand."""

    tokenizer_name = "tiny"

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer, self.asked = tokenizer, Counter[str]()

    def apply_chat_template(self, chat_history: list[dict], add_generation_prompt: bool = True) -> str:
        return render_chat(self.tokenizer, chat_history, add_generation_prompt)

    def _answer(self, request: Instance) -> Any:
        prompt, *rest = request.args
        continuation = rest[0] if request.request_type == "loglikelihood" else None
        key = f"{request.doc_id}/{request.idx}"
        self.asked[key] += 1
        return answer(request.request_type, prompt, continuation, self.asked[key] - 1)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._answer(request) for request in requests]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [(a["logprob"], a["is_greedy"]) for a in map(self._answer, requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return [self._answer(request)["logprob"] for request in requests]


def respond(data: DataFolder, path: Path, responses: list[Any] | None = None) -> Path:
    """Write the responses.jsonl of a generate stage; `responses` in the order of the requests, or the model's."""
    requests = read_requests(data.path / "requests.jsonl")
    said = responses or [answer(r.type, r.prompt, r.continuation, r.repeat) for r in requests]
    rows = [
        {"id": r.id, "task": r.task, "doc_id": r.doc_id, "idx": r.idx, "repeat": r.repeat, "response": a,
         "prompt_tokens": 9, "generated_tokens": 1, "telemetry": {}}
        for r, a in zip(requests, said, strict=True)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Live and replayed


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
@pytest.mark.parametrize("name", list(TASKS))
def test_same_as_lm_eval_at_first_hand(
    tokenizer: Any, tmp_path: Path, name: str, chat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shots = 0 if name == "rolling" else 2
    cfg = user_task(tmp_path / "tasks", name, apply_chat_template=chat, num_fewshot=shots)
    manager = TaskManager(include_path=cfg.include_path, include_defaults=False)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")  # lm-eval's bootstrap of f1 would fork
    live: Any = simple_evaluate(
        Live(tokenizer), tasks=[name], task_manager=manager, apply_chat_template=chat, num_fewshot=shots,
        bootstrap_iters=2, fewshot_random_seed=cfg.seed,
    )  # fmt: skip
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    (tmp_path / "tasks" / "docs.jsonl").unlink()  # scoring needs the YAML, not the dataset
    replayed = score(cfg, data.path, respond(data, tmp_path / "responses.jsonl"))

    wanted = {}
    for key, value in live["results"][name].items():
        metric, _, filter_name = key.partition(",")
        if filter_name and value != "N/A" and metric != "f1_stderr":  # bootstrapped: not analytic, so left out
            wanted["task/" + (metric if filter_name == "none" else f"{metric}/{filter_name}")] = value
    primary = {"generating": "exact_match/first", "choosing": "acc"}.get(name)
    if primary:
        wanted["accuracy"] = wanted[f"task/{primary}"]
        metric, _, filter_name = primary.partition("/")
        wanted["accuracy_stderr"] = wanted[f"task/{metric}_stderr" + (f"/{filter_name}" if filter_name else "")]
    assert replayed.metrics == wanted
    assert 0 < replayed.metrics.get("accuracy", 0.5) < 1  # a model that is always or never right would show little

    assert [s["doc_id"] for s in replayed.samples] == [0, 1, 2, 3, 4]
    for row in live["samples"][name]:
        sample = replayed.samples[row["doc_id"]]
        assert sample["target"] == str(row["target"])
        assert row["arguments"][0][0].startswith(sample["prompt_head"])
        for metric in row["metrics"]:
            key = metric if row["filter"] == "none" else f"{metric}/{row['filter']}"
            if not isinstance(row[metric], tuple):
                assert sample[key] == row[metric]
        if primary and primary in (row["metrics"][0], f"{row['metrics'][0]}/{row['filter']}"):
            assert sample["accuracy"] == row[row["metrics"][0]]


def test_limit_and_moved_folders(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", "choosing", limit=2)
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    responses = respond(data, tmp_path / "responses.jsonl")
    first = score(cfg, data.path, responses)
    assert len(first.samples) == 2
    moved = (tmp_path / "data").rename(tmp_path / "moved") / data.hash
    assert score(cfg, moved, responses) == first


# Worked by hand


def scored(tokenizer: Any, tmp_path: Path, task: str, responses: Any, **overrides: Any) -> Score:
    cfg = config(task, **overrides)
    data = load(cfg, tokenizer, 4096, tmp_path)
    docs = [json.loads(line) for line in (data.path / "docs.jsonl").open()]
    return score(cfg, data.path, respond(data, tmp_path / "responses.jsonl", responses(docs)))


def test_fact(tokenizer: Any, tmp_path: Path) -> None:
    result = scored(
        tokenizer, tmp_path, "fact", lambda docs: [f" {docs[0]['answer']}", " nowhere", docs[2]["answer"].upper(), ""],
        items=4, tokens=300,
    )  # fmt: skip
    stderr = math.sqrt(4 * 0.25 / 3 / 4)  # standard deviation over sqrt(n)
    assert result.metrics == pytest.approx(
        {"accuracy": 0.5, "accuracy_stderr": stderr, "task/contains": 0.5, "task/contains_stderr": stderr}
    )
    assert [s["accuracy"] for s in result.samples] == [s["contains"] for s in result.samples] == [1, 0, 1, 0]
    assert result.samples[1]["response"] == " nowhere"
    assert result.samples[0]["prompt_tail"].endswith("lives in the city of")


def test_perplexity(tokenizer: Any, tmp_path: Path) -> None:
    def responses(docs: list[dict]) -> list[dict]:
        return [
            {"logprob": -4.0, "is_greedy": False, "tokens": 4, "top1": 3},
            {"logprob": -2.0, "is_greedy": False, "tokens": 1, "top1": 0},
        ]

    result = scored(tokenizer, tmp_path, "perplexity", responses, items=2, tokens=300)
    assert result.metrics["accuracy"] == result.metrics["task/top1"] == 3 / 5  # over tokens, not over items: 0.375
    assert result.metrics["task/nll_per_token"] == 6 / 5
    assert result.metrics["task/perplexity"] == pytest.approx(math.exp(1.2))
    assert result.metrics["accuracy_stderr"] == pytest.approx(math.sqrt(2 * (0.6**2 + 0.6**2)) / 5)
    assert [s["accuracy"] for s in result.samples] == [0.75, 0]
    assert [s["perplexity"] for s in result.samples] == pytest.approx([math.e, math.exp(2)])


def test_niah(tokenizer: Any, tmp_path: Path) -> None:
    result = scored(
        tokenizer, tmp_path, "niah", lambda docs: [f" {docs[0]['outputs'][0]}.", " 123", " none"],
        items=3, tokens=400, haystack="repeat",
    )  # fmt: skip
    assert result.metrics["accuracy"] == pytest.approx(1 / 3)


def test_one_item_has_no_stderr(tokenizer: Any, tmp_path: Path) -> None:
    result = scored(tokenizer, tmp_path, "kv_retrieval", lambda docs: [docs[0]["answer"]], items=1, tokens=300)
    assert result.metrics == {"accuracy": 1.0, "task/contains": 1.0}


def test_nan_is_shown(tokenizer: Any, tmp_path: Path) -> None:
    nan = {"logprob": math.nan, "is_greedy": False, "tokens": 4, "top1": 0}
    result = scored(tokenizer, tmp_path, "perplexity", lambda docs: [nan, nan], items=2, tokens=300)
    assert math.isnan(result.metrics["task/nll_per_token"]) and math.isnan(result.metrics["task/perplexity"])
    assert result.metrics["accuracy"] == 0


# Names and the primary metric


@pytest.mark.parametrize(
    ("metric", "filter_name", "name"),
    [
        ("acc", "none", "task/acc"),
        ("exact_match", "strict-match", "task/exact_match/strict-match"),
        ("pass@1", "none", "task/pass_1"),
        ("a,b", "none", "task/a/b"),
        ("größe", "none", "task/gr__e"),
    ],
)
def test_names_are_legal_for_mlflow(metric: str, filter_name: str, name: str) -> None:
    assert _names([(metric, filter_name)]) == {(metric, filter_name): name}


def test_names_are_never_merged() -> None:
    with pytest.raises(BadInput, match="different names"):
        _names([("pass@1", "none"), ("pass_1", "none")])


@pytest.mark.parametrize(
    ("primary", "name"), [("exact_match,letters", "exact_match/letters"), ("exact_match/first", "exact_match/first")]
)
def test_primary_with_a_filter(tokenizer: Any, tmp_path: Path, primary: str, name: str) -> None:
    cfg = user_task(tmp_path / "tasks", "generating", primary=primary)
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    result = score(cfg, data.path, respond(data, tmp_path / "responses.jsonl"))
    assert result.metrics["accuracy"] == result.metrics[f"task/{name}"]
    assert [s["accuracy"] for s in result.samples] == [s[name] for s in result.samples]


def test_unclear_primary(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", "generating")
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    cfg.primary = "exact_match"  # load refuses it as well: two filters
    with pytest.raises(BadInput, match="'exact_match,first', 'exact_match,letters'"):
        score(cfg, data.path, respond(data, tmp_path / "responses.jsonl"))


def test_primary_outside_unit_interval_is_not_accuracy(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = user_task(tmp_path / "tasks", "rolling", primary="word_perplexity")
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    result = score(cfg, data.path, respond(data, tmp_path / "responses.jsonl"))
    assert "accuracy" not in result.metrics and result.metrics["task/word_perplexity"] > 1
    assert "not as accuracy" in caplog.text


def test_per_item_value() -> None:
    assert _per_item(1, None) == 1.0 and _per_item(True, None) == 1.0
    assert _per_item((3, 4), lambda items: items[0][0] / items[0][1]) == 0.75
    assert _per_item((3, 4), lambda items: {}["x"] if not items else "text") is None
    assert _per_item((1.0, 0), lambda items: items[0][0] / items[0][1]) is None


def test_loglikelihood_is_a_pair_with_counts() -> None:
    pair = LogLikelihood.of({"logprob": -1.5, "is_greedy": True, "tokens": 7, "top1": 6})
    assert pair == (-1.5, True) and (pair.tokens, pair.top1) == (7, 6)


# Refused


@pytest.fixture
def finished(tokenizer: Any, tmp_path: Path) -> tuple[Any, Path, Path]:
    """The config, data folder and responses of a small finished job."""
    cfg = config("kv_retrieval", items=3, tokens=300)
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    return cfg, data.path, respond(data, tmp_path / "responses.jsonl")


def test_missing_and_extra_responses(finished: tuple[Any, Path, Path]) -> None:
    cfg, data, responses = finished
    lines = responses.read_text().splitlines(keepends=True)
    ids = [json.loads(line)["id"] for line in lines]
    responses.write_text(lines[1])
    with pytest.raises(BadInput, match=rf"each of 3 requests .* got 2 without a response: {ids[0]}, {ids[2]};"):
        score(cfg, data, responses)
    responses.write_text("".join(lines) + lines[0].replace(ids[0], "f" * 16))
    with pytest.raises(BadInput, match=rf"got 1 that the data folder does not have: {'f' * 16};"):
        score(cfg, data, responses)


@pytest.mark.parametrize("line", [b'{"id": "a', b"{}", b"[1]", b"", b'{"id": "\xff\xfe"}', b"[" * 10**5])
def test_corrupt_line(finished: tuple[Any, Path, Path], line: bytes) -> None:
    cfg, data, responses = finished
    with responses.open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(BadInput, match=r"line 4 of .*corrupt"):
        score(cfg, data, responses)


def test_missing_files(finished: tuple[Any, Path, Path], tmp_path: Path) -> None:
    cfg, data, responses = finished
    with pytest.raises(BadInput, match="run the generate stage first"):
        score(cfg, data, tmp_path / "none.jsonl")
    with pytest.raises(BadInput, match=r"folder of the load stage"):
        score(cfg, tmp_path / "none", responses)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"{}", b"[" * 10**5])
@pytest.mark.parametrize("name", ["data.json", "docs.jsonl", "requests.jsonl"])
def test_damaged_data_folder(finished: tuple[Any, Path, Path], name: str, content: bytes) -> None:
    cfg, data, responses = finished
    if name == "docs.jsonl" and content in (b"[]", b"{}"):
        return  # JSON that load could have written
    (data / name).write_bytes(content)
    with pytest.raises(BadInput, match=r"folder of the load stage"):
        score(cfg, data, responses)


def test_yaml_gone(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", "choosing")
    data = load(cfg, tokenizer, 4096, tmp_path / "data")
    shutil.rmtree(tmp_path / "tasks")
    with pytest.raises(BadInput, match=r"task\.include_path"):
        score(cfg, data.path, respond(data, tmp_path / "responses.jsonl"))

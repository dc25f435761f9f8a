"""The load stage: requests as lm-eval builds them, where the question starts, what is refused, what is on disk."""

import hashlib
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from lm_eval.tasks import TaskManager
from mlx_lm.tokenizer_utils import load as load_tokenizer
from omegaconf import OmegaConf

from pipeline.errors import BadInput
from pipeline.load import DataFolder, _store, answer_tokens, load, read_requests
from pipeline.tasks.prompt import encode, render_chat

CONF = Path(__file__).parents[2] / "conf" / "task"
QA = [
    {"passage": f"The {thing} is in the {place}.", "question": f"Where is the {thing}?", "answer": place}
    for thing, place in [("key", "drawer"), ("cat", "garden"), ("book", "attic"), ("lamp", "cellar")]
]
YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
test_split: test
training_split: train
output_type: generate_until
doc_to_text: "{{{{passage}}}}\\n{{{{question}}}} Answer:"
doc_to_target: answer
generation_kwargs: {{until: ["."], max_gen_toks: 6}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return load_tokenizer(tiny_model_folder)


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def config(task: str, **overrides: Any) -> Any:
    return OmegaConf.merge(OmegaConf.load(CONF / f"{task}.yaml"), overrides)


def user_task(folder: Path, *, name: str = "where", extra: str = "", docs: list[dict] = QA, **overrides: Any) -> Any:
    """Write a user's task (YAML and JSON lines) and return the config that names it."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / f"{name}.yaml").write_text(YAML.format(name=name, data=data) + extra)
    return config("lm_eval", **{"name": name, "include_path": str(folder)} | overrides)


def written(folder: DataFolder) -> dict[str, Any]:
    return json.loads((folder.path / "data.json").read_text())


# Requests


def test_fact_requests(tokenizer: Any, tmp_path: Path) -> None:
    folder = load(config("fact", items=4, tokens=300), tokenizer, 4096, tmp_path)
    requests = read_requests(folder.path / "requests.jsonl")
    docs = [json.loads(line) for line in (folder.path / "docs.jsonl").open()]
    assert folder.path == tmp_path / folder.hash and folder.task == "fact" and folder.requests == len(requests) == 4
    for i, (request, doc) in enumerate(zip(requests, docs, strict=True)):
        assert request.prompt == f"{doc['context']}{doc['question']} {doc['gen_prefix']}"
        assert request.prompt[request.question_start :] == f"{doc['question']} {doc['gen_prefix']}"
        assert (request.type, request.doc_id, request.idx, request.repeat) == ("generate_until", i, 0, 0)
        assert request.target == doc["answer"] and request.continuation is None
        assert request.gen_kwargs == {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False}
    lengths = [len(encode(tokenizer, request.prompt)) for request in requests]
    about = written(folder)
    assert about["prompt_tokens"] == {"min": min(lengths), "max": max(lengths), "mean": sum(lengths) / 4}
    assert len(about["prose_sha256"]) == 64 and about["items"] == 4


def test_question_start_under_a_chat_template(tokenizer: Any, tmp_path: Path) -> None:
    folder = load(config("fact", items=2, tokens=300, apply_chat_template=True), tokenizer, 4096, tmp_path)
    for request in read_requests(folder.path / "requests.jsonl"):
        assert request.prompt.startswith("<|im_start|>user\n") and request.question_start is not None
        head, tail = request.prompt[: request.question_start], request.prompt[request.question_start :]
        assert tail.startswith("\n\nQuestion: ") and "<|im_start|>assistant\n" in tail and not head[-1].isspace()
        assert tail.endswith(" lives in the city of")  # the assistant's turn is left open
        apart = encode(tokenizer, head) + tokenizer.encode(tail, add_special_tokens=False)
        assert apart == encode(tokenizer, request.prompt)


def test_perplexity_requests(tokenizer: Any, tmp_path: Path) -> None:
    folder = load(config("perplexity", items=2, tokens=300), tokenizer, 4096, tmp_path)
    for request in read_requests(folder.path / "requests.jsonl"):
        assert request.type == "loglikelihood" and request.question_start is None and request.gen_kwargs is None
        assert request.continuation and request.continuation[0].isspace()


def test_query_aware_has_no_question_start(tokenizer: Any, tmp_path: Path) -> None:
    folder = load(config("kv_retrieval", items=2, tokens=300, query_aware=True), tokenizer, 4096, tmp_path)
    assert all(r.question_start is None for r in read_requests(folder.path / "requests.jsonl"))


def test_requests_are_lm_evals_own(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", num_fewshot=2, apply_chat_template=True, limit=3, query_aware=False)
    folder = load(cfg, tokenizer, 4096, tmp_path / "data")
    task: Any = TaskManager(include_path=cfg.include_path, include_defaults=False).load("where")["tasks"]["where"]
    task.set_config("num_fewshot", 2)
    task.set_fewshot_seed(1234)
    task.build_all_requests(
        limit=3, apply_chat_template=True, fewshot_as_multiturn=True,
        chat_template=lambda history, add_generation_prompt: render_chat(tokenizer, history, add_generation_prompt),
    )  # fmt: skip
    requests = read_requests(folder.path / "requests.jsonl")
    assert [(r.prompt, r.gen_kwargs) for r in requests] == [instance.args for instance in task.instances]
    for request, doc in zip(requests, QA, strict=False):
        # The last occurrence: the same question may be among the examples.
        start = request.prompt.rindex(doc["question"])
        assert request.question_start == start - 1 and request.prompt[start - 1] == "\n"


def test_repeats_and_equal_documents_have_their_own_ids(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", extra="repeats: 2\n", docs=[QA[0], QA[0], QA[1]])
    requests = read_requests(load(cfg, tokenizer, 4096, tmp_path / "data").path / "requests.jsonl")
    assert [(r.doc_id, r.repeat) for r in requests] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert len({r.id for r in requests}) == 6 and all(len(r.id) == 16 for r in requests)


def test_ids_do_not_depend_on_the_other_requests(tokenizer: Any, tmp_path: Path) -> None:
    all_four = read_requests(load(user_task(tmp_path / "t"), tokenizer, 4096, tmp_path).path / "requests.jsonl")
    two = read_requests(load(user_task(tmp_path / "t", limit=2), tokenizer, 4096, tmp_path).path / "requests.jsonl")
    assert two == all_four[:2]


def test_gen_kwargs_go_over_the_tasks_own(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", gen_kwargs={"max_gen_toks": 3})
    (request, *_) = read_requests(load(cfg, tokenizer, 4096, tmp_path).path / "requests.jsonl")
    assert request.gen_kwargs == {"until": ["."], "max_gen_toks": 3}


@pytest.mark.parametrize(
    ("gen_kwargs", "tokens"),
    [({}, 256), ({"max_gen_toks": 3}, 3), ({"max_new_tokens": 5}, 5), ({"max_gen_toks": 0}, 0)],
)
def test_answer_tokens(gen_kwargs: dict, tokens: int) -> None:
    assert answer_tokens(gen_kwargs) == tokens


# The folder


def test_same_content_same_folder(tokenizer: Any, tmp_path: Path) -> None:
    first = load(config("fact", items=2, tokens=300), tokenizer, 4096, tmp_path)
    before = {p.name: p.stat().st_mtime_ns for p in first.path.iterdir()}
    assert load(config("fact", items=2, tokens=300), tokenizer, 4096, tmp_path) == first
    assert {p.name: p.stat().st_mtime_ns for p in first.path.iterdir()} == before
    hashes = {first.hash}
    for other in ({"seed": 1}, {"tokens": 330}, {"query_aware": True}, {"until": ["."]}, {"name": "fact2"}):
        hashes.add(load(config("fact", **{"items": 2, "tokens": 300} | other), tokenizer, 4096, tmp_path).hash)
    assert len(hashes) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(hashes)  # and no drafts


def test_the_tasks_own_code_is_part_of_the_hash(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks", extra="process_results: !function judge.judge\n")
    hashes = []
    for value in (1.0, 0.5):
        (tmp_path / "tasks" / "judge.py").write_text(
            f"def judge(doc, results):\n    return {{'exact_match': {value}}}\n"
        )
        hashes.append(load(cfg, tokenizer, 4096, tmp_path / "data").hash)
    shutil.copytree(tmp_path / "tasks", tmp_path / "elsewhere")  # where it lies is not
    cfg.include_path = str(tmp_path / "elsewhere")
    assert hashes[0] != hashes[1] == load(cfg, tokenizer, 4096, tmp_path / "data").hash


def test_two_at_once(tmp_path: Path) -> None:
    files, start = {"requests.jsonl": "x\n" * 10**5, "data.json": "{}"}, threading.Barrier(4)
    stored: list[Path] = []

    def write() -> None:
        start.wait()
        stored.append(_store(files, tmp_path / "data" / "hash"))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stored == [tmp_path / "data" / "hash"] * 4
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["hash"]  # and no drafts
    assert {p.name: p.read_text() for p in (tmp_path / "data" / "hash").iterdir()} == files


def test_damaged_folder_is_put_right(tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cfg = config("kv_retrieval", items=1, tokens=300)
    folder = load(cfg, tokenizer, 4096, tmp_path)
    whole = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    (folder.path / "docs.jsonl").write_text("{}\n")
    (folder.path / "requests.jsonl").write_text("")
    (folder.path / "data.json").unlink()
    assert load(cfg, tokenizer, 4096, tmp_path) == folder
    assert "was damaged (requests.jsonl, docs.jsonl, data.json): written anew" in caplog.text
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == whole
    assert list(tmp_path.iterdir()) == [folder.path]  # and no drafts
    (folder.path / "docs.jsonl").unlink()
    (folder.path / "docs.jsonl").mkdir()
    with pytest.raises(BadInput, match=r"delete what is in the way"):
        load(cfg, tokenizer, 4096, tmp_path)


# Refused


def test_longer_than_the_context(tokenizer: Any, tmp_path: Path) -> None:
    cfg = config("fact", items=2, tokens=300)
    longest = written(load(cfg, tokenizer, 4096, tmp_path))["prompt_tokens"]["max"]
    load(cfg, tokenizer, longest + 8, tmp_path)
    with pytest.raises(BadInput, match=rf"{longest + 7} tokens, got {longest} \+ 8 in item"):
        load(cfg, tokenizer, longest + 7, tmp_path)
    with pytest.raises(BadInput, match=r"within the model's 301 tokens"):
        load(config("perplexity", items=2, tokens=300), tokenizer, 301, tmp_path)


@pytest.mark.parametrize(
    ("docs", "extra", "message"),
    [
        ([{"about": "P", "q": "Where?", "answer": "A"}], 'doc_to_text: "{{about}} {{q}}"\n', "fields about, q, answer"),
        ([{"question": "Where is it?", "answer": "A"}], "doc_to_text: question\n", "at the very start in item 0"),
        ([{"question": "Where?", "answer": "A"}], 'doc_to_text: "{{question|upper}}"\n', "it nowhere in item 0"),
        ([{"question": " ", "answer": "A"}], "doc_to_text: question\n", "fields question, answer"),
        (
            [{"question": "Q", "answer": "A"}],
            "output_type: loglikelihood_rolling\ndoc_to_text: ''\ngeneration_kwargs: null\n"
            "metric_list: [{metric: word_perplexity}]\n",
            "asks a question",
        ),
    ],
)  # fmt: skip
def test_no_question_to_hide(tokenizer: Any, tmp_path: Path, docs: list, extra: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        load(user_task(tmp_path / "t", docs=docs, extra=extra, query_aware=False), tokenizer, 4096, tmp_path)
    assert "task.query_aware=true" in str(caught.value)
    load(user_task(tmp_path / "t", docs=docs, extra=extra, query_aware=True), tokenizer, 4096, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "extra", "message"),
    [
        ({"include_path": "no/such/folder"}, "", "task.include_path"),
        ({"gen_kwargs": {"max_gen_toks": 3}},
         "output_type: loglikelihood\ngeneration_kwargs: null\nmetric_list: [{metric: acc}]\n", "task.gen_kwargs"),
        ({"num_fewshot": 2}, "num_fewshot: 0\n", "fixes it at 0"),
        ({}, "unsafe_code: true\n", "runs generated code"),
        ({}, "doc_to_image: passage\n", "images or sound"),
        ({}, "class: !function judge.Judge\n", "a Python class"),
        ({}, "dataset_kwargs: {data_files: {test: gone.jsonl}}\n", "expected the dataset of task 'where' to load"),
    ],
)  # fmt: skip
def test_unusable_task(tokenizer: Any, tmp_path: Path, overrides: dict, extra: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(user_task(tmp_path / "tasks", extra=extra, **overrides), tokenizer, 4096, tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_gen_toks": "abc"}, r"max_gen_toks of 'where' to be a whole number from 1 to .*, got 'abc'"),
        ({"max_gen_toks": -5}, "max_gen_toks"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"until": 5}, "until .* got 5"),
        ({"until": [5]}, r"until .* got \[5\]"),
        ({"do_sample": "no"}, "do_sample"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**31}, "top_k"),
        ({"top_k": True}, "top_k"),
    ],
)
def test_generation_options_are_checked(tokenizer: Any, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(user_task(tmp_path / "tasks", gen_kwargs=options), tokenizer, 4096, tmp_path / "data")
    extra = f"generation_kwargs: {json.dumps(options)}\n"
    with pytest.raises(BadInput, match=message):
        load(user_task(tmp_path / "tasks", extra=extra), tokenizer, 4096, tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_generation_options_that_make_sense(tokenizer: Any, tmp_path: Path) -> None:
    options = {"until": "x", "do_sample": True, "temperature": 0.5, "top_p": 1, "top_k": 0, "max_gen_toks": 1}
    load(user_task(tmp_path / "tasks", gen_kwargs=options), tokenizer, 4096, tmp_path / "data")


@pytest.mark.parametrize("primary", ["nope", 5, "exact_match,nope"])
def test_primary_is_checked_before_generation(tokenizer: Any, tmp_path: Path, primary: Any) -> None:
    with pytest.raises(BadInput, match=rf"one metric of 'where' \(exact_match\), got '{primary}'"):
        load(user_task(tmp_path / "tasks", primary=primary), tokenizer, 4096, tmp_path / "data")
    with pytest.raises(BadInput, match=r"one metric of 'perplexity' \(top1, nll_per_token, perplexity\)"):
        load(config("perplexity", items=1, tokens=300, primary=primary), tokenizer, 4096, tmp_path / "data")


def test_a_metric_may_be_named_by_a_number(tokenizer: Any, tmp_path: Path) -> None:
    extra = (
        "process_results: !function judge.judge\n"
        "metric_list: [{metric: '4096', aggregation: mean, higher_is_better: true}]\n"
    )
    cfg = user_task(tmp_path / "tasks", extra=extra, primary=4096)
    (tmp_path / "tasks" / "judge.py").write_text("def judge(doc, results):\n    return {'4096': 1.0}\n")
    load(cfg, tokenizer, 4096, tmp_path / "data")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("metric_list: [{metric: exact_mach}]\n", r"where\.yaml .* got exact_mach; near: exact_match"),
        ("metric_list: [{metric: exact_mach, aggregation: mean, higher_is_better: true}]\n", "got exact_mach"),
        ("metric_list: [{metric: exact_match, aggregation: meen}]\n", "aggregation .* 'exact_match' in .*where.yaml"),
        ("metric_list: [{name: exact_match}]\n", "where.yaml, got ValueError: 'metric' key not provided"),
        ("metric_list: 5\n", "where.yaml, got TypeError"),
        ("output_type: dance\n", "got ValueError: Got invalid output_type 'dance'"),
        ("filter_list: [{name: first}]\n", "got KeyError: 'filter'"),
        ("doc_to_text: '{{nope()}}'\n", "got UndefinedError: 'nope' is undefined"),
        ("doc_to_target: !function gone.gone\n", "got ImportError"),
        ("colour: blue\n", "got TypeError: .*'colour'"),
        ("colour: [blue\n", r"from .*where\.yaml, got ParserError"),
    ],
)
def test_a_yaml_that_lm_eval_cannot_build(
    tokenizer: Any, tmp_path: Path, extra: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(BadInput, match=message):
        load(user_task(tmp_path / "tasks", extra=extra), tokenizer, 4096, tmp_path / "data")


def test_a_long_prompt_brings_no_warning_of_transformers(
    tiny_model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "short")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 64}))
    load(config("fact", items=1, tokens=300), load_tokenizer(folder), 4096, tmp_path / "data")
    assert "sequence length" not in caplog.text
    load_tokenizer(folder).encode("word " * 200)
    assert "sequence length" in caplog.text  # elsewhere it is shown


def test_group_is_refused_with_its_members(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks")
    cfg.name = "everything"
    (tmp_path / "tasks" / "group.yaml").write_text("group: everything\ntask: [where]\n")
    with pytest.raises(BadInput, match=r"a group of 1 \(where\)"):
        load(cfg, tokenizer, 4096, tmp_path)


def test_hub_not_reachable(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    cfg = user_task(tmp_path / "tasks", extra="dataset_path: someone/something\ndataset_kwargs: null\n")
    with pytest.raises(BadInput, match="needs a download and the Hugging Face hub is not reachable"):
        load(cfg, tokenizer, 4096, tmp_path)
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_name_is_looked_up_among_lm_evals_own(tokenizer: Any, tmp_path: Path) -> None:
    cfg = user_task(tmp_path / "tasks")
    cfg.name = "arc_eazy"
    with pytest.raises(BadInput, match=r"got 'arc_eazy'; near: .*arc_easy"):
        load(cfg, tokenizer, 4096, tmp_path)


def test_no_chat_template(tiny_model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder, tmp_path / "plain")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(BadInput, match=r"task\.apply_chat_template=false"):
        load(config("fact", apply_chat_template=True), load_tokenizer(folder), 4096, tmp_path)


def test_no_place_to_write(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "outputs").write_text("a file where the folder should be")
    with pytest.raises(BadInput, match="outputs=<folder>"):
        load(config("kv_retrieval", items=1, tokens=300), tokenizer, 4096, tmp_path / "outputs" / "data")


def test_id_is_a_hash_of_what_is_asked(tokenizer: Any, tmp_path: Path) -> None:
    (request,) = read_requests(
        load(user_task(tmp_path / "t", limit=1), tokenizer, 4096, tmp_path).path / "requests.jsonl"
    )
    asked = json.dumps([request.type, request.prompt, None, request.gen_kwargs, None], sort_keys=True)
    assert request.id == hashlib.sha256(f"1{asked}".encode()).hexdigest()[:16]

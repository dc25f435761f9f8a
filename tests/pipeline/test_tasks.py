"""The tasks themselves: prose, lengths, where things stand, what depends on what, how answers are judged."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer
from omegaconf import OmegaConf

from pipeline import tasks
from pipeline.errors import BadInput
from pipeline.tasks import fact, niah, perplexity, prose
from pipeline.tasks.perplexity import exp_share, share, share_stderr
from pipeline.tasks.prompt import encode, largest, prompt_tokens

CONF = Path(__file__).parents[2] / "conf" / "task"
few = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def tokenizer(tiny_model_folder: Path) -> Any:
    return load_tokenizer(tiny_model_folder)


def config(task: str, **overrides: Any) -> Any:
    """The plain settings of conf/task/<task>.yaml with overrides."""
    return tasks.settings(OmegaConf.merge(OmegaConf.load(CONF / f"{task}.yaml"), overrides))


def documents(tokenizer: Any, task: str, **overrides: Any) -> list[dict]:
    return list(tasks.make(config(task, **overrides), tokenizer).task.eval_docs)


# Prose


def test_language_reference_is_readable_prose() -> None:
    paragraphs = prose.read_prose(None).text.split("\n\n")
    assert len(paragraphs) > 300 and len(set(paragraphs)) == len(paragraphs)
    assert all(p[0].isupper() and prose.ends_sentence(p) and "\n" not in p for p in paragraphs)
    assert not any(mark in p for p in paragraphs for mark in ("::=", ">>>", "****", "  ", "|"))


def test_pieces_join_to_the_text() -> None:
    read = prose.read_prose(None)
    assert "".join(read.pieces) == read.text


@pytest.mark.parametrize(
    ("block", "paragraph"),
    [
        (
            "   * If the name is *bound* to a long- lived\n     object, nothing\n     more happens to it at all [1].",
            "If the name is bound to a long- lived object, nothing more happens to it at all.",
        ),
        (
            "Changed in version 3.7: The names of the values are now looked up in the non-\nlocal scope.",
            "The names of the values are now looked up in the non-local scope.",
        ),
        ("The names of the values and of the functions are these ones here:\n   x ::= y", None),
        ("Too short to be prose.", None),
        ("this one does not begin with a capital and so belongs to something else.", None),
        ("| Operator | What it does to the values on its left and on its right hand |", None),
    ],
)
def test_paragraph(block: str, paragraph: str | None) -> None:
    assert prose._paragraph(block) == paragraph


def test_user_file(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Call me\nIshmael.\n\n  \nSome years ago -\nnever mind.\n", encoding="utf-8")
    assert prose.read_prose(str(path)).text == "Call me Ishmael.\n\nSome years ago - never mind."


@pytest.mark.parametrize("content", [None, b"", b" \n\n ", b"\xff\xfe\xff"])
def test_user_file_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "book.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=r"task\.prose"):
        prose.read_prose(str(path))


@pytest.mark.parametrize("task", ["fact", "niah", "perplexity"])
def test_prose_too_short(tmp_path: Path, tokenizer: Any, task: str) -> None:
    path = tmp_path / "book.txt"
    path.write_text("It was the best of times. It was the worst of times. " * 5)
    with pytest.raises(BadInput, match="longer file"):
        documents(tokenizer, task, prose=str(path), tokens=300)


# Lengths


@given(limit=st.integers(0, 30), most=st.integers(0, 12))
def test_largest_is_the_largest(limit: int, most: int) -> None:
    assert largest(most, lambda n: 2 * n, limit) == max(n for n in range(most + 1) if 2 * n <= limit)


def test_largest_refuses_when_nothing_fits() -> None:
    with pytest.raises(BadInput, match=r"\(7 tokens\), got 6; raise task.tokens"):
        largest(5, lambda n: n + 7, 6)


@pytest.mark.parametrize("chat", [False, True])
@given(tokens=st.integers(200, 900), seed=st.integers(0, 10**6))
@few
def test_fact_prompts(tokenizer: Any, chat: bool, tokens: int, seed: int) -> None:
    measure = prompt_tokens(tokenizer, chat)
    for doc in documents(tokenizer, "fact", tokens=tokens, seed=seed, items=2, apply_chat_template=chat):
        text = doc["context"] + doc["question"]
        assert tokens - 20 <= measure(text, doc["gen_prefix"]) <= tokens  # a long word of this tokenizer: 20 tokens
        assert text.count(f"lives in the city of {doc['answer']}.") == 1
        assert doc["question"][0].isspace() and doc["context"] == doc["context"].strip()
        apart = encode(tokenizer, doc["context"]) + tokenizer.encode(doc["question"], add_special_tokens=False)
        assert apart == encode(tokenizer, text)


@pytest.mark.parametrize("haystack", ["essay", "repeat", "needle"])
@given(tokens=st.integers(400, 900), seed=st.integers(0, 10**6))
@few
def test_niah_prompts(tokenizer: Any, haystack: str, tokens: int, seed: int) -> None:
    measure, slack = prompt_tokens(tokenizer, False), 20 if haystack == "essay" else 90
    for doc in documents(tokenizer, "niah", haystack=haystack, tokens=tokens, seed=seed, items=2):
        text = doc["context"] + doc["question"]
        assert tokens - slack <= measure(text, doc["gen_prefix"]) <= tokens
        (value,) = doc["outputs"]
        assert text.count(f"is: {value}.") == 1
        assert doc["question"].startswith("\nWhat is the special magic number for ") and doc["question"].endswith("?")


@given(tokens=st.integers(200, 900), seed=st.integers(0, 10**6))
@few
def test_kv_prompts(tokenizer: Any, tokens: int, seed: int) -> None:
    measure = prompt_tokens(tokenizer, False)
    for doc in documents(tokenizer, "kv_retrieval", tokens=tokens, seed=seed, items=2):
        lines = doc["context"].split("\n")
        assert tokens - 40 <= measure(doc["context"] + doc["question"], doc["gen_prefix"]) <= tokens
        assert lines.count(f"{doc['gen_prefix']} {doc['answer']}.") == 1
        assert len({line.rsplit(" ", 1)[0] for line in lines}) == len(lines)


@given(tokens=st.integers(300, 600), continuation=st.integers(24, 60), seed=st.integers(0, 10**6))
@few
def test_perplexity_windows(tokenizer: Any, tokens: int, continuation: int, seed: int) -> None:
    text = prose.read_prose(None).text
    docs = documents(tokenizer, "perplexity", tokens=tokens, continuation_tokens=continuation, seed=seed, items=3)
    spans = []
    for doc in docs:
        context, whole = encode(tokenizer, doc["context"]), encode(tokenizer, doc["context"] + doc["continuation"])
        assert tokens - 25 <= len(context) <= tokens
        assert max(1, continuation - 25) <= len(whole) - len(context) <= continuation
        tail = tokenizer.encode(doc["continuation"], add_special_tokens=False)
        assert whole == context + tail and tokenizer.decode(tail) == doc["continuation"]
        assert doc["continuation"][0].isspace() and not doc["context"][-1].isspace()
        start = text.index(doc["context"] + doc["continuation"])  # real prose, unchanged
        spans.append((start, start + len(doc["context"]) + len(doc["continuation"])))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))  # no overlap


# Where things stand, and reproducibility


@pytest.mark.parametrize(
    ("depth", "text"),
    [
        (0.0, "F. A b. C d e. G h."),
        (0.2, "A b. F. C d e. G h."),
        (0.7, "A b. C d e. F. G h."),
        (1.0, "A b. C d e. G h. F."),
    ],
)
def test_place(depth: float, text: str) -> None:
    assert fact.place("F.", ["A", " b.", " C", " d", " e.", " G", " h."], depth) == text


def test_fact_follows_the_depths(tokenizer: Any) -> None:
    docs = documents(tokenizer, "fact", tokens=800, depths=[0.2, 0.8], items=4)
    assert [doc["depth"] for doc in docs] == [0.2, 0.8, 0.2, 0.8]
    for doc in docs:
        assert doc["context"].index(" lives in the city of ") / len(doc["context"]) == pytest.approx(
            doc["depth"], abs=0.2
        )


@pytest.mark.parametrize("task", ["fact", "niah", "kv_retrieval"])
def test_documents_depend_on_the_config_alone(tokenizer: Any, task: str) -> None:
    wanted = documents(tokenizer, task, tokens=400, items=3, seed=7)
    random.seed(99)
    state = random.getstate()
    assert documents(tokenizer, task, tokens=400, items=3, seed=7) == wanted
    assert random.getstate() == state  # and leave the global random as it was
    assert documents(tokenizer, task, tokens=400, items=2, seed=7) == wanted[:2]
    assert documents(tokenizer, task, tokens=400, items=3, seed=8) != wanted


def test_niah_needs_no_download(tokenizer: Any, capfd: pytest.CaptureFixture[str]) -> None:
    documents(tokenizer, "niah", tokens=400, items=1)
    from lm_eval.tasks.ruler import prepare_niah

    assert prepare_niah.cached_sent_tokenize.__module__ == prepare_niah.__name__  # ours was lent, not left there
    out, err = capfd.readouterr()
    assert "nltk" not in out + err and "Downloaded" not in out + err


def test_niah_many_needles(tokenizer: Any) -> None:
    doc = documents(
        tokenizer, "niah", tokens=900, items=1, haystack="essay", needle_keys=3, needle_values=2, needle_queries=2
    )[0]
    assert len(set(doc["outputs"])) == 4 and all(doc["context"].count(value) == 1 for value in doc["outputs"])
    assert doc["context"].count("One of the special magic numbers") == 6
    assert " numbers for " in doc["question"] and doc["gen_prefix"].endswith(" are")


# How answers are judged


@pytest.mark.parametrize(
    ("response", "found"),
    [(" Paris", 1), ("It is PARIS, I think", 1), ("Parisian", 0), ("Rome", 0), ("", 0), ("no/Paris", 1)],
)
def test_contains(response: str, found: float) -> None:
    assert fact.contains({"answer": "Paris"}, [response]) == {"contains": found}


def test_niah_judge() -> None:
    assert niah.judge({"outputs": ["12", "34"]}, [" 12 and 56"]) == {"string_match": 0.5}


def test_shares() -> None:
    items = [(4.0, 4), (2.0, 1)]
    assert share(items) == 6 / 5
    assert exp_share(items) == pytest.approx(3.320117)
    # Ratio 1.2; deviations 4 - 4.8 = -0.8 and 2 - 1.2 = 0.8; sqrt(2/1 * 1.28) / 5.
    assert share_stderr(items) == pytest.approx(0.32)


# Refused


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        ("fact", {"items": 0}, "task.items.*at least 1, got 0"),
        ("fact", {"tokens": 2.5}, "task.tokens"),
        ("fact", {"tokens": 10}, "raise task.tokens"),
        ("fact", {"seed": "x"}, "task.seed"),
        ("fact", {"query_aware": "maybe"}, "task.query_aware"),
        ("fact", {"depths": []}, "task.depths"),
        ("fact", {"depths": [1.5]}, "task.depths"),
        ("fact", {"until": "stop"}, "task.until"),
        ("fact", {"name": "two words"}, "task.name"),
        ("fact", {"source": "fiction"}, "task.source"),
        ("fact", {"tokenz": 3}, "tokenz"),
        ("fact", {"prose": "no/such/file.txt"}, "task.prose"),
        ("fact", {"prose": 5}, "task.prose to be a path"),
        ("fact", {"primary": True}, "task.primary"),
        ("lm_eval", {}, "task.name"),
        ("lm_eval", {"name": "x", "include_path": 5}, "task.include_path to be a path"),
        ("lm_eval", {"name": "x", "gen_kwargs": [1]}, "task.gen_kwargs to be a mapping"),
        ("lm_eval", {"name": "x", "metadata": "4096"}, "task.metadata to be a mapping"),
        ("lm_eval", {"name": "x", "num_fewshot": -1}, "num_fewshot"),
        ("perplexity", {"query_aware": False}, "task.query_aware=true"),
        ("perplexity", {"apply_chat_template": True}, "task.apply_chat_template=false"),
        ("perplexity", {"items": 10_000}, "lower task.items"),
        ("niah", {"haystack": "straw"}, "task.haystack"),
        ("niah", {"haystack": "repeat", "prose": "book.txt"}, "task.prose=null"),
        ("niah", {"key_type": "colours"}, "task.key_type"),
        ("niah", {"needle_queries": 2}, "needle_queries"),
        ("niah", {"needle_keys": 41}, "needle_keys"),
        ("kv_retrieval", {"tokens": 10**6}, "lower task.tokens"),
    ],
)
def test_refused(tokenizer: Any, task: str, overrides: dict, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        documents(tokenizer, task, **overrides)


@pytest.mark.parametrize("override", ["task.gen_kwargs={max_gen_toks:3}", "+task.gen_kwargs.max_gen_toks=3"])
def test_mappings_can_be_set_from_the_command_line(override: str) -> None:
    overrides = ["task=lm_eval", "task.name=x", "task.metadata={max_seq_lengths:[4096]}", override]
    with initialize_config_dir(str(CONF.parent), version_base=None):
        cfg = tasks.settings(compose("config", overrides).task)
    assert cfg.gen_kwargs == {"max_gen_toks": 3} and cfg.metadata == {"max_seq_lengths": [4096]}


def test_no_clean_cut_is_refused() -> None:
    class Merging:
        """A tokenizer that sees pairs of letters from the start, so that most cuts fall inside a pair."""

        bos_token = None

        def encode(self, text: str, add_special_tokens: bool = True) -> list[str]:
            return [text]  # the whole text is one token: no cut at all

        def decode(self, ids: list[str]) -> str:
            return "".join(ids)

    cfg = config("perplexity", tokens=1, continuation_tokens=1, items=1)
    with pytest.raises(BadInput):
        perplexity.build(cfg, prose.Prose("Some words that follow one another.", ""), Merging())

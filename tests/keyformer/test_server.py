"""mlx-lm's HTTP server with eviction attached, by real requests: the pieces of mlx_lm.server inside `attached`, and the
command `python -m keyformer.server`. Every answer must be the one that the same policy gives in process.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm import server as mlx_server
from mlx_lm import stream_generate
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.sample_utils import make_logits_processors

from keyformer import H2O, attached
from tests.conftest import TINY_TEXT, write_tiny_model

PROJECT = Path(__file__).resolve().parents[2]
POLICY, BUDGET = H2O(), 32
# a log probability is a logit less the logarithm of a sum: each is right to 1e-5
LOGPROB = 2e-5
LONG = " ".join(TINY_TEXT.split())


@dataclass
class Answer:
    """What a client gets."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    cached: int = 0
    prompt: int = 0

    def equals(self, other: Answer) -> None:
        assert self.tokens == other.tokens
        assert self.text == other.text
        assert self.finish_reason == other.finish_reason
        assert self.logprobs == pytest.approx(other.logprobs, abs=LOGPROB)


@dataclass
class Client:
    port: int
    folder: str

    def request(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def ask(self, prompt: str | list[dict[str, str]], **options: Any) -> Answer:
        body: dict[str, Any] = {"max_tokens": 12, "logprobs": True} | options
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["messages"] = "/v1/chat/completions", prompt
        status, text = self.request(path, body)
        assert status == 200, text
        if not body.get("stream"):
            response = json.loads(text)
            (choice,) = response["choices"]
            content, usage = choice["logprobs"]["content"], response["usage"]
            assert usage["completion_tokens"] == len(content)
            return Answer(
                [c["id"] for c in content],
                [c["logprob"] for c in content],
                (choice["text"] if isinstance(prompt, str) else choice["message"]["content"]) or "",
                choice["finish_reason"],
                usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                usage["prompt_tokens"],
            )
        events = [line[len("data: ") :] for line in text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        choices = [json.loads(e)["choices"][0] for e in events[:-1]]
        pieces = [c["text"] if isinstance(prompt, str) else c["delta"].get("content", "") for c in choices]
        return Answer([], [], "".join(pieces), choices[-1]["finish_reason"])


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def in_process(tiny_model_folder: Path) -> Iterator[Client]:
    """A program that embeds mlx-lm's server."""
    arguments = argparse.Namespace(
        model=str(tiny_model_folder),
        adapter_path=None,
        draft_model=None,
        num_draft_tokens=3,
        trust_remote_code=False,
        chat_template="",
        use_default_chat_template=False,
        chat_template_args={},
        allowed_origins="*",
        temp=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        max_tokens=512,
        decode_concurrency=32,
        prompt_concurrency=8,
        prefill_step_size=16,
        prompt_cache_bytes=None,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=5000,
        pipeline=False,
    )
    provider = mlx_server.ModelProvider(arguments)
    provider.load_default()
    with attached(provider.model, POLICY, BUDGET):
        generator = mlx_server.ResponseGenerator(provider, LRUPromptCache(10))
        httpd = ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *a, **k: mlx_server.APIHandler(generator, *a, system_fingerprint="test", **k)
        )
        serving = threading.Thread(target=httpd.serve_forever)
        serving.start()
        try:
            yield Client(httpd.server_address[1], str(tiny_model_folder))
        finally:
            httpd.shutdown()
            httpd.server_close()
            generator.stop_and_join()
            serving.join()


@pytest.fixture(scope="module")
def command(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """python -m keyformer.server."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    options = {"model": tiny_model_folder, "policy": "h2o", "budget": BUDGET, "port": port, "prefill-step-size": 16}
    words = [str(w) for name, value in options.items() for w in (f"--{name}", value)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "keyformer.server", *words], cwd=PROJECT, stdout=output, stderr=subprocess.STDOUT
        )
    client = Client(port, str(tiny_model_folder))
    try:
        deadline = time.monotonic() + 60
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if client.request("/health")[0] == 200:
                    break
            except OSError:
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield client
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(params=["in_process", "command"])
def client(request: pytest.FixtureRequest) -> Client:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(tiny_model_folder: Path) -> Any:
    """(model, tokenizer) of the same folder; the server's own model is another object."""
    return mlx_lm.load(str(tiny_model_folder))[:2]


def encoded(tokenizer: Any, prompt: str | list[dict[str, str]]) -> list[int]:
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True)


def expected(
    reference: Any,
    prompt: str | list[dict[str, str]] | list[int],
    tokens: int = 12,
    caches: Any = None,
    evict: bool = True,
    **options: Any,
) -> Answer:
    """generate() in process, under the same policy (or none)."""
    model, tokenizer = reference
    whole = prompt if isinstance(prompt, list) and isinstance(prompt[0], int) else encoded(tokenizer, prompt)
    with attached(model, *((POLICY, BUDGET) if evict else ())):
        caches = mlx_cache.make_prompt_cache(model) if caches is None else caches
        found = list(
            stream_generate(
                model, tokenizer, whole, max_tokens=tokens, prompt_cache=caches, prefill_step_size=16, **options
            )
        )
    if evict:
        assert all(c.size() == min(BUDGET, c.offset) for c in caches)
    return Answer(
        [r.token for r in found],
        [r.logprobs[r.token].item() for r in found],
        "".join(r.text for r in found),
        found[-1].finish_reason,
        prompt=len(whole),
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_completion(client: Client, reference: Any) -> None:
    for prompt in (LONG[:400], LONG[50:90], "a"):
        got, right = client.ask(prompt), expected(reference, prompt)
        got.equals(right)
        assert got.prompt == right.prompt
    assert expected(reference, LONG[:400], evict=False).tokens != expected(reference, LONG[:400]).tokens


def test_a_chat_completion_and_the_same_again(client: Client, reference: Any) -> None:
    """The second time the prompt's own prefix is in the server's store, not evicted yet."""
    messages = [user(LONG[10:350])]
    right = expected(reference, messages)
    first = client.ask(messages)
    first.equals(right)
    again = client.ask(messages)
    again.equals(right)
    assert again.cached == right.prompt - 1


@pytest.mark.parametrize("chat", [False, True])
def test_streaming(client: Client, reference: Any, chat: bool) -> None:
    for text in (LONG[20:420], LONG[:30]):
        prompt: Any = [user(text)] if chat else text
        got, right = client.ask(prompt, stream=True), expected(reference, prompt)
        assert (got.text, got.finish_reason) == (right.text, right.finish_reason)


def test_requests_together(client: Client, reference: Any) -> None:
    """Of one token and of hundreds, long answers and short ones; some as chats, some streamed."""
    prompts: list[Any] = [
        LONG[:700],
        "b",
        [user(LONG[100:500])],
        LONG[30:60],
        LONG[200:400],
        [user("x")],
        LONG[300:301],
        LONG[60:460],
    ]
    tokens = [30, 5, 17, 40, 9, 25, 12, 1]
    right = [expected(reference, p, n) for p, n in zip(prompts, tokens, strict=True)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda i: client.ask(prompts[i], max_tokens=tokens[i]), range(len(prompts))))
    for a, b in zip(got, right, strict=True):
        a.equals(b)


def test_a_conversation_reuses_its_cache(client: Client, reference: Any) -> None:
    """Three turns; each goes on with the evicted cache of the turn before, as one prompt cache would in process."""
    model, tokenizer = reference
    # letters that the tokenizer never joins, so that a reply's text becomes the same tokens again
    letters = [tokenizer.convert_tokens_to_ids(c) for c in "QZXKJVWG"]
    bias = dict.fromkeys(letters, 1000.0)
    with attached(model, POLICY, BUDGET):
        caches = mlx_cache.make_prompt_cache(model)
    messages: list[dict[str, str]] = []
    seen: list[int] = []
    for turn, text in enumerate((LONG[5:300], "And then?", LONG[400:520])):
        messages.append(user(text))
        prompt = encoded(tokenizer, messages)
        assert prompt[: len(seen)] == seen
        got = client.ask(messages, logit_bias={str(t): b for t, b in bias.items()}, max_tokens=8 + turn)
        right = expected(
            reference, prompt[len(seen) :], 8 + turn, caches, logits_processors=make_logits_processors(bias)
        )
        got.equals(right)
        assert set(got.tokens) <= set(letters)
        assert (got.cached, got.prompt) == (len(seen), len(prompt))
        messages.append({"role": "assistant", "content": got.text})
        seen = prompt + got.tokens


def test_a_system_prompt_is_shared(client: Client, reference: Any) -> None:
    """It is stored in the middle of a prompt, before anything is evicted, and serves other questions exactly."""
    system = {"role": "system", "content": "Rules: " + LONG[150:400]}
    cached = []
    for question in (LONG[500:560], "Where does Alice live?", LONG[120:300]):
        messages = [system, user(question)]
        got = client.ask(messages)
        got.equals(expected(reference, messages))
        cached.append(got.cached)
    assert cached[0] == 0
    assert cached[1] == cached[2] > 50


def test_a_request_with_a_seed_is_served_alone(client: Client, reference: Any) -> None:
    """mlx-lm serves it outside the batch."""
    prompt = LONG[7:377]
    client.ask(prompt, seed=1).equals(expected(reference, prompt))


def test_a_client_that_leaves_costs_nobody_anything(client: Client, reference: Any) -> None:
    right = expected(reference, LONG[90:390], 40)
    body = json.dumps({"prompt": LONG[:500], "max_tokens": 2000, "stream": True})
    with ThreadPoolExecutor(1) as pool:
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.readline()
        other = pool.submit(client.ask, LONG[90:390], max_tokens=40)
        response.close()
        connection.close()
        other.result().equals(right)
    client.ask(LONG[90:390], max_tokens=40).equals(right)


def test_another_model_is_evicted_too_or_refused(command: Client, reference: Any, tmp_path: Path) -> None:
    """A request may name another model. It is never served with the full cache in silence."""
    other = write_tiny_model(tmp_path / "other", seed=1)
    prompt = LONG[33:433]
    status, text = command.request("/v1/completions", {"prompt": prompt, "max_tokens": 12, "model": str(other)})
    if status == 200:
        right = expected(mlx_lm.load(str(other))[:2], prompt)
        assert json.loads(text)["choices"][0]["text"] == right.text
    else:
        assert str(other) in text or "model" in text
    command.ask(prompt).equals(expected(reference, prompt))


def test_a_request_for_a_draft_model_is_an_error(command: Client, reference: Any) -> None:
    prompt = LONG[44:444]
    status, text = command.request(
        "/v1/completions", {"prompt": prompt, "max_tokens": 5, "draft_model": command.folder}
    )
    assert status != 200
    assert "draft_model" in json.loads(text)["error"]
    command.ask(prompt).equals(expected(reference, prompt))


WRONG = [
    ({"policy": "nonsense"}, r"policy.*nonsense"),
    ({"budget": "0"}, r"budget.*got 0"),
    ({"budget": None}, r"budget"),
    ({"kv-bits": "8"}, r"kv.bits"),
    ({"draft-model": "some/model"}, r"draft.model"),
    ({"policy-of-mine": "1"}, r"policy-of-mine"),
]


def test_wrong_options_end_the_command_with_a_clear_message(tiny_model_folder: Path) -> None:
    right = {"model": str(tiny_model_folder), "policy": "h2o", "budget": "32", "port": str(free_port())}

    def run(wrong: dict[str, str | None]) -> subprocess.CompletedProcess[str]:
        options = {k: v for k, v in (right | wrong).items() if v is not None}
        words = [w for k, v in options.items() for w in (f"--{k}", v)]
        return subprocess.run(
            [sys.executable, "-m", "keyformer.server", *words], cwd=PROJECT, capture_output=True, text=True, timeout=60
        )

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, [wrong for wrong, _ in WRONG]))
    for (wrong, message), process in zip(WRONG, ended, strict=True):
        assert process.returncode == 2, (wrong, process.stderr)
        assert re.search(message, process.stderr), (wrong, process.stderr)
        assert "Traceback" not in process.stderr
        assert process.stdout == ""

"""Our lm-eval model: right without eviction, evicted before what is scored, the same alone, batched, shared or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load, stream_generate

import keyformer
from keyformer import H2O, Full, Keyformer, KeyformerProxy, Policy, Streaming, Window
from pipeline.errors import BadInput
from pipeline.language_model import KeyformerLM, Response
from pipeline.load import Request
from pipeline.prefill import PrefillStore

TEXT = (
    "Once upon a time there was a garden in which the names of things were kept: for each name the value, and for each "
    "value the place where it was found. The code of the blue door is 4821, the code of the green door is 7365."
)
QUESTION = " Question: what is the code of the blue door? Answer:"


@pytest.fixture(scope="module")
def tiny(tiny_model_folder: Path) -> tuple[Any, Any]:
    return load(str(tiny_model_folder))


def language_model(tiny: tuple[Any, Any], policy: Policy, budget: float, **options: Any) -> KeyformerLM:
    return KeyformerLM(*tiny, policy, budget, context=4096, **{"prefill_step_size": 32, "batch_size": 4} | options)


def request(type_: str, prompt: str, number: int = 0, **fields: Any) -> Request:
    defaults: dict[str, Any] = {"question_start": None, "continuation": None, "gen_kwargs": None, "target": ""}
    return Request(
        id=f"{number:016x}", type=type_, task="t", doc_id=number, idx=0, repeat=0, prompt=prompt, **defaults | fields
    )


def generation(prompt: str, number: int = 0, cut: int | None = None, **options: Any) -> Request:
    gen_kwargs = {"until": [], "max_gen_toks": 12, "do_sample": False} | options
    return request("generate_until", prompt, number, question_start=cut, gen_kwargs=gen_kwargs)


def answers(lm: KeyformerLM, *requests: Request) -> list[Any]:
    return [r.response for r in lm.respond(requests)]


def one(lm: KeyformerLM, asked: Request) -> Response:
    (response,) = lm.respond([asked])
    return response


# -- without eviction, the truth is mlx-lm's --------------------------------------------------------------------------


def test_full_generation_is_mlx_lms_greedy_text(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    tokens = [r.token for r in stream_generate(model, tokenizer, tokenizer.encode(TEXT), max_tokens=12)]
    expected = tokenizer.decode(tokens)
    assert answers(language_model(tiny, Full(), 1.0), generation(TEXT)) == [expected]
    assert len(expected) > 5


def truth(tiny: tuple[Any, Any], tokens: list[int], first: int) -> tuple[float, int]:
    """Log-likelihood of tokens[first:] and how many are the first choice, by one full forward pass in float32."""
    model, _ = tiny
    logits = model(mx.array(tokens[:-1])[None])[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    total, top1 = 0.0, 0
    for i in range(first, len(tokens)):
        total += logprobs[i - 1, tokens[i]].item()
        top1 += int(mx.argmax(logprobs[i - 1]).item() == tokens[i])
    return total, top1


@pytest.mark.parametrize("cut", [None, 60])
def test_full_loglikelihood_is_the_forward_pass(tiny: tuple[Any, Any], cut: int | None) -> None:
    tokenizer = tiny[1]
    context, continuation = TEXT[:149], TEXT[149:190]
    head = [] if cut is None else tokenizer.encode(context[:cut], add_special_tokens=False)
    body = context if cut is None else context[cut:]
    tokens = head + tokenizer.encode(body + continuation, add_special_tokens=False)
    first = len(head) + len(tokenizer.encode(body, add_special_tokens=False))
    total, top1 = truth(tiny, tokens, first)
    asked = request("loglikelihood", context, continuation=continuation, question_start=cut)
    (got,) = answers(language_model(tiny, Full(), 1.0), asked)
    assert got["logprob"] == pytest.approx(total, abs=1e-3)
    assert (got["tokens"], got["top1"]) == (len(tokens) - first, top1)
    assert got["is_greedy"] == (top1 == len(tokens) - first)


def test_greedy_continuation_is_greedy(tiny: tuple[Any, Any]) -> None:
    lm = language_model(tiny, Full(), 1.0)
    model, tokenizer = tiny
    best = int(mx.argmax(model(mx.array(tokenizer.encode(TEXT))[None])[0, -1]).item())
    (got,) = answers(lm, request("loglikelihood", TEXT, continuation=tokenizer.decode([best])))
    assert got["is_greedy"] is True and got["top1"] == got["tokens"] == 1


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(tiny: tuple[Any, Any]) -> None:
    lm = language_model(tiny, Full(), 1.0)
    left = request("loglikelihood", "The capital of France is ", continuation="Paris")
    right = request("loglikelihood", "The capital of France is", continuation=" Paris")
    assert answers(lm, left) == answers(lm, right)


def test_empty_context_is_conditioned_on_the_first_token(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    tokens = [tokenizer.bos_token_id, *tokenizer.encode("The garden", add_special_tokens=False)]
    total, _ = truth(tiny, tokens, 1)
    (got,) = answers(language_model(tiny, Full(), 1.0), request("loglikelihood", "", continuation="The garden"))
    assert got["logprob"] == pytest.approx(total, abs=1e-3)


def test_full_rolling_is_the_forward_pass_of_each_window(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    total, top1 = truth(tiny, [tokenizer.bos_token_id, *text], 1)
    (got,) = answers(language_model(tiny, Full(), 1.0), request("loglikelihood_rolling", TEXT))
    assert got["logprob"] == pytest.approx(total, abs=1e-2)
    assert (got["tokens"], got["top1"]) == (len(text), top1)
    # windows of a model that takes 33 tokens: each token once, the later windows with one token of context
    lm = KeyformerLM(*tiny, Full(), 1.0, context=33, batch_size=4)
    expected = truth(tiny, [tokenizer.bos_token_id, *text[:32]], 1)[0]
    for first in range(32, len(text), 32):
        last = min(first + 32, len(text))
        begin = last - 33 if last == len(text) else first - 1
        expected += truth(tiny, text[begin:last], first - begin)[0]
    (got,) = answers(lm, request("loglikelihood_rolling", TEXT))
    assert got["tokens"] == len(text)
    assert got["logprob"] == pytest.approx(expected, abs=1e-2)


# -- the end of an answer ---------------------------------------------------------------------------------------------


def test_stops_at_the_stop_string_and_generates_no_further(tiny: tuple[Any, Any]) -> None:
    lm = language_model(tiny, Full(), 1.0)
    whole = one(lm, generation(TEXT, max_gen_toks=24))
    text = whole.response
    assert whole.generated_tokens == 24
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped = one(lm, generation(TEXT, max_gen_toks=24, until=["never there", stop]))
    assert stopped.response == text[: text.index(stop)]
    assert stopped.generated_tokens < 24
    assert answers(lm, generation(TEXT, max_gen_toks=24, until=stop)) == [stopped.response]
    earlier = text[3:5]
    both = one(lm, generation(TEXT, max_gen_toks=24, until=[stop, earlier]))
    assert both.response == min((text.split(s, 1)[0] for s in (stop, earlier)), key=len)


def test_ends_at_the_end_of_text_token(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    third = [r.token for r in stream_generate(model, tokenizer, tokenizer.encode(TEXT), max_tokens=3)][2]
    before = set(tokenizer.eos_token_ids)
    tokenizer.eos_token_ids = {third}
    try:
        answer = one(language_model(tiny, Full(), 1.0), generation(TEXT))
    finally:
        tokenizer.eos_token_ids = before
    assert answer.generated_tokens == 2


def test_sampling_is_reproducible_and_follows_the_seed(tiny: tuple[Any, Any]) -> None:
    hot = generation(TEXT, do_sample=True, temperature=1.5, top_p=0.95, top_k=100)
    first, again = (answers(language_model(tiny, H2O(), 1.0), hot) for _ in range(2))
    other = answers(language_model(tiny, H2O(seed=7), 1.0), hot)
    assert first == again != other
    assert first != answers(language_model(tiny, H2O(), 1.0), generation(TEXT))


def test_an_option_nobody_honours_is_refused(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(BadInput, match="num_beams"):
        language_model(tiny, Full(), 1.0).check(generation(TEXT, num_beams=4))


# -- eviction is seen -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy", [Window(), H2O(), Keyformer(), KeyformerProxy(), H2O(window=8)], ids=lambda p: p.name
)
@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_a_tight_budget_changes_every_kind_of_answer(tiny: tuple[Any, Any], policy: Policy, prefill: str) -> None:
    asked = (
        request("loglikelihood", TEXT[:150], continuation=TEXT[150:190]),
        request("loglikelihood_rolling", TEXT),
        generation(TEXT, max_gen_toks=16),
    )
    full = answers(language_model(tiny, policy, 4096, prefill=prefill), *asked)
    tight = answers(language_model(tiny, policy, 8, prefill=prefill), *asked)
    assert abs(full[0]["logprob"] - tight[0]["logprob"]) > 0.01
    assert abs(full[1]["logprob"] - tight[1]["logprob"]) > 0.01
    assert full[2] != tight[2]
    # no row can go at these budgets: the same numbers as the full cache, whatever the policy does to score them
    reference = answers(language_model(tiny, Full(), 1.0, prefill=prefill), *asked)
    assert full == reference
    assert answers(language_model(tiny, policy, 1.0, prefill=prefill), *asked[:1], asked[2])[1] == reference[2]


def test_rows_are_evicted_before_the_question_is_read(tiny: tuple[Any, Any]) -> None:
    lm = language_model(tiny, H2O(), 12)
    tokenizer = tiny[1]
    prompt = TEXT + QUESTION
    response = one(lm, generation(prompt, cut=len(TEXT)))
    assert response.telemetry["prefill_tokens"] == len(tokenizer.encode(TEXT))
    assert response.telemetry["decode_rows"] == 13
    aware = one(lm, generation(prompt))
    assert aware.telemetry["prefill_tokens"] == len(tokenizer.encode(prompt)) - 1
    assert response.prompt_tokens == aware.prompt_tokens == len(tokenizer.encode(prompt))
    assert response.response != aware.response


def test_a_fraction_is_of_the_tokens_before_the_eviction(tiny: tuple[Any, Any]) -> None:
    tokens = len(tiny[1].encode(TEXT))
    response = one(language_model(tiny, H2O(), 0.25), generation(TEXT + QUESTION, cut=len(TEXT)))
    assert response.telemetry["budget_rows"] == math.ceil(tokens / 4)
    assert response.telemetry["floored"] == 0
    floored = one(language_model(tiny, Window(n_sink=30), 0.1), generation(TEXT))
    assert (floored.telemetry["budget_rows"], floored.telemetry["floored"]) == (31, 1)


def test_telemetry_counts_rows_and_bytes_of_real_arrays(tiny: tuple[Any, Any]) -> None:
    response = one(language_model(tiny, Window(), 20), generation(TEXT, max_gen_toks=5))
    n = len(tiny[1].encode(TEXT))
    t = response.telemetry
    assert t["row_bytes"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, KV heads, head size, float32
    assert (t["prefill_rows"], t["decode_rows"], t["rows_kept"]) == (n - 1, 21, 20)
    assert t["all_rows"] == n + 4  # the fifth token is never fed
    assert [position for position, _, _ in response.trace] == list(range(n, n + 5))
    assert all(rows == 20 and size == 20 * 512 for _, rows, size in response.trace)
    chunked = one(language_model(tiny, Window(), 20, prefill="chunked"), generation(TEXT, max_gen_toks=5))
    assert chunked.telemetry["prefill_rows"] == 20 + 32


def test_a_rolling_text_takes_rows_only(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(BadInput, match="budget=256"):
        language_model(tiny, H2O(), 0.5).check(request("loglikelihood_rolling", TEXT))


def test_a_budget_that_protects_everything_is_refused(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(BadInput, match="at least 11"):
        language_model(tiny, Window(n_sink=10), 8).check(generation(TEXT))


# -- the same however it is computed ----------------------------------------------------------------------------------

POLICIES = [Full(), Window(), H2O(), Keyformer(), Keyformer(redraw=False), KeyformerProxy(), Keyformer(window=8)]


def mixed() -> list[Request]:
    """Prompts of different lengths, questions of different lengths, answers of different lengths."""
    return [
        generation(TEXT + QUESTION, 0, cut=len(TEXT)),
        generation(TEXT[:120] + QUESTION, 1, cut=120, max_gen_toks=3),
        request("loglikelihood", TEXT[:90], 2, continuation=TEXT[90:130]),
        request("loglikelihood", TEXT[:90], 3, continuation=" something else"),
        generation("The", 4),
        request("loglikelihood_rolling", TEXT[:60], 5),
    ]


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        same = {k: v for k, v in a.items() if k != "logprob"} == {k: v for k, v in b.items() if k != "logprob"}
        return same and abs(a["logprob"] - b["logprob"]) < 1e-3
    return bool(a == b)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_batch_answers_as_its_requests_alone(tiny: tuple[Any, Any], policy: Policy) -> None:
    alone = answers(language_model(tiny, policy, 24, batch_size=1), *mixed())
    for size in (2, 6):
        together = answers(language_model(tiny, policy, 24, batch_size=size), *mixed())
        assert all(close(a, b) for a, b in zip(alone, together, strict=True)), (alone, together)


# first layer, second layer; what they keep; and whether the rows are numbered anew
LAYOUTS: list[dict[str, Any]] = [{"positions": "contiguous"}, {"allocate": "pyramid"}, {"allocate": [1, 3]}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_of_the_cache(tiny: tuple[Any, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    """Batches and shared prefills as ever; another answer than the plain layout's; at 1.0 everything is kept."""
    for policy in (H2O(), Streaming()):
        expected = answers(language_model(tiny, policy, 24, batch_size=1, **layout), *mixed()[:5])
        for _ in range(2):
            lm = language_model(tiny, policy, 24, store=PrefillStore(tmp_path, "tiny", 32, 1 << 30), **layout)
            together = answers(lm, *mixed()[:5])
            assert all(close(a, b) for a, b in zip(expected, together, strict=True)), (expected, together)
        assert expected != answers(language_model(tiny, policy, 24), *mixed()[:5])
        everything = answers(language_model(tiny, policy, 1.0, **layout), *mixed()[:5])
        assert everything == answers(language_model(tiny, Full(), 1.0), *mixed()[:5])


def test_telemetry_of_layers_with_budgets_of_their_own(tiny: tuple[Any, Any]) -> None:
    response = one(language_model(tiny, Window(), 20, allocate=[1, 3]), generation(TEXT, max_gen_toks=5))
    t = response.telemetry
    assert (t["decode_rows"], t["rows_kept"]) == (21, 20)  # 10 and 30, and the freed one
    assert all(rows == 20 and size == 20 * 512 for _, rows, size in response.trace)


def test_weights_for_other_layers_than_there_are(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(BadInput, match="expected 2 weights, one for each layer that evicts, got 3"):
        one(language_model(tiny, Window(), 20, allocate=[1, 2, 3]), generation(TEXT))


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_shared_prefill_changes_not_one_bit(tiny: tuple[Any, Any], policy: Policy, tmp_path: Path) -> None:
    requests = mixed()[:5]
    for budget in (24, 48, 0.5):
        expected = answers(language_model(tiny, policy, budget), *requests)
        for _ in range(2):  # the first time it is stored, or its scores are; the second time everything is read
            store = PrefillStore(tmp_path, "tiny", 32, 1 << 30)
            assert answers(language_model(tiny, policy, budget, store=store), *requests) == expected


def test_policies_and_budgets_share_one_run_of_the_model(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    calls = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            calls.append(tokens.shape[1])
            return model(tokens, cache=cache)

    store, counting = PrefillStore(tmp_path, "tiny", 32, 1 << 30), Counting()
    keyformer.make_prompt_cache(counting, H2O(), 24)  # a look at the model, once
    calls.clear()
    for policy in POLICIES:
        for budget in (24, 48):
            lm = KeyformerLM(counting, tokenizer, policy, budget, context=4096, prefill_step_size=32, store=store)
            answers(lm, generation(TEXT))
    n = len(tokenizer.encode(TEXT)) - 1
    assert sum(c for c in calls if c > 1) == n - n % 32 + (n % 32 if n % 32 > 1 else 0)


def test_the_hook_is_gone_afterwards(tiny: tuple[Any, Any]) -> None:
    from mlx_lm.models import base, llama

    answers(language_model(tiny, H2O(), 24), generation(TEXT))
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
    with keyformer.attached(tiny[0]):
        assert llama.scaled_dot_product_attention is not base.scaled_dot_product_attention

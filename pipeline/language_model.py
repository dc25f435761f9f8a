"""Our lm-eval language model over mlx-lm: what is scored has seen the evicted cache.

A single forward pass over prompt and continuation attends to everything and shows no loss at any budget. So a request
is fed as generation feeds it: the prompt in chunks, the end of the prompt announced (rows are evicted), then the last
prompt token, a question that compression must not see, and a continuation to be scored, one token at a time. Sequences
of a batch are decoded together, each with a cache and a budget of its own.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from mlx_lm.sample_utils import apply_top_k, apply_top_p

import keyformer
from keyformer import KeyformerKVCache, Policy

from .errors import BadInput
from .load import Request, answer_tokens, request_of
from .prefill import PrefillStore
from .score import LogLikelihood
from .tasks.prompt import encode, render_chat

_SAMPLING = {
    "until",
    "max_gen_toks",
    "max_new_tokens",
    "max_completion_tokens",
    "max_tokens",
    "do_sample",
    "temperature",
}
_SAMPLING |= {"top_p", "top_k"}


@dataclass(frozen=True)
class Response:
    """The answer to one request and what it took.

    `response`: text for generate_until; {"logprob", "is_greedy", "tokens", "top1"} for the likelihoods. `telemetry`:
    floats by name (bytes, rows, seconds). `trace`: (token position, rows, bytes) after each decoded token.
    """

    request: Request
    response: Any
    prompt_tokens: int
    generated_tokens: int
    telemetry: dict[str, float]
    trace: list[tuple[int, float, int]]


@dataclass
class _Sequence:
    """One request (or one window of a rolling request) on its way through the model."""

    request: Request
    prefix: list[int]  # prefilled, then evicted
    forced: list[int]  # fed one by one afterwards
    targets: list[int]  # the tokens that the last len(targets) forced ones must predict
    budget: int | None
    floored: bool
    stops: list[str] = field(default_factory=list)
    max_new: int = 0
    fed: int = 0
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    done: bool = False
    telemetry: dict[str, float] = field(default_factory=dict)
    trace: list[tuple[int, float, int]] = field(default_factory=list)

    def next_token(self) -> int:
        return self.forced[self.fed] if self.fed < len(self.forced) else self.new[-1]

    def next_target(self) -> int | None:
        """What the token fed now has to predict, if that is scored."""
        i = self.fed - (len(self.forced) - len(self.targets))
        return self.targets[i] if self.targets and i >= 0 else None


class KeyformerLM(LM):
    """An lm-eval model that answers with a budgeted KV cache.

    Args:
        model, tokenizer: as mlx_lm.load returns them.
        policy: which rows stay.
        budget: rows kept per KV head (int), or a fraction in (0, 1] of the tokens before the eviction, request by
            request; 1.0 keeps every row.
        context: tokens the model takes; longer rolling texts are cut into windows as lm-eval does.
        prefill: "full" or "chunked".
        positions, allocate: as `keyformer.make_prompt_cache` takes them; a budget of 1.0 is the same in every layer.
        prefill_step_size: tokens per chunk of the prompt.
        batch_size: sequences decoded together.
        store: prompts shared with other jobs; None computes each.
        query_aware: False evicts before the question of a document is read (its `question` field).
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: Policy,
        budget: int | float,
        *,
        context: int,
        prefill: str = "full",
        positions: str = "original",
        allocate: str | Sequence[float] = "uniform",
        prefill_step_size: int = 512,
        batch_size: int = 8,
        store: PrefillStore | None = None,
        query_aware: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.policy, self.budget = model, tokenizer, policy, budget
        self.context, self.prefill, self.step, self.batch_size = context, prefill, prefill_step_size, batch_size
        self.positions = positions
        self.allocate = "uniform" if isinstance(budget, float) and budget == 1.0 else allocate
        self.store = store if prefill == "full" else None
        self.query_aware = query_aware

    # -- lm-eval's interface ------------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return render_chat(self.tokenizer, chat_history, add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str:
        return str(self.tokenizer.chat_template or "")

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [r.response for r in self._answer(requests)]

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return [LogLikelihood.of(r.response) for r in self._answer(requests)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return [r.response["logprob"] for r in self._answer(requests)]

    def _answer(self, instances: list[Instance]) -> list[Response]:
        return list(self.respond([request_of(instance, self.query_aware) for instance in instances]))

    # -- from requests to responses -----------------------------------------------------------------------------------

    def respond(
        self, requests: Sequence[Request], tell: Callable[[str], None] = lambda now: None
    ) -> Iterator[Response]:
        """Answer requests in order, `batch_size` at a time; `tell` hears what is being done.

        Raises:
            BadInput: a budget that cannot work, or a generation option nobody here honours.
        """
        with keyformer.attached(self.model):
            for first in range(0, len(requests), self.batch_size):
                yield from self._respond_batch(requests[first : first + self.batch_size], tell)

    def check(self, request: Request) -> None:
        """Raise BadInput if this request cannot be answered with this budget; the model is not run."""
        self._sequences(request)

    def _respond_batch(self, requests: Sequence[Request], tell: Callable[[str], None]) -> Iterator[Response]:
        sequences = [self._sequences(r) for r in requests]
        flat = [s for group in sequences for s in group]
        ready: dict[tuple[Any, ...], tuple[list[Any], dict[str, float]]] = {}
        for first in range(0, len(flat), self.batch_size):
            batch = flat[first : first + self.batch_size]
            caches = []
            for number, s in enumerate(batch):
                tell(f"prefill {number + 1}/{len(batch)}")
                # equal contexts, as the choices of one question have, are prefilled once
                key = (tuple(s.prefix), s.budget)
                if key not in ready:
                    ready[key] = self._prefill(s)
                    s.telemetry |= ready[key][1]
                caches.append(ready[key][0])
            tell(f"decode {len(batch)} together")
            self._decode(batch, caches)
        for request, group in zip(requests, sequences, strict=True):
            yield self._response(request, group)

    def _sequences(self, request: Request) -> list[_Sequence]:
        """How the request is fed; more than one sequence only for a rolling text longer than the context."""
        tokenizer, cut = self.tokenizer, request.question_start

        def raw(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        if request.type == "loglikelihood_rolling":
            windows = get_rolling_token_windows(raw(request.prompt), self._first_token(), self.context - 1, 1)
            sequences = []
            for window in windows:
                seen, targets = make_disjoint_window(window)
                tokens = [*seen, *targets]
                rows, floored = self._budget(request, None, len(tokens))
                sequences.append(_Sequence(request, [], tokens[:-1], targets, rows, floored))
            return sequences
        if request.type == "generate_until":
            options = dict(request.gen_kwargs or {})
            unknown = sorted(set(options) - _SAMPLING)
            if unknown:
                raise BadInput(
                    f"Generation options: expected some of {', '.join(sorted(_SAMPLING))}, got {', '.join(unknown)} in "
                    f"task {request.task}; drop them with task.gen_kwargs or change the task."
                )
            question = encode(tokenizer, request.prompt) if cut is None else raw(request.prompt[cut:])
            question = question or [self._first_token()]  # an empty prompt
            prefix = question[:-1] if cut is None else encode(tokenizer, request.prompt[:cut])
            question = question[-1:] if cut is None else question
            until = options.get("until") or []
            stops = [s for s in ([until] if isinstance(until, str) else until) if s]
            new = max(1, answer_tokens(options))
            rows, floored = self._budget(request, len(prefix) + (cut is None), len(prefix) + len(question) + new)
            return [_Sequence(request, prefix, question, [], rows, floored, stops, new)]
        context, continuation = request.prompt, request.continuation or ""
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        head: list[int]
        if not context:
            head, body, whole = [], [self._first_token()], [self._first_token(), *raw(continuation)]
        elif cut is None:
            head, body, whole = [], encode(tokenizer, context), encode(tokenizer, context + continuation)
        else:
            head, body, whole = encode(tokenizer, context[:cut]), raw(context[cut:]), raw(context[cut:] + continuation)
        targets = whole[len(body) :]
        if not targets:
            raise BadInput(
                f"Task {request.task}, item {request.doc_id}: expected a continuation of at least one token."
            )
        prefix = head if cut is not None and context else body[:-1]
        forced = (body if cut is not None and context else body[-1:]) + targets[:-1]
        before = len(prefix) + (cut is None)
        rows, floored = self._budget(request, before, len(prefix) + len(forced))
        return [_Sequence(request, prefix, forced, targets, rows, floored)]

    def _first_token(self) -> int:
        """What a text without context is conditioned on: BOS, or EOS where there is none, as lm-eval does."""
        bos = self.tokenizer.bos_token_id
        return int(bos if bos is not None else self.tokenizer.eos_token_id)

    def _budget(self, request: Request, before: int | None, all_tokens: int) -> tuple[int | None, bool]:
        """Rows for a request with `before` tokens in front of the eviction, and whether the floor of the policy
        applied.
        """
        if not self.policy.evicts:
            return None, False
        try:
            if isinstance(self.budget, float):
                if before is None:
                    raise BadInput(
                        f"budget: task {request.task} scores a whole text and has no prompt to take a fraction of, got "
                        f"{self.budget}; give a number of rows, e.g. budget=256."
                    )
                if self.budget == 1.0:
                    return max(all_tokens, self.policy.least_budget()), False
                return self.policy.budget_rows(self.budget, before)
            self.policy.check_budget(self.budget)
            return self.budget, False
        except BadInput:
            raise
        except ValueError as error:
            raise BadInput(str(error)) from error

    # -- the model ----------------------------------------------------------------------------------------------------

    def _prefill(self, s: _Sequence) -> tuple[list[Any], dict[str, float]]:
        """Caches after the end of the prompt, and what it took."""
        caches = self._new_caches(s.budget)
        ours = [c for c in caches if isinstance(c, KeyformerKVCache)]
        started = time.perf_counter()
        peak, seconds, prompt = 0.0, 0.0, None
        if s.prefix and self.store is not None and len(ours) == len(caches):
            prompt = self.store.prompt(self.model, s.prefix)
            if prompt is None:  # this model's attention needs more than queries, keys and values
                self.store = None
        if prompt is not None and self.store is not None:
            started = time.perf_counter()
            self.store.fill(ours, prompt)
            seconds, peak = prompt.seconds, float(len(s.prefix))
        elif s.prefix:
            for c in ours:
                c.begin_prefill()
            for first in range(0, len(s.prefix), self.step):
                self.model(mx.array(s.prefix[first : first + self.step])[None], cache=caches)
                chunk = len(s.prefix[first : first + self.step]) if self.prefill == "chunked" else 0
                peak = max(peak, _rows(ours, [c.size() for c in ours]) + chunk)
                mx.eval([c.state for c in caches])
                mx.clear_cache()
            peak = min(peak, len(s.prefix))
            seconds = time.perf_counter() - started
            started = time.perf_counter()
        for c in ours:
            c.end_prefill()
        mx.eval([c.state for c in caches])
        return caches, {
            "prefill_tokens": float(len(s.prefix)),
            "prefill_seconds": seconds,
            "evict_seconds": time.perf_counter() - started,
            "prefill_rows": peak,
        }

    def _new_caches(self, budget: int | None) -> list[Any]:
        try:
            return keyformer.make_prompt_cache(
                self.model, self.policy, budget, self.prefill, positions=self.positions, allocate=self.allocate
            )
        except ValueError as error:
            raise BadInput(str(error)) from error

    def _decode(self, batch: list[_Sequence], caches: list[list[Any]]) -> None:
        """Feed every sequence to its end, all together; a finished one leaves the batch."""
        alone = [i for i, s in enumerate(batch) if not s.prefix]
        for i in alone:
            # an empty cache has no shape to merge: its first token goes alone
            caches[i] = self._new_caches(batch[i].budget)
            for c in caches[i]:
                if isinstance(c, KeyformerKVCache):
                    c.end_prefill()
            self._step([batch[i]], caches[i])
        live = [i for i, s in enumerate(batch) if not s.done]
        if not live:
            return
        if len(live) == 1:
            # copied, since an equal context may serve another batch
            merged = [_copy(c) for c in caches[live[0]]]
        else:
            merged = [layer[0].merge(list(layer)) for layer in zip(*(caches[i] for i in live), strict=True)]
        sequences = [batch[i] for i in live]
        while sequences:
            self._step(sequences, merged)
            keep = [i for i, s in enumerate(sequences) if not s.done]
            if len(keep) < len(sequences):
                sequences = [sequences[i] for i in keep]
                if sequences:
                    for c in merged:
                        c.filter(keep)

    def _step(self, sequences: list[_Sequence], caches: list[Any]) -> None:
        """One token for each sequence."""
        started = time.perf_counter()
        tokens = mx.array([[s.next_token()] for s in sequences])
        logits = self.model(tokens, cache=caches)[:, -1].astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        best = mx.argmax(logits, axis=-1)
        targets = [s.next_target() for s in sequences]
        wanted = mx.array([0 if t is None else t for t in targets])[:, None]
        chosen = mx.take_along_axis(logprobs, wanted, axis=-1)[:, 0]
        mx.eval(best, chosen)
        took = time.perf_counter() - started
        best_tokens: Any = best.tolist()
        chosen_logprobs: Any = chosen.tolist()
        ours = [c for c in caches if isinstance(c, KeyformerKVCache)]
        # layers differ only where budgets are allocated unevenly
        each = ours if ours[0].uneven else ours[:1]
        slots, sizes = (
            [_rows(each, rows) for rows in zip(*counts, strict=True)]
            for counts in ([c.slots() for c in each], [c.sizes() for c in each])
        )
        row_bytes = sum(c.row_bytes for c in ours)
        allocated = sum(c.nbytes for c in caches) / len(sequences)
        for i, s in enumerate(sequences):
            s.fed += 1
            t = s.telemetry
            t["row_bytes"] = float(row_bytes)
            t["decode_seconds"] = t.get("decode_seconds", 0.0) + took / len(sequences)
            t["decode_tokens"] = t.get("decode_tokens", 0.0) + 1
            t["decode_rows"] = max(t.get("decode_rows", 0.0), slots[i])
            t["allocated_bytes"] = max(t.get("allocated_bytes", 0.0), float(allocated))
            t["rows_kept"] = sizes[i]
            t.setdefault("first_token_seconds", took)
            s.trace.append((len(s.prefix) + s.fed, sizes[i], round(sizes[i] * row_bytes)))
            if targets[i] is not None:
                s.logprobs.append(chosen_logprobs[i])
                s.hits.append(best_tokens[i] == targets[i])
            if s.fed < len(s.forced):
                continue
            if not s.max_new:
                s.done = True
                continue
            token = self._sample(s, logprobs[i]) if _samples(s.request) else best_tokens[i]
            if token in self.tokenizer.eos_token_ids:
                s.done = True
                continue
            s.new.append(token)
            s.done = len(s.new) >= s.max_new or self._stopped(s)

    def _sample(self, s: _Sequence, logprobs: mx.array) -> int:
        """One token at the request's temperature; the draw depends on the request and the step alone."""
        options = s.request.gen_kwargs or {}
        logprobs = logprobs[None]
        if 0 < options.get("top_p", 1.0) < 1.0:
            logprobs = apply_top_p(logprobs, options["top_p"])
        if options.get("top_k", 0) > 0:
            logprobs = apply_top_k(logprobs, options["top_k"])
        draw = hashlib.sha256(f"{s.request.id}/{self.policy.seed}/{len(s.new)}".encode()).digest()
        key = mx.random.key(int.from_bytes(draw[:4], "little"))
        token: Any = mx.random.categorical(logprobs / options["temperature"], key=key).item()
        return int(token)

    def _stopped(self, s: _Sequence) -> bool:
        """Whether a stop string has just been completed: it lies within the last few tokens, one byte each at least."""
        if not s.stops:
            return False
        longest = max(len(stop.encode()) for stop in s.stops)
        text = self.tokenizer.decode(s.new[-(longest + 4) :])
        return any(stop in text for stop in s.stops)

    def _response(self, request: Request, group: list[_Sequence]) -> Response:
        first = group[0]
        if request.type == "generate_until":
            text = self.tokenizer.decode(first.new)
            for stop in first.stops:
                text = text.split(stop, 1)[0]
            answer: Any = text
        else:
            logprobs = [x for s in group for x in s.logprobs]
            hits = [h for s in group for h in s.hits]
            answer = {"logprob": sum(logprobs), "tokens": len(logprobs), "top1": sum(hits)}
            if request.type == "loglikelihood":
                answer["is_greedy"] = all(hits)
        telemetry = dict(first.telemetry)
        for s in group[1:]:
            for name, value in s.telemetry.items():
                together = max if name in ("decode_rows", "allocated_bytes", "row_bytes", "prefill_rows") else sum
                telemetry[name] = together((telemetry.get(name, 0.0), value))
        prompt = len(first.prefix) + len(first.forced) - max(0, len(first.targets) - 1)
        if first.budget is not None:
            telemetry["budget_rows"] = float(first.budget)
        telemetry["floored"] = float(first.floored)
        telemetry["all_rows"] = float(max(len(s.prefix) + s.fed for s in group))
        new = sum(len(s.new) or len(s.targets) for s in group)
        return Response(request, answer, prompt, new, telemetry, first.trace)


def _samples(request: Request) -> bool:
    options = request.gen_kwargs or {}
    return bool(options.get("do_sample")) and (options.get("temperature") or 0) > 0


def _rows(caches: Sequence[KeyformerKVCache], rows: Sequence[int]) -> float:
    """The mean of the layers' rows, weighted by the bytes of a row: times the bytes of all, it is the memory."""
    weights = [c.row_bytes or 1 for c in caches]
    return sum(r * w for r, w in zip(rows, weights, strict=True)) / sum(weights)


def _copy(cache: Any) -> Any:
    return type(cache).from_state(cache.state)

"""What each policy keeps of one long text, and how often the model then still predicts what it would have predicted.

    python examples/compare_policies.py --model MODEL --budget 0.25

The text is read, then 64 more of its tokens are fed one by one, as in decoding. "agreement" is the share of them after
which the most likely next token is that of the full cache. --file names a text of your own (default: this project's
README); one text says little about a policy, `make sweep` measures them on tasks.
"""

import argparse
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step

import keyformer

parser = argparse.ArgumentParser(description="Kept rows, bytes and next-token agreement of every policy on one text.")
parser.add_argument("--model", required=True)
parser.add_argument("--file", type=Path, default=Path(__file__).parent.parent / "README.md")
parser.add_argument("--budget", type=float, default=0.25, help="fraction of the tokens that are read")
parser.add_argument("--read", type=int, default=1024, help="tokens that are read before the cache is cut")
parser.add_argument("--fed", type=int, default=64, help="tokens that follow")
options = parser.parse_args()

model, tokenizer = load(options.model)
count = options.read + options.fed
tokens = tokenizer.encode(options.file.read_text(encoding="utf-8")[: 8 * count])[:count]
context, rest = tokens[: -options.fed], tokens[-options.fed :]


def predictions(policy: keyformer.Policy, rows: int | None) -> tuple[list[int], list]:
    """The most likely next token after each of `rest`, and the caches at the end."""
    caches = keyformer.make_prompt_cache(model, policy, rows)
    likely = []
    with keyformer.attached(model, policy, rows):
        for _ in generate_step(mx.array(context), model, max_tokens=0, prompt_cache=caches):
            pass
        for token in rest:
            logits = model(mx.array([[token]]), cache=caches)
            likely.append(mx.argmax(logits[0, -1]).item())
    return likely, caches


print(f"{len(context)} tokens read, {len(rest)} fed")
print(f"{'policy':<16}{'rows per head':>14}{'KiB':>10}{'agreement':>12}")
for name in keyformer.POLICIES:  # "full" is the first
    policy = keyformer.make_policy(name)
    rows = policy.budget_rows(options.budget, len(context))[0] if policy.evicts else None
    likely, caches = predictions(policy, rows)
    if name == "full":
        reference = likely
    agreement = sum(a == b for a, b in zip(likely, reference, strict=True)) / len(rest)
    held = [c for c in caches if isinstance(c, keyformer.KeyformerKVCache)]
    kib = sum(c.size() * c.row_bytes for c in held) / 1024
    print(f"{name:<16}{held[0].size():>14}{kib:>10.0f}{agreement:>12.0%}", flush=True)

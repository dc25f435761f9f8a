"""Several prompts of different lengths at once, each in a fixed number of rows; then one of them is saved and goes on.

    python examples/batch_and_cache.py --model MODEL

mlx-lm's batch_generate, save_prompt_cache and load_prompt_cache do the work, unchanged. The file holds the cut cache:
what was evicted is neither stored nor needed. --output names it (default: conversation.safetensors here).
"""

import argparse
from pathlib import Path

from mlx_lm import batch_generate, generate, load
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

import keyformer

parser = argparse.ArgumentParser(description="A ragged batch, then save, load and go on.")
parser.add_argument("--model", required=True)
parser.add_argument("--budget", type=int, default=128)
parser.add_argument("--max-tokens", type=int, default=30)
parser.add_argument("--output", type=Path, default=Path("conversation.safetensors"))
options = parser.parse_args()

readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
questions = [
    "What is a KV cache?",
    readme[:1000] + "\n\nWhich policies does this text name?",
    readme[:3000] + "\n\nSummarize this text in one sentence.",
]


def chat(text: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)


model, tokenizer = load(options.model)
prompts = [chat(q) for q in questions]
with keyformer.attached(model, keyformer.SnapKV(), budget=options.budget):
    answers = batch_generate(model, tokenizer, prompts, max_tokens=options.max_tokens, return_prompt_caches=True)
    for prompt, text, caches in zip(prompts, answers.texts, answers.caches, strict=True):
        print(f"-- a prompt of {len(prompt)} tokens, now in {caches[0].size()} rows:\n{text}\n")

    save_prompt_cache(str(options.output), answers.caches[-1])
    print(f"-- {options.output}: {options.output.stat().st_size / 1024:.0f} KiB; loaded again, it goes on:")
    caches = load_prompt_cache(str(options.output))
    more = chat("Say it again in three words.")
    print(generate(model, tokenizer, more, max_tokens=options.max_tokens, prompt_cache=caches))
    print(f"-- still {caches[0].size()} rows per head")

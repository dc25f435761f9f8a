"""An mlx-lm script as anybody writes it, with two lines added: the cache holds 256 rows per head, whatever is read.

    python examples/two_lines.py --model MODEL

MODEL is the folder of an mlx-lm model or its hub id; --file names a text of your own (default: this project's README).
"""

import argparse
from pathlib import Path

from mlx_lm import generate, load

import keyformer  # the first added line

parser = argparse.ArgumentParser(description="An mlx-lm script with two lines added.")
parser.add_argument("--model", required=True)
parser.add_argument("--file", type=Path, default=Path(__file__).parent.parent / "README.md")
parser.add_argument("--max-tokens", type=int, default=60)
options = parser.parse_args()

model, tokenizer = load(options.model)
question = options.file.read_text(encoding="utf-8")[:4000] + "\n\nWhat is this text about?"
prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
with keyformer.attached(model, keyformer.Keyformer(), budget=256):  # the second
    print(generate(model, tokenizer, prompt, max_tokens=options.max_tokens))

"""Make the tests' data: prose that glassllm (0.85 M parameters) wrote itself, as prompt and answer ids.

    python scripts/make_test_sample.py

writes tests/data/glassllm_{train,heldout}.jsonl.gz, the same each time.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from eagle_train import assets
from eagle_train.targets.hf import Target

OUT = Path(__file__).resolve().parents[1] / "tests" / "data"
STARTS = [
    "Alice was beginning", "“Who are you?” said", "The Queen", "It was a", "“Come here,” cried", "The Rabbit",
    "They had", "“I don't know", "Once upon", "The King and", "She looked", "“What is it", "There was", "The old man",
    "When he", "So they",
]  # fmt: skip
ROWS, PROMPT, ANSWER, HELDOUT = 1024, 12, 84, 64  # rows; tokens; tokens; rows


def main() -> None:
    """Sample 16 rows at a time at temperature 0.7; the first tokens of each are its prompt."""
    target = Target.load(assets.install_model("glassllm"), layer_ids=[1, 2, 3])
    torch.manual_seed(0)
    rows = []
    for batch in range(ROWS // 16):
        start = target.tokenizer(STARTS[batch % len(STARTS)], add_special_tokens=False)["input_ids"]
        ids = torch.tensor([start] * 16)
        made = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=PROMPT + ANSWER - len(start),
            do_sample=True,
            temperature=0.7,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        for i, row in enumerate(made.tolist()):
            rows.append({"id": f"{batch:03d}-{i:02d}", "prompt_ids": row[:PROMPT], "answer_ids": row[PROMPT:]})
    OUT.mkdir(exist_ok=True)
    for name, part in (("train", rows[HELDOUT:]), ("heldout", rows[:HELDOUT])):
        with (OUT / f"glassllm_{name}.jsonl.gz").open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=0) as f:
            f.write("".join(json.dumps(r, separators=(",", ":")) + "\n" for r in part).encode())


if __name__ == "__main__":
    main()

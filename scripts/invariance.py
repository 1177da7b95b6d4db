"""The same weights however the work is split: 20 optimizer steps in float64, one process; the bar train.invariance_rel.

    python scripts/invariance.py          prints each split's distance and writes the bar

A random target of three families' shape is too small to be slow and large enough to have documents of every kind:
answers at the start, in turns, of one token, of none.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_train.algorithms.eagle3 import Eagle3
from eagle_train.algorithms.teacher import Teacher
from eagle_train.config.schema import TrainConfig
from eagle_train.data.pack import Pack, layout
from eagle_train.device import shapes
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.report import bars
from eagle_train.targets.hf import Target
from eagle_train.train.optimizer import make_optimizer

STEPS, DEPTHS, VOCAB, WIDTH = 20, 4, 97, 32
DOCUMENTS = ["uaaaaauuaaaa", "aaaau", "uuu", "uuaaaaa", "auaauaaauaaaaua", "uuuuuuaaaaaaaaaaaa", "uaa", "uuaaaaaaaa"]


@dataclass(frozen=True)
class Scene:
    """A target, its teacher and one document per place in DOCUMENTS: ids and mask."""

    target: Target
    teacher: Teacher
    vocab: DraftVocab
    documents: list[tuple[list[int], list[bool]]]


def scene() -> Scene:
    """Seeded, in float64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    target = Target(LlamaForCausalLM(config).to(torch.float64).eval(), None, None, "random")
    vocab = DraftVocab.of(range(0, VOCAB, 2), VOCAB)
    teacher = Teacher(target.head, vocab.ids, target.head_weight[vocab.ids].detach())
    documents = [(torch.randint(VOCAB, (len(d),)).tolist(), [c == "a" for c in d]) for d in DOCUMENTS]
    return Scene(target, teacher, vocab, documents)


def pack(s: Scene, chosen: Sequence[int]) -> Pack:
    """The documents `chosen`, with the target's true features."""
    parts = [s.documents[i] for i in chosen]
    positions, document, bounds = layout([len(ids) for ids, _ in parts])
    features = [s.target.forward(torch.tensor(ids)) for ids, _ in parts]
    last = torch.cat([f.last for f in features])
    top, lse = s.teacher.whole(last)
    return Pack(
        ids=torch.tensor([i for ids, _ in parts for i in ids]), positions=positions, document=document,
        mask=torch.tensor([m for _, mask in parts for m in mask]), bounds=bounds,
        streams=torch.cat([f.streams for f in features]), last=last, top=top, lse=lse,
    )  # fmt: skip


def trajectory(s: Scene, windows: Sequence[Sequence[Sequence[int]]]) -> dict[str, Tensor]:
    """Weights after STEPS steps; window n [micro-batches][documents] is what step n (mod their number) learns from."""
    torch.manual_seed(1)
    theirs = s.target.config
    config = HeadConfig(
        hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        vocab_size=VOCAB, draft_vocab_size=s.vocab.size, target_hidden_size=WIDTH, layer_ids=s.target.layer_ids,
        rms_norm_eps=theirs.rms_norm_eps, max_position_embeddings=64,
    )  # fmt: skip
    head = Eagle3Head(config, s.vocab).to(torch.float64)
    head.attach(s.target)
    algorithm = Eagle3([0.8**k for k in range(DEPTHS)])
    optimizer = make_optimizer(head.named_parameters(), TrainConfig(lr=1e-2, steps=STEPS))
    for step in range(STEPS):
        window = [pack(s, chosen) for chosen in windows[step % len(windows)]]
        taught = {p: torch.bincount(p.document[p.runs() >= 2], minlength=len(p.bounds)) for p in window}
        divisor = sum(algorithm.share(int(n)) for counts in taught.values() for n in counts)
        for part in window:
            found = algorithm.results(head, part, s.teacher)
            if found is not None:
                (found.loss / divisor).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step(1.0)
    return {name: p.detach().clone() for name, p in head.named_parameters()}


def distances() -> dict[str, float]:
    """Per split, the largest ‖Δw‖/‖w‖ over the tensors, against every document as a micro-batch of its own."""
    s = scene()
    halves = [[0, 1, 2, 3], [4, 5, 6, 7]]
    alone = trajectory(s, [[[i] for i in half] for half in halves])
    splits = {
        "packed": trajectory(s, [[half] for half in halves]),
        "packed in another order": trajectory(s, [[half[::-1]] for half in halves]),
        "two micro-batches": trajectory(s, [[half[:2], half[2:]] for half in halves]),
    }
    before, shapes.MULTIPLE = shapes.MULTIPLE, 2 * shapes.MULTIPLE
    try:
        splits["padding doubled"] = trajectory(s, [[half] for half in halves])
    finally:
        shapes.MULTIPLE = before
    return {
        name: max(float((found[n] - w).norm() / w.norm()) for n, w in alone.items()) for name, found in splits.items()
    }


if __name__ == "__main__":
    found = distances()
    for name, distance in found.items():
        print(f"{name:25} {distance:.1e}")
    bars.record("train.invariance_rel", max(found.values()), "python scripts/invariance.py", {"splits": found})
    sys.exit(0 if max(found.values()) <= 1e-9 else 1)

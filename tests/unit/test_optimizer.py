"""Which optimizer takes which weights, its schedule, and that it comes back from a checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch

from eagle_train.config.schema import TrainConfig
from eagle_train.train.optimizer import make_optimizer, rate_share
from tests.parity import tiny


def settings(**given: object) -> TrainConfig:
    return TrainConfig.model_validate(given)


def test_muon_takes_the_matrices_inside_and_adamw_the_rest() -> None:
    target = tiny.target()
    head = tiny.head(target, tiny.head_config(target, 40)).float()
    names = {id(p): name for name, p in head.named_parameters()}
    adamw, muon = make_optimizer(head.named_parameters(), settings(optimizer="muon")).parts
    inside = {names[id(p)] for p in muon.param_groups[0]["params"]}
    rest = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert inside | rest == set(names.values()) and not inside & rest
    assert "fc.weight" in inside and "midlayer.self_attn.q_proj.weight" in inside and "lm_head.weight" in rest
    (alone,) = make_optimizer(head.named_parameters(), settings()).parts
    assert len(alone.param_groups[0]["params"]) == len(names)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_optimizer_takes_the_same_steps(kind: str) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 4))

    def steps(module: torch.nn.Module, optimizer: object, seeds: range) -> None:
        for seed in seeds:
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
            module(x).square().sum().backward()
            optimizer.step(1.0)  # type: ignore[attr-defined]

    first, config = model(), settings(optimizer=kind)
    optimizer = make_optimizer(first.named_parameters(), config)
    steps(first, optimizer, range(3))
    second = model()
    second.load_state_dict(first.state_dict())
    other = make_optimizer(second.named_parameters(), config)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as through a file
    steps(first, optimizer, range(3, 6))
    steps(second, other, range(3, 6))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_schedules() -> None:
    given = {"steps": 100, "warmup_steps": 10, "min_lr_share": 0.1}
    for name in ("cosine", "linear", "wsd"):
        shares = [rate_share(settings(schedule=name, **given), step, 0.0) for step in range(101)]
        assert shares[0] == pytest.approx(0.1 if name == "wsd" else shares[0]) and shares[100] == pytest.approx(0.1)
        assert all(a >= b for a, b in zip(shares[10:], shares[11:], strict=False)), name
    stable = [rate_share(settings(schedule="wsd", decay_share=0.3, **given), step, 0.0) for step in (10, 50, 70, 85)]
    assert stable == pytest.approx([1.0, 1.0, 1.0, 0.1 + 0.9 * 0.5])
    assert rate_share(settings(schedule="constant", **given), 99, 0.0) == 1.0


def test_a_time_limit_brings_the_rate_down() -> None:
    config = settings(steps=1000, warmup_steps=0, max_seconds=60, min_lr_share=0.0)
    assert rate_share(config, 10, 60.0) == pytest.approx(0.0)
    assert rate_share(config, 10, 30.0) == pytest.approx(0.5)

"""The one alignment, by gradients: what the loss of row i at depth k depends on, and nothing else.

    row i, depth k      input                                     position   predicts    teacher
    k = 0               emb(x_{i+1}),   project(g_i)               i          x_{i+2}     head(last_{i+1})
    k = 1               emb(x_{i+2}),   row i's state of k=0       i+1        x_{i+3}     head(last_{i+2})
    k                   emb(x_{i+1+k}), row i's state of k−1       i+k        x_{i+2+k}   head(last_{i+1+k})

One conversation of two turns, `a`: the assistant wrote the token. A row is trained where its whole reach is `a`:

    place       0  1  2  3  4  5  6  7  8  9 10 11 12
    token       u  u  a  a  a  a  u  u  u  a  a  a  u
    k = 0          ✓  ✓  ✓              ✓  ✓               row 1 reads x_2 and the streams of 0…1, predicts x_3
    k = 1          ✓  ✓                 ✓                  row 1 reads x_3 and its own state, predicts x_4
    k = 2          ✓                                       row 1 reads x_4, predicts x_5, the turn's last

Row i at depth k reads the streams of the document's places 0…i, the tokens 1…i+1+k, and the teacher at i+1+k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from eagle_train.algorithms.eagle3 import Eagle3
from eagle_train.algorithms.interface import DepthResult
from eagle_train.algorithms.teacher import Teacher
from eagle_train.algorithms.unroll import unroll
from eagle_train.data.pack import Pack, answer_runs, layout
from eagle_train.draft.eagle3 import Eagle3Head
from tests.parity import tiny

DRAWN = "uuaaaauuuaaau"
DEPTHS, DECAY = 4, 0.8
TRAINED = [{1, 2, 3, 8, 9}, {1, 2, 8}, {1}]
# Each token occurs once, so that the gradient of a row of the embedding table is that of one place.
IDS = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(3)).tolist()
CELLS = [(i, k) for k, rows in enumerate(TRAINED) for i in sorted(rows)]


class Scene:
    """The drawn conversation as document B of a pack A, B, with an A that is trained too."""

    def __init__(self) -> None:
        self.target = tiny.target()
        self.head = tiny.head(self.target, tiny.head_config(self.target, draft_vocab=40))
        self.teacher = tiny.teacher(self.target, self.head)
        self.before = (IDS[20:27], tiny.answers("uuaaaaa"))
        self.drawn = (IDS[: len(DRAWN)], tiny.answers(DRAWN))
        self.pack = tiny.pack(self.target, [self.before, self.drawn], self.teacher)
        self.start = len(self.before[0])
        self.inside, self.outside = int(self.head.t2d.nonzero()[0]), -1

    def only(self, pack: Pack, place: int) -> Pack:
        """`pack` with every teacher but the one at `place` outside the draft vocabulary: only its row keeps a loss."""
        top = torch.full_like(pack.top, self.outside)
        top[place] = self.inside
        return replace(pack, top=top)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return Scene()


def results(head: Eagle3Head, pack: Pack, teacher: Teacher, detailed: bool = False) -> list[DepthResult]:
    found = Eagle3([DECAY**k for k in range(DEPTHS)]).results(head, pack, teacher, detailed=detailed)
    return found.depths if found is not None else []


def loss_at(scene: Scene, pack: Pack, depth: int) -> Tensor:
    """The loss of one depth, with its gradients."""
    found = Eagle3([DECAY**k if k == depth else 0.0 for k in range(DEPTHS)]).results(scene.head, pack, scene.teacher)
    assert found is not None
    return found.loss


def places(gradient: Tensor) -> set[int]:
    """The rows of [N, …] that are not zero throughout."""
    return set(gradient.flatten(1).abs().sum(1).nonzero()[:, 0].tolist())


def test_the_picture(scene: Scene) -> None:
    pack = tiny.pack(scene.target, [scene.drawn], scene.teacher)
    found = results(scene.head, pack, scene.teacher)
    assert [set(r.rows.tolist()) for r in found] == TRAINED, "a depth without rows gives no result"
    assert tiny.trained(pack.mask, pack.bounds, DEPTHS) == [*TRAINED, set()]


@pytest.mark.parametrize(("row", "depth"), CELLS)
def test_what_one_loss_depends_on(scene: Scene, row: int, depth: int) -> None:
    a, i = scene.start, scene.start + row
    streams = scene.pack.streams.clone().requires_grad_()
    table = scene.target.embedding.clone().requires_grad_()
    scene.head._embedding = table  # attach would detach it
    try:
        pack = replace(scene.only(scene.pack, i + 1 + depth), streams=streams)
        loss = loss_at(scene, pack, depth)
        by_streams, by_table = torch.autograd.grad(loss, [streams, table])
    finally:
        scene.head.attach(scene.target)
    assert places(by_streams) == set(range(a, i + 1)), "the document's rows up to i, nobody else's"
    assert places(by_table) == {IDS[j] for j in range(1, row + 2 + depth)}, "x_1 … x_{i+1+k}, no further"


@pytest.mark.parametrize(("row", "depth"), CELLS)
def test_value_and_teacher_of_one_loss(scene: Scene, row: int, depth: int) -> None:
    i = scene.start + row
    pack = scene.only(scene.pack, i + 1 + depth)
    with torch.no_grad():
        loss = results(scene.head, pack, scene.teacher)[depth].loss
        rows = list(unroll(scene.head, pack, DEPTHS, pack.runs()))[depth]
        q = scene.head.logits(rows.hidden[rows.rows == i])[0].log_softmax(-1)
        p = scene.target.head(pack.last[i + 1 + depth])[scene.head.vocab.ids].softmax(-1)
        weight = DECAY**depth / len(TRAINED[0])
        torch.testing.assert_close(loss, -(p * q).sum() * weight, rtol=1e-12, atol=1e-14)
        changed = set()
        for j in range(len(pack.ids)):
            last = pack.last.clone()
            last[j] = last[j].flip(0)
            other = results(scene.head, replace(pack, last=last), scene.teacher)[depth].loss
            changed |= {j} if other != loss else set()
    assert changed == {i + 1 + depth}


def test_a_row_whose_target_is_outside_has_no_loss_but_counts(scene: Scene) -> None:
    pack = replace(scene.pack, top=torch.full_like(scene.pack.top, scene.outside))
    for r in results(scene.head, pack, scene.teacher, detailed=True):
        assert float(r.loss.detach()) == 0.0 and r.outside == len(r.rows) == len(r.correct) == len(r.alpha) > 0
        assert not r.correct.any()


def test_figures_are_on_the_full_vocabulary(scene: Scene) -> None:
    for r in results(scene.head, scene.pack, scene.teacher, detailed=True):
        at = r.rows + 1 + r.depth
        rows = list(unroll(scene.head, scene.pack, DEPTHS, scene.pack.runs()))[r.depth]
        p = scene.target.head(scene.pack.last[at]).softmax(-1)
        q = torch.zeros_like(p)
        q[:, scene.head.vocab.ids] = scene.head.logits(rows.hidden).softmax(-1)
        choice = q.argmax(-1)
        torch.testing.assert_close(r.alpha, torch.minimum(p, q).sum(-1))
        torch.testing.assert_close(r.accept, p.gather(1, choice[:, None])[:, 0])
        assert torch.equal(r.correct, choice == p.argmax(-1))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_documents_do_not_see_one_another(scene: Scene, order: tuple[int, int]) -> None:
    """The drawn document's losses, to the bit, whatever the other one holds."""
    documents = [scene.before, scene.drawn]
    pack = tiny.pack(scene.target, [documents[d] for d in order], scene.teacher)
    other = pack.bounds[order.index(0)]
    top = pack.top.clone()
    top[slice(*other)] = scene.outside  # the other document runs, but has no loss
    first = results(scene.head, replace(pack, top=top), scene.teacher)
    ids, streams = pack.ids.clone(), pack.streams.clone()
    ids[slice(*other)] = torch.tensor(IDS[40:47])
    streams[slice(*other)] = streams[slice(*other)].flip(0) * 3
    second = results(scene.head, replace(pack, top=top, ids=ids, streams=streams), scene.teacher)
    mine = [{pack.bounds[order.index(1)][0] + i for i in rows} for rows in TRAINED]
    for k, rows in enumerate(mine):
        assert rows < set(first[k].rows.tolist()), "the other document has rows at this depth too"
        assert first[k].loss != 0
        assert torch.equal(first[k].loss, second[k].loss)


def sums(head: Eagle3Head, packs: Sequence[Pack], teacher: Teacher) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients, over all packs and depths."""
    parameters = [p for p in head.parameters() if p.requires_grad]
    found = [Eagle3([DECAY**k for k in range(DEPTHS)]).results(head, pack, teacher) for pack in packs]
    loss = torch.stack([f.loss for f in found if f is not None]).sum()
    return loss.detach(), list(torch.autograd.grad(loss, parameters))


def test_packing_changes_nothing(scene: Scene) -> None:
    """Packed = separate, whatever the order; a document with nothing to train adds nothing, wherever it lies."""
    silent = (IDS[30:34], tiny.answers("uuua"))  # one answer token: an engine would have nothing to draft
    documents = [silent, scene.before, scene.drawn, (IDS[34:40], tiny.answers("aauaaa")), silent]
    apart = sums(scene.head, [tiny.pack(scene.target, [d], scene.teacher) for d in documents], scene.teacher)
    for order in ([0, 1, 2, 3, 4], [3, 0, 2, 4, 1]):
        mixed = tiny.pack(scene.target, [documents[d] for d in order], scene.teacher)
        together = sums(scene.head, [mixed], scene.teacher)
        torch.testing.assert_close(together[0], apart[0], rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(together[1], apart[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_nothing_to_train_gives_no_result(scene: Scene) -> None:
    assert results(scene.head, tiny.pack(scene.target, [(IDS[:4], tiny.answers("uuua"))]), scene.teacher) == []


@pytest.mark.parametrize(
    "documents",
    [
        ["aaaa"],
        ["uuuu"],
        ["a"],
        ["uaaau", "aaa", "uua"],
        ["aauaa", "uuaaa", "aa"],
        ["auaauaaauaaaaua"],
        ["ua", "au", "aaaaa"],
    ],
)
def test_trained_rows_by_definition(documents: list[str]) -> None:
    mask = torch.tensor(tiny.answers("".join(documents)))
    bounds = layout([len(d) for d in documents])[2]
    runs = answer_runs(mask, bounds)
    for k, rows in enumerate(tiny.trained(mask, bounds, 6)):
        assert set((runs >= k + 2).nonzero()[:, 0].tolist()) == rows, k

from __future__ import annotations

import pytest
import torch

from ddaudit.runtime.caches.window import ROOT, Window

CPU = torch.device("cpu")
TREE = (ROOT, 0, 0, 1, 2, ROOT, 5)


def mask_of(parents: tuple[int, ...], start: int) -> torch.Tensor:
    window = Window(start, len(parents), parents)
    past = torch.ones(len(parents), start, dtype=torch.bool)
    return torch.cat([past, window.ancestors(CPU)], dim=1)[None, None]


def test_a_chain_is_a_tree_whose_mask_is_causal():
    window = Window.chain(5, 4)
    assert window.is_chain and window.end == 9 and window.depths == (0, 1, 2, 3)
    assert torch.equal(window.ancestors(CPU), torch.ones(4, 4, dtype=torch.bool).tril())
    assert Window.from_mask(mask_of((ROOT, 0, 1, 2), 5), 5, 4) == window


@pytest.mark.parametrize("start", [0, 1, 9])
def test_a_tree_comes_back_from_its_boolean_mask(start):
    assert Window.from_mask(mask_of(TREE, start), start, len(TREE)) == Window(start, len(TREE), TREE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", ["min", "-inf"])
def test_a_tree_comes_back_from_its_additive_mask(dtype, hidden):
    value = torch.finfo(dtype).min if hidden == "min" else float("-inf")
    mask = torch.zeros(1, 1, 7, 10, dtype=dtype).masked_fill(~mask_of(TREE, 3), value)
    assert Window.from_mask(mask, 3, 7).parents == TREE


def test_ancestors_depths_and_taps_follow_the_parents():
    window = Window(3, len(TREE), TREE)
    assert window.depths == (0, 1, 1, 2, 2, 0, 1)
    assert window.ancestors(CPU)[4].nonzero().flatten().tolist() == [0, 2, 4]
    # Four committed inputs stand before the window's own; node 4 hangs on 2, on 0, on the last committed.
    assert window.taps(4, CPU)[4].tolist() == [3, 4, 6, 8]
    assert window.taps(4, CPU)[5].tolist() == [1, 2, 3, 9]


def test_paths_are_told_from_other_sets_of_nodes():
    window = Window(3, len(TREE), TREE)
    for path in [(), (0,), (0, 2, 4), (5, 6)]:
        window.check_path(path)
    for other in [(1,), (0, 1, 2), (0, 5), (0, 0), (7,), (-1,), (2, 0)]:
        with pytest.raises(ValueError):
            window.check_path(other)


def broken(change):
    mask = mask_of(TREE, 3)
    change(mask[0, 0])
    return mask


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (mask_of(TREE, 3)[..., :-1], "last two sizes"),
        (broken(lambda m: m[2].__setitem__(1, False)), "hides committed tokens"),
        (broken(lambda m: m[4].__setitem__(3 + 4, False)), "not a tree"),
        (broken(lambda m: m[4].__setitem__(3 + 0, False)), "not a tree"),
        (broken(lambda m: m[1].__setitem__(3 + 4, True)), "not a tree"),
        (torch.cat([mask_of(TREE, 3), mask_of((ROOT, 0, 1, 2, 3, 4, 5), 3)]), "one tree is needed"),
    ],
    ids=["size", "past", "self", "grandparent", "later", "rows differ"],
)
def test_a_mask_that_is_no_tree_is_refused(mask, says):
    with pytest.raises(ValueError, match=says):
        Window.from_mask(mask, 3, 7)

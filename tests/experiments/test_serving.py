"""What is said of a folder that is served, once; and which tree is the default."""

import pytest

from experiments import serving
from spec_jax.config import schema
from spec_jax.core.errors import UserError
from spec_jax.sampling import trees
from tests.support import served, tiny


@pytest.fixture(scope="module")
def target():
    return served.make_target()


@pytest.fixture(autouse=True)
def nothing_said_yet():
    serving.note.cache_clear()


def test_what_a_folder_left_open_is_said_once(target, tmp_path, capsys):
    folder = served.export_drafter(tmp_path / "drafter", target)
    made = serving.load_drafter(folder, target, num_draft=2)
    again = serving.load_drafter(folder, target, num_draft=2)
    serving.with_num_draft(made.drafter, 2, target)
    assert made.notes == again.notes and len(made.notes) > 1
    found = capsys.readouterr()
    assert found.err.splitlines() == [f"note: {words}" for words in made.notes]
    assert "serves 2 of the 3 drafts" in found.err and not found.out


def test_fewer_drafts_than_were_made_are_said_once(target, capsys):
    drafter = tiny.dflash(target.spec, 3)
    assert serving.with_num_draft(drafter, 0, target) is drafter
    assert not capsys.readouterr().err
    for _ in range(2):
        assert serving.with_num_draft(drafter, 2, target).layout.num_draft == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "'dflash' serves 2 of the 3 drafts a round" in line


def test_a_static_tree_is_the_default_one_cut_or_the_one_that_is_named():
    def parents(**serve):
        named = schema.Serve(topology="static_tree", **serve)
        return serving.topology_of(named)

    whole = parents()
    assert whole.parents == trees.DEFAULT_STATIC_TREE and whole.levels(1) == 5
    assert parents(tree_depth=9).parents == trees.DEFAULT_STATIC_TREE
    short = parents(tree_depth=2)
    assert short.levels(1) == 2 and 0 < short.num_draft(1) < whole.num_draft(1)
    # The nodes that stay keep their order and their parents: two levels are the
    # root's children and theirs.
    first = short.parents.count(0)
    assert first == whole.parents.count(0)
    at = [row for row, parent in enumerate(whole.parents, 1) if parent == 0]
    assert len(short.parents) - first == sum(p in at for p in whole.parents)
    assert trees.cut((0, 1, 1, 0, 2, 4), 2) == (0, 1, 1, 0, 4)
    assert parents(tree_depth=1).parents == (0,) * first
    assert parents(tree_parents=(0, 0, 1), tree_depth=1).parents == (0, 0, 1)
    with pytest.raises(UserError, match=r"serve\.tree_depth=0 must be at least 1"):
        parents(tree_depth=0)

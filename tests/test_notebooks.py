"""The notebooks: stored bare, in step with the code, and they run.

What can be read off a notebook is checked at once: no outputs, valid JSON, names
that exist, no function or class of its own. Running one takes a training run
and is marked slow.
"""

import ast
import importlib
import json
import pathlib
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("spec_jax", "experiments", "configs")
# What nbformat 4.5 asks of a cell: its keys, by kind.
CELL_KEYS = {
    "markdown": {"cell_type", "id", "metadata", "source"},
    "code": {"cell_type", "id", "metadata", "source", "execution_count", "outputs"},
}

each_notebook = pytest.mark.parametrize(
    "path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS]
)


def code_of(book):
    return ["".join(c["source"]) for c in book["cells"] if c["cell_type"] == "code"]


def read(path):
    return json.loads(path.read_text("utf-8"))


def form_faults(book):
    """Sentences on what keeps this from being a bare nbformat 4.5 notebook."""
    if set(book) != {"cells", "metadata", "nbformat", "nbformat_minor"}:
        return [f"the notebook has the keys {sorted(book)}"]
    faults = []
    if (book["nbformat"], book["nbformat_minor"]) != (4, 5):
        faults.append("the format is not 4.5")
    if book["metadata"].get("kernelspec", {}).get("name") != "python3":
        faults.append("the kernel is not python3")
    ids = [cell.get("id") for cell in book["cells"]]
    if len(set(ids)) < len(ids):
        faults.append("two cells share an id")
    for cell in book["cells"]:
        name = f"cell {cell.get('id')!r}"
        if set(cell) != CELL_KEYS.get(cell["cell_type"]):
            faults.append(f"{name} has the keys {sorted(cell)}")
        elif not all(isinstance(line, str) for line in cell["source"]):
            faults.append(f"{name} has a source that is not text")
        if cell["metadata"]:
            faults.append(f"{name} has metadata")
        if cell.get("outputs") or cell.get("execution_count") is not None:
            faults.append(f"{name} was stored with outputs; clear them")
    return faults


def resolve(module, name):
    """`from module import name`, or None where that would fail."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        return None
    if not hasattr(found, name):
        try:
            return importlib.import_module(f"{module}.{name}")
        except ModuleNotFoundError:
            return None
    return getattr(found, name)


def name_faults(cells):
    """Sentences on project names that these code cells use and nobody defines."""
    faults, known = [], {}
    trees = [ast.parse(cell) for cell in cells]
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in OURS:
                    faults.append(f"import {alias.name}: say `from ... import ...`")
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] not in OURS:
                continue
            for alias in node.names:
                found = resolve(node.module, alias.name)
                known[alias.asname or alias.name] = found
                if found is None:
                    faults.append(f"{node.module} has no {alias.name!r}")
    for node in (n for tree in trees for n in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            if isinstance(owner, types.ModuleType) and not hasattr(owner, node.attr):
                faults.append(f"{owner.__name__} has no {node.attr!r}")
    return faults


def test_the_notebooks_are_there():
    assert "01_one_round_of_dflash" in {path.stem for path in NOTEBOOKS}


@each_notebook
def test_stored_bare_and_well_formed(path):
    assert form_faults(read(path)) == []


@each_notebook
def test_every_project_name_exists(path):
    cells = code_of(read(path))
    assert any(f"from {package}" in cell for cell in cells for package in OURS)
    assert name_faults(cells) == []


@each_notebook
def test_defines_no_algorithm(path):
    own = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    for cell in code_of(read(path)):
        found = [n.name for n in ast.walk(ast.parse(cell)) if isinstance(n, own)]
        assert not found, f"{found} belong in the library"


@each_notebook
def test_asserts_more_often_than_it_prints(path):
    text = "\n".join(code_of(read(path)))
    nodes = list(ast.walk(ast.parse(text)))
    asserts = sum(isinstance(n, ast.Assert) for n in nodes)
    prints = sum(isinstance(n, ast.Name) and n.id == "print" for n in nodes)
    assert asserts > prints


@each_notebook
def test_first_cell_installs_on_colab_only(path, monkeypatch):
    cell = code_of(read(path))[0]
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: commands.append(words))
    exec(cell, {})
    assert commands == []
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    with pytest.raises(ValueError, match="REPOSITORY is empty"):
        exec(cell, {})
    assert commands == [] and cell.count('REPOSITORY = ""') == 1
    exec(cell.replace('REPOSITORY = ""', 'REPOSITORY = "file:///x.git"'), {})
    assert commands[0][1:4] == ["-m", "pip", "install"]
    assert commands[0][-1].endswith("@ git+file:///x.git")


def test_the_checks_find_what_they_look_for():
    book = read(NOTEBOOKS[0])
    cell = next(c for c in book["cells"] if c["cell_type"] == "code")
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    assert "was stored with outputs" in form_faults(book)[0]
    del cell["outputs"]
    assert "has the keys" in form_faults(book)[0]
    for source, fault in (
        ("from spec_jax.core import maskz", "spec_jax.core has no 'maskz'"),
        ("from spec_jax.cor import masks", "spec_jax.cor has no 'masks'"),
        (
            "from spec_jax.core import masks\nmasks.before_anker",
            "spec_jax.core.masks has no 'before_anker'",
        ),
    ):
        assert name_faults([source]) == [fault]
    assert name_faults(["from spec_jax.core import masks\nmasks.causal"]) == []


@pytest.mark.slow
@each_notebook
def test_runs_from_an_empty_folder(path, tmp_path, monkeypatch):
    import nbclient
    import nbformat

    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    # The kernel is a process of its own that starts elsewhere.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    client = nbclient.NotebookClient(
        book,
        timeout=1800,  # seconds per cell; a busy machine is not a fault
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute()
    counts = [c.execution_count for c in book.cells if c.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not list(tmp_path.iterdir()), "the notebook left files behind"

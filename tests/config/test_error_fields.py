"""Whatever a sentence calls a field of a recipe is one."""

import ast
import dataclasses
import importlib
import pathlib
import re
import typing

import pytest

from spec_jax.config import schema
from spec_jax.export import registry
from spec_jax.objectives.records import ObjectiveOptions
from spec_jax.parallel.mesh import MeshOptions

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("spec_jax/**/*.py"), *ROOT.glob("experiments/*.py")])
# Arguments of the library that no recipe has: who meets these wrote the call.
CALLERS = {"capture.buckets", "drafter.terms", "serve.ladder"}
HOLE = "{}"  # where a sentence shows a value

# Sections a recipe leaves to a higher floor, and what they may hold.
OPTIONS = {
    "objective": (ObjectiveOptions,),
    "mesh": (MeshOptions,),
    "drafter.options": tuple(
        importlib.import_module(f"spec_jax.drafters.{name}").Options
        for name in (*registry.FORMS, "lookup")
    ),
}


def fields_of(cls, path=""):
    """Every field's path, sections included; `.{}` where names are the user's own."""
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name, kind = f"{path}{field.name}", hints[field.name]
        yield name
        if kind == schema.Pairs and name not in OPTIONS:
            yield f"{name}.{HOLE}"
        if dataclasses.is_dataclass(kind):
            yield from fields_of(kind, f"{name}.")


@pytest.fixture(scope="module")
def known():
    found = {n for cls in schema.SCHEMAS.values() for n in fields_of(cls)}
    for path, classes in OPTIONS.items():
        found |= {n for cls in classes for n in fields_of(cls, f"{path}.")}
    return found


def text_of(node):
    """The constant text of an expression, values left as holes."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return HOLE


def sentences(path, classes=("UserError", "TrainingStopped")):
    for node in ast.walk(ast.parse(path.read_text())):
        called = getattr(node, "func", None)
        if getattr(called, "id", "") in classes and node.args:
            yield node.lineno, text_of(node.args[0])


def unknown_in(sentence, known):
    """Names in a sentence that begin as a section does and are no field."""
    sections = {name.split(".")[0] for name in known if "." in name}
    pattern = rf"(?<![\w.])(?:{'|'.join(sorted(sections))})(?:\.[a-z]\w*|\.{{}}\w*)+"
    for match in re.finditer(pattern, sentence):
        name = match[0]
        if name in known:
            continue
        shape = re.escape(name).replace(re.escape(HOLE), r"\w+")
        if sentence[match.end() :].startswith(HOLE):
            shape += r"\w+"
        if not any(re.fullmatch(shape, field) for field in known):
            yield name


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_fields_in_sentences_are_fields_of_a_recipe(path, known):
    wrong = [
        f"line {line}: {name}"
        for line, sentence in sentences(path)
        for name in unknown_in(sentence, known | CALLERS)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("train.lr={} must be above 0", []),
        ("train.rate={} must be above 0", ["train.rate"]),
        ("train.{}={} must be 1", []),
        ("serve.tree_{}={} must be 1", []),
        ("serve.branch_{}={} must be 1", ["serve.branch_"]),
        ("drafter.options.mask_id={} is none", []),
        ("drafter.mask_id={} is none", ["drafter.mask_id"]),
        ("drafter.options.{}={} must be 1", []),
        ("objective.ce={}; lower optimiser.lr", []),
        ("target.tiny.heads={}", ["target.tiny.heads"]),
        ("folder 'a.data.npy' is not there", []),
    ],
)
def test_the_reader_of_sentences(sentence, wrong, known):
    assert list(unknown_in(sentence, known)) == wrong

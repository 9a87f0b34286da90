"""Streaming to a terminal: marks, text, summary, and what is refused."""

import io
import re

import pytest

from configs import generate as recipe
from experiments import generate, run, serving, session
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.decode.request import Generation, Settings
from tests.support import served, tiny

GREEN = "\x1b[32m"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def config(**changes) -> schema.Generate:
    made = recipe.get_config()
    made.update({"prompt": "w6 w7", **changes})
    return loading.to_recipe(made)


def pieces(text):
    """[(text, green?)] of an ANSI stream; every style must be ended."""
    parts, style = [], ""
    for part in re.split(r"(\x1b\[\d*m)", text):
        if part.startswith("\x1b"):
            style = "" if part == "\x1b[0m" else part
        elif part:
            parts.append((part, style == GREEN))
    assert style == ""
    return parts


@pytest.fixture
def target(monkeypatch, request):
    """The tiny target, behind `load_serving_target`."""
    made = served.make_target()
    params = serving.serving_params(made.params)
    monkeypatch.setattr(serving, "load_serving_target", lambda section: (made, params))
    monkeypatch.setattr(session, "prepare_jax", lambda precision: None)
    return made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exactly_the_accepted_drafts_are_green(temperature):
    engine, tokenizer = tiny.engine("bigram"), served.make_tokenizer()
    out = io.StringIO()
    settings = Settings(max_new_tokens=24, temperature=temperature, ignore_eos=True)
    painter = generate.Painter(out, "always")
    made = generate.stream(engine, tokenizer, [6, 7, 8], settings, painter)
    expected, at = [(made.tokens[0], False)], 1
    for emitted, accepted in zip(made.emitted, made.accepted, strict=True):
        for place in range(emitted):
            expected.append((made.tokens[at + place], place < accepted))
        at += emitted
    assert at == len(made.tokens) == 24
    greens = sum(green for _, green in expected)
    assert 0 < greens < 23  # both kinds were seen
    legend, body = out.getvalue().split("\n\n", 1)
    assert pieces(legend) == [
        ("accepted drafts", True),
        (" and tokens the target chose", False),
    ]
    shown = [
        (word, green)
        for text, green in pieces(body[: body.index("\n")])
        for word in text.split()
    ]
    words = [(served.WORDS[t], g) for t, g in expected if t not in (1, 2)]
    assert shown == words


def test_no_escape_leaves_a_pipe_and_a_terminal_may_refuse(monkeypatch):
    engine, tokenizer = tiny.engine("bigram"), served.make_tokenizer()
    settings = Settings(max_new_tokens=8, ignore_eos=True)
    texts = {}
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, stream, colour in (
        ("pipe", io.StringIO(), "auto"),
        ("never", Terminal(), "never"),
        ("terminal", Terminal(), "auto"),
    ):
        painter = generate.Painter(stream, colour)
        made = generate.stream(engine, tokenizer, [9], settings, painter)
        texts[name] = stream.getvalue()
        whole = tokenizer.decode(made.tokens, skip_special=True)
        if name != "terminal":
            assert "\x1b" not in texts[name]
            assert texts[name].startswith(whole + "\n[8 tokens, ")
    assert GREEN in texts["terminal"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert not generate.Painter(Terminal()).coloured


def test_an_interrupted_stream_leaves_the_terminal_plain():
    engine, out = tiny.engine("bigram"), io.StringIO()
    painter = generate.Painter(out, "always")

    class Stop(served.make_tokenizer().__class__):
        def decode(self, ids, skip_special=False):
            painter.write("x", GREEN)
            raise KeyboardInterrupt

    stopping = Stop(**served.make_tokenizer().__dict__)
    settings = Settings(max_new_tokens=4, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        generate.stream(engine, stopping, [9], settings, painter)
    assert out.getvalue().endswith("\x1b[0m")
    engine.run()  # the shared engine is left idle


def test_a_text_that_broke_off_is_an_error(target, monkeypatch, capsys):
    """The text and its summary are there; then the command says so and fails."""
    for reason in ("stop", "length"):
        generate.check_whole(Generation([1], [5, 6], reason), schema.Target())
    broken = Generation([1], [5, 6], "error")
    assert "not finite" in generate.summary(broken, 0.0, True)
    with pytest.raises(UserError, match=r"target\.source='t' .* after 2 tokens"):
        generate.check_whole(broken, schema.Target(source="t"))
    monkeypatch.setattr(serving, "make_engine", lambda *a, **k: None)
    monkeypatch.setattr(generate, "stream", lambda *a: broken)
    words = ["--config.prompt=w6", "--config.serve.prefill_buckets=(16,)"]
    assert run.main(["configs/generate.py", *words]) == 2
    assert "logits that are not finite after 2 tokens" in capsys.readouterr().err


def test_the_summary_counts_what_rounds_emitted():
    made = Generation([1], [5, 6, 7, 8, 9], "stop", emitted=[3, 1], accepted=[2, 0])
    assert generate.summary(made, 2.0, True) == (
        "[5 tokens, 2 rounds, accept length 2.00, 2.0 tokens/s, the target ended it]"
    )
    plain = generate.summary(made, 2.0, False)
    assert "accept length" not in plain
    one = Generation([1], [5], "length")
    assert generate.summary(one, 0.0, True) == (
        "[1 token, 0 rounds, max_new_tokens reached]"
    )


def test_the_command_decodes_with_an_exported_folder(target, tmp_path, capsys):
    folder = served.export_drafter(tmp_path / "drafter", target)
    words = [
        "configs/generate.py",
        "--config.prompt=w6 w7 w8",
        "--config.serve.max_new_tokens=12",
        "--config.serve.max_context=64",
        "--config.serve.prefill_buckets=(16,)",
    ]
    assert run.main([*words, f"--config.drafter={folder}"]) == 0
    speculative = capsys.readouterr().out
    assert run.main([*words, "--config.drafter="]) == 0
    plain = capsys.readouterr().out
    text, summary = speculative.splitlines()
    assert re.fullmatch(
        r"\[12 tokens, \d+ rounds, accept length \d\.\d\d, [\d.]+ tokens/s, "
        r"max_new_tokens reached\]",
        summary,
    )
    # Lossless, and the plain run proposes nothing.
    assert plain.splitlines()[0] == text and "11 rounds" in plain
    assert "accept length" not in plain


def test_a_chat_prompt_holds_the_system_turn_and_a_raw_one_does_not(target):
    chat = generate.encode_prompt(config(system="w8"), target)
    assert chat == [1, 5, 8, 2, 1, 3, 6, 7, 2, 1, 4]
    assert generate.encode_prompt(config(raw=True), target) == [6, 7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"drafter": "/nowhere/at/all"}, ["/nowhere/at/all", "is not there"]),
        ({"prompt": "w6 <end>"}, ["special token '<end>'", "remove it"]),
        ({"prompt": "w6 <end>", "raw": True}, ["prompt", "special token '<end>'"]),
        ({"prompt": "w6 <mask>", "drafter": True}, ["mask token", "remove it"]),
        (
            {"prompt": "w6 <mask>", "drafter": True, "raw": True},
            ["mask token 22", "remove it"],
        ),
        ({"prompt": "w6 " * 40}, ["prompt has", "more than the 62", "shorten"]),
        ({"system": "w8", "raw": True}, ["system='w8'", "raw=False"]),
        ({"thinking": True}, ["thinking=True", "no thinking switch"]),
        ({"drafter": True, "serve.num_draft": 5}, ["serve.num_draft=5", "trained for"]),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_compiles(
    target, tmp_path, monkeypatch, changes, words
):
    monkeypatch.setattr(serving, "make_engine", lambda *a, **k: pytest.fail("compiled"))
    if changes.get("drafter") is True:
        changes = changes | {"drafter": served.export_drafter(tmp_path / "d", target)}
    made = recipe.get_config()
    made.prompt = "w6"
    made.serve.max_context, made.serve.max_new_tokens = 64, 30
    made.update_from_flattened_dict(changes)
    with pytest.raises(UserError) as caught:
        generate.main(loading.to_recipe(made), tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_an_empty_prompt_ends_with_code_two(target, capsys):
    assert run.main(["configs/generate.py", "--config.prompt= "]) == 2
    assert "prompt=' ' is empty" in capsys.readouterr().err

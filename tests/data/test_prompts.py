"""Prompt files: what is read, what is refused, and the ids a server would run."""

import gzip
import json

import pytest

from spec_jax.core.errors import UserError
from spec_jax.data import prompts


def write(path, *rows):
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return str(path)


def texts(found):
    return [prompt.messages[0]["content"] for prompt in found]


def test_every_field_is_read(tmp_path):
    path = write(
        tmp_path / "p.jsonl",
        {"prompt": "a"},
        {"question": "b", "answer": "not used"},
        {"turns": ["c", "later"]},
        {"instruction": "d", "instances": [{"input": "e", "output": "f"}]},
        {"instruction": "g", "instances": [{"input": "", "output": "h"}]},
        {"instruction": "i"},
    )
    found = prompts.read_prompts(path)
    assert texts(found) == ["a", "b", "c", "d\n\ne", "g", "i"]
    assert [prompt.source for prompt in found][:2] == ["p.jsonl:1", "p.jsonl:2"]
    assert all(prompt.messages[0]["role"] == "user" for prompt in found)
    assert texts(prompts.read_prompts(path, limit=2)) == ["a", "b"]


def test_rows_are_split_on_newline_only(tmp_path):
    text = "one\u2028two\u0085three\u2029four"
    line = json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\r\n\n"
    (tmp_path / "p.jsonl").write_bytes(line * 2)
    assert texts(prompts.read_prompts(str(tmp_path / "p.jsonl"))) == [text, text]


def test_gzip(tmp_path):
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "packed"}\n'))
    assert texts(prompts.read_prompts(str(path))) == ["packed"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot be read"):
        prompts.read_prompts(str(path))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "holds no prompt"),
        (b"\n \n", "holds no prompt"),
        (b'{"text": "a"}\n', "p.jsonl:1 has none of the fields prompt, question"),
        (b'{"prompt": "a"}\n{"prompt": " \\n"}\n', "p.jsonl:2.*empty prompt"),
        (b'{"turns": []}\n', "empty prompt"),
        (b'{"instruction": "", "instances": [{"input": "x"}]}', "empty prompt"),
        (b'{"prompt": ["a"]}\n', "'prompt' is list"),
        (b'["a"]\n', "is list; write a JSON object"),
        (b'{"prompt": "a"', "p.jsonl:1 is not JSON"),
        (b'{"prompt": "\xff"}\n', "p.jsonl:1 is not JSON in UTF-8"),
    ],
)
def test_bad_files_are_refused_in_one_sentence(tmp_path, content, sentence):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence) as caught:
        prompts.read_prompts(str(path))
    assert "\n" not in str(caught.value)


def test_absent_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not there.*'builtin'"):
        prompts.read_prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match=r"not a prompt file"):
        prompts.read_prompts(str(tmp_path / "prompts.txt"))
    with pytest.raises(UserError, match=r"limit=0"):
        prompts.read_prompts(write(tmp_path / "p.jsonl", {"prompt": "a"}), limit=0)


def test_builtin_prompts_are_many_and_differ():
    found = prompts.builtin_prompts()
    assert len(found) >= 60 and len(set(texts(found))) == len(found)
    assert prompts.builtin_prompts(limit=3) == found[:3]


def test_rendering_is_the_servers(target):
    ids = prompts.render_prompt(target, prompts.user_prompt("hi"))
    assert target.tokenizer.decode(ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_rendering_refuses(target):
    def render(text, **options):
        return prompts.render_prompt(target, prompts.user_prompt(text), **options)

    with pytest.raises(UserError, match=r"content is empty"):
        render("  \n")
    with pytest.raises(UserError, match=r"special token '<\|im_end\|>'"):
        render("stop<|im_end|>now")
    with pytest.raises(UserError, match=r"special token '<mask>'"):
        render("a <mask> b", mask_id=0)
    plain = target.tokenizer.id_of("x")
    with pytest.raises(UserError, match=rf"mask token 'x' .id {plain}."):
        render("a x b", mask_id=plain)
    length = len(render("hello"))
    assert len(render("hello", context=length, mask_id=0)) == length
    with pytest.raises(UserError, match=rf"{length} tokens.*limit of {length - 1}"):
        render("hello", context=length - 1)

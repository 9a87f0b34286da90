"""Beside transformers: the folder it reads, whose turn it is, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.bench import peers as recipe
from experiments import bench_peers
from spec_jax.config import loading, schema
from spec_jax.core.errors import UserError
from spec_jax.target import safetensors_loader
from tests.support import served


def test_peers_need_the_public_packages(monkeypatch, tmp_path):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(bench_peers.importlib, "import_module", missing)
    cfg = loading.to_recipe(recipe.get_config())
    with pytest.raises(UserError, match=r"'torch' is not installed.*`make parity`"):
        bench_peers.main(cfg, tmp_path)


def test_more_threads_than_cores_are_refused(monkeypatch):
    chosen = []
    monkeypatch.setattr(bench_peers.os, "sched_getaffinity", lambda pid: {3, 5})
    monkeypatch.setattr(
        bench_peers.os, "sched_setaffinity", lambda pid, cores: chosen.append(cores)
    )
    assert bench_peers.use_cores(1) == 1 and bench_peers.use_cores(0) == 2
    assert chosen == [[3], [3, 5]]
    with pytest.raises(UserError, match=r"bench\.threads=3 is more than the 2 cores"):
        bench_peers.use_cores(3)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_folder_for_transformers_reads_back(tmp_path, qk_norm):
    target = served.make_target(qk_norm=qk_norm)
    bench_peers.write_hf_folder(tmp_path, target)
    back = safetensors_loader.load_safetensors_folder(str(tmp_path))
    sizes = dataclasses.replace(target.spec, name=back.spec.name)
    assert back.spec == sizes
    jax.tree.map(np.testing.assert_array_equal, back.params, target.params)


def test_peers_alternate_and_medians_are_compared(monkeypatch):
    clock, order = [0.0], []

    def decoder(name, seconds, wrong_after):
        def decode(ids, new):
            order.append((name, ids[0]))
            clock[0] += seconds * ids[0]
            return [1] * wrong_after + [hash(name) % 1000] * (new - wrong_after)

        return decode

    monkeypatch.setattr(bench_peers.time, "perf_counter", lambda: clock[0])
    ours, theirs = decoder("ours", 1.0, 3), decoder("theirs", 2.0, 3)
    asked = [[1], [2], [3]]
    found = bench_peers.compare(ours, theirs, asked, 4, warmup=1, repeats=2)
    assert order[:2] == [("ours", 1), ("theirs", 1)]  # the warm-up
    first = [name for name, _ in order[2::2]]
    assert first == ["ours", "theirs"] * 3
    assert [ids for _, ids in order[2::2]] == [1, 2, 3] * 2
    assert found["plain_tokens_per_s"] == 4 / 2
    assert found["plain_over_transformers"] == 2.0
    assert found["equal_outputs"] == 0.0
    assert found["equal_tokens_before_first_difference"] == 3.0
    short = decoder("short", 1.0, 3)
    with pytest.raises(ValueError, match="theirs made 3 tokens where 4 were asked"):
        bench_peers.compare(
            ours, lambda ids, new: short(ids, new)[:3], asked, 4, warmup=0, repeats=1
        )


def test_peer_prompts_come_from_the_named_sets(tmp_path):
    target = served.make_target()
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "w6 w7"}\n{"prompt": "w8"}\n')
    bench = schema.Bench(prompt_sets=(("a", str(file)), ("b", "")), max_prompts=1)
    assert bench_peers.read_prompts(bench, target, 20) == [[1, 3, 6, 7, 2, 1, 4]]
    with pytest.raises(UserError, match="more than the limit of 5"):
        bench_peers.read_prompts(bench, target, 5)
    with pytest.raises(UserError, match="names no file"):
        bench_peers.read_prompts(schema.Bench(prompt_sets=(("a", ""),)), target, 20)

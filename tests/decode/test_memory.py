"""What an engine will take of its device, known and checked before it serves."""

import jax
import numpy as np
import pytest

from spec_jax.core.errors import UserError
from spec_jax.decode import memory
from tests.support import tiny


def test_the_plan_covers_every_program():
    engine = tiny.engine("bigram", 3, slots=3, buckets=(7, 64))
    plan, state = engine.memory, jax.tree.leaves(engine.state)
    assert plan.state_bytes == sum(np.asarray(x).nbytes for x in state)
    weights = jax.tree.leaves(engine.weights)
    assert plan.weights_bytes == sum(np.asarray(x).nbytes for x in weights)
    largest = 0
    for name, program in engine._programs.items():
        found = program.memory_analysis()
        chunk = 4096 if isinstance(name, int) else 64  # what a call brings along
        peak = (
            found.argument_size_in_bytes
            + found.temp_size_in_bytes
            + found.output_size_in_bytes
            - found.alias_size_in_bytes
        )
        assert peak <= plan.total_bytes + chunk, name
        largest = max(largest, found.temp_size_in_bytes)
    assert plan.program_bytes >= largest > 0
    told = engine.metrics()["memory"]
    assert (
        told["total_bytes"]
        == plan.total_bytes
        == sum(told[name] for name in ("weights_bytes", "state_bytes", "program_bytes"))
    )


def test_what_does_not_fit_is_refused(monkeypatch):
    world = tiny.world(None)
    fits = tiny.new_engine(world, slots=2).memory.total_bytes

    def limited(limit):
        monkeypatch.setattr(memory, "limit_of", lambda device: limit)
        return tiny.new_engine(world, slots=2)

    assert limited(fits).memory.limit_bytes == fits
    with pytest.raises(UserError) as refused:
        limited(fits - 1)
    sentence = str(refused.value)
    assert sentence.startswith("serve.slots=2 with serve.max_context=128 needs ")
    assert "the device has" in sentence and sentence.endswith("lower one of them")


class Program:
    """Of a backend that does not tell what a program takes."""

    def memory_analysis(self):
        return None


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_what_a_backend_does_not_tell_is_left_out():
    tree = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.int8)}
    plan = memory.plan_memory(tree, tree, {"x": Program()}, Device(None))
    assert plan == memory.MemoryPlan(53, 53, None, None)
    assert plan.total_bytes == 106 and plan.as_metrics()["program_bytes"] is None
    memory.check_memory(plan, 1, 8)
    plan = memory.plan_memory(tree, tree, {}, Device({"bytes_limit": 100}))
    with pytest.raises(UserError, match=r"serve\.slots=1 .*programs unknown"):
        memory.check_memory(plan, 1, 8)
    assert memory.limit_of(Device({"bytes_in_use": 3})) is None

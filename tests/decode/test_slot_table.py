"""A slot is free, filling or running, whatever happens to its requests."""

import random

from spec_jax.decode.jobs import Job
from spec_jax.decode.request import Generation, Settings
from spec_jax.decode.slot_table import SlotTable

SLOTS = 3


def job(handle: int) -> Job:
    return Job(handle, Generation(prompt=[1]), Settings(), None, False)


def held(table: SlotTable) -> list[int]:
    filling = [] if table.filling is None else [table.filling_slot]
    return sorted([*table.free, *filling, *table.running])


def test_no_slot_is_lost_or_given_twice():
    rng, table = random.Random(0), SlotTable.of(SLOTS)
    waiting: set[int] = set()
    for handle in range(400):
        table.queue.append(job(handle))
        waiting.add(handle)
        for _ in range(rng.randrange(4)):
            match rng.choice(["fill", "filled", "end", "pull", "again"]):
                case "fill":
                    table.next_to_fill()
                case "filled" if table.filling is not None:
                    slot, begun = table.filled()
                    assert table.running[slot] is begun
                case "end" if table.running:
                    slot = rng.choice(list(table.running))
                    waiting.remove(table.running[slot].handle)
                    table.end(slot)
                case "pull" if waiting:
                    gone = rng.choice(sorted(waiting))
                    assert table.pull(gone).handle == gone
                    assert table.pull(gone) is None
                    waiting.remove(gone)
                case "again" if table.running:
                    slot, running = rng.choice(list(table.running.items()))
                    table.queue.appendleft(table.pull(running.handle))
                    assert slot in table.left and table.waits(running.handle)
            assert held(table) == list(range(SLOTS))
            assert {j.handle for j in table.jobs} == waiting
            assert table.waiting + len(table.running) == len(waiting)


def test_the_lowest_slot_is_filled_first_and_one_at_a_time():
    table = SlotTable.of(SLOTS)
    for handle in range(3):
        table.queue.append(job(handle))
    assert table.next_to_fill() is table.next_to_fill()
    assert table.filled()[0] == 0
    table.next_to_fill()
    assert table.filled()[0] == 1
    table.end(0)
    table.next_to_fill()
    assert table.filled()[0] == 0 and table.handles == {0: 2, 1: 1}
    assert table.next_to_fill() is None


def test_only_slots_the_device_knows_of_are_told_of():
    table = SlotTable.of(1)
    table.queue.extend([job(0), job(1)])
    table.next_to_fill()
    assert table.pull(1).handle == 1 and not table.left
    assert table.pull(0).handle == 0 and table.left == {0}

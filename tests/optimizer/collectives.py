"""What a compiled program sends between devices, read from its text."""

import re

BYTES = {"f64": 8, "s64": 8, "u64": 8, "f32": 4, "s32": 4, "u32": 4, "u8": 1, "pred": 1}
SENDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}
"""How often each number of the result is sent or received by a device."""


def collectives_of(program):
    """The number of collective operations, and of bytes that a device sends and receives."""
    found = re.findall(rf"= (.*?) ({'|'.join(SENDS)})(?:-start)?\(", program)
    return len(found), sum(SENDS[name] * _bytes(shapes) for shapes, name in found)


def _bytes(shapes):
    total = 0
    for dtype, lengths in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
        size = BYTES[dtype]
        for length in filter(None, lengths.split(",")):
            size *= int(length)
        total += size
    return total

"""Microcontrollers that the C export writes a whole project for: `c/cortex-m` has startup, linker scripts and Makefile."""

from __future__ import annotations

from dataclasses import dataclass

from lbq.errors import LbqError, nearest

TARGETS = ("cortex-m",)
STACK_BYTES = 8192
HEAP_BYTES = 4096
CODE_BYTES = 48 * 1024  # of runtime, startup and printf, at most


@dataclass(frozen=True)
class Board:
    """A board that `qemu-system-arm` emulates, and what it has for constants and for memory."""

    name: str
    flash_bytes: int
    ram_bytes: int

    def holds(self, constant_bytes: int, memory_bytes: int) -> bool:
        """constant_bytes: with the golden inputs and logits, which lie in flash too."""
        ram_bytes = memory_bytes + STACK_BYTES + HEAP_BYTES + 4096  # newlib's own variables
        return constant_bytes + CODE_BYTES <= self.flash_bytes and ram_bytes <= self.ram_bytes


BOARDS = Board("mps2-an386", 4 << 20, 4 << 20), Board("mps3-an547", 512 << 10, 512 << 10)

# What example.c does besides on a board, at its marks.
IN_THE_EXAMPLE = {
    "headers": '#include "board.h"\n',
    "before": "        board_start();\n",
    "after": '        printf("%llu emulated instructions, ", (unsigned long long)board_instructions());\n',
    "end": '    printf("%u bytes of the stack were used\\n", (unsigned)board_stack_used());\n',
}


def check_target(target: str | None, format: str) -> None:
    """Refuse a target that is not known, or that a format has no project for."""
    if target is None:
        return
    if target not in TARGETS:
        raise LbqError(f"--target {target!r} is not known{nearest(target, TARGETS)}")
    if format not in ("c", "c-step"):
        raise LbqError(f"--target {target} is for --format c and c-step, not {format}")


def fitting_boards(constant_bytes: int, memory_bytes: int) -> list[str]:
    """The boards that hold a network; where there is none, say why."""
    names = [board.name for board in BOARDS if board.holds(constant_bytes, memory_bytes)]
    if not names:
        raise LbqError(
            f"--target cortex-m: constants and golden inputs of {constant_bytes:,} bytes and memory of {memory_bytes:,} bytes "
            f"do not fit {BOARDS[0].name}, which has {BOARDS[0].flash_bytes:,} bytes for each: give a smaller network"
        )
    return names


def values() -> dict[str, object]:
    """What the templates of the project leave open."""
    sizes: dict[str, object] = {"stack_bytes": STACK_BYTES, "heap_bytes": HEAP_BYTES}
    for board in BOARDS:
        short = board.name.partition("-")[2]
        sizes |= {f"flash_{short}": board.flash_bytes, f"ram_{short}": board.ram_bytes}
    return sizes

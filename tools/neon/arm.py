"""An emulated ARM64 processor that runs functions of linked images on memory shared with this process."""

from __future__ import annotations

import ctypes as c
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile
from table import FORMS, KernelTable, Room, Table
from unicorn import UC_ARCH_ARM64, UC_MODE_ARM, UC_PROT_ALL, Uc, UcError
from unicorn import arm64_const as reg

PAGE = 1 << 16
BACK, STACK, STACK_SIZE = 0x10000, 0x20000, 1 << 20  # where calls return to; below where images lie
REGISTERS = [getattr(reg, f"UC_ARM64_REG_X{i}") for i in range(8)]
VECTORS = [getattr(reg, f"UC_ARM64_REG_V{i}") for i in range(8)]
FLOATING_POINT = 3 << 20  # of CPACR_EL1: no traps
SEGMENT, SYMBOLS = 0x19, 0x2  # LC_SEGMENT_64 and LC_SYMTAB


@dataclass
class Image:
    """What is to lie where, and where its symbols are."""

    parts: list[tuple[int, int, bytes]]  # address, size, the bytes it begins with
    symbols: dict[str, int]


def elf_image(path: Path) -> Image:
    """A static image for Linux."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        if elf.get_section_by_name(".dynamic"):
            raise SystemExit(f"{path.name}: found an image to be linked when loaded, expected a static one.")
        loaded = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
        parts = [(s["p_vaddr"], s["p_memsz"], s.data()) for s in loaded]
        names = elf.get_section_by_name(".symtab")
        return Image(parts, {symbol.name: symbol["st_value"] for symbol in names.iter_symbols()})


def mach_commands(data: bytes) -> Iterator[tuple[int, int]]:
    """Kind and place of every load command."""
    place = 32
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        kind, size = struct.unpack_from("<II", data, place)
        yield kind, place
        place += size


def mach_image(path: Path) -> Image:
    """An image for macOS, to be loaded where it was linked for; names lose their underscore."""
    data = path.read_bytes()
    image = Image([], {})
    for kind, place in mach_commands(data):
        if kind == SEGMENT:
            address, size, start, stored = struct.unpack_from("<4Q", data, place + 24)
            if stored:
                image.parts.append((address, size, data[start : start + min(size, stored)]))
        elif kind == SYMBOLS:
            table, count, strings, _ = struct.unpack_from("<4I", data, place + 8)
            for i in range(count):
                name, _, _, _, value = struct.unpack_from("<IBBHQ", data, table + 16 * i)
                end = data.index(b"\0", strings + name)
                image.symbols[data[strings + name : end].decode().removeprefix("_")] = value
    return image


class Processor:
    """Calls follow the procedure call standard of ARM64: eight registers of either kind, then the stack."""

    def __init__(self, room: Room) -> None:
        self.uc = uc = Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        uc.ctl_set_cpu_model(reg.UC_CPU_ARM64_MAX)  # macOS is built for more than the first of these processors
        uc.mem_map(BACK, PAGE)
        uc.mem_map(STACK, STACK_SIZE)
        uc.mem_map_ptr(room.address, room.size, UC_PROT_ALL, room.address)
        uc.reg_write(reg.UC_ARM64_REG_CPACR_EL1, FLOATING_POINT)

    def load(self, image: Image) -> None:
        first = min(address for address, _, _ in image.parts) // PAGE * PAGE
        last = -(-max(address + size for address, size, _ in image.parts) // PAGE) * PAGE
        self.uc.mem_map(first, last - first)
        for address, _, data in image.parts:
            self.uc.mem_write(address, data)

    def point(self, address: int, value: int) -> None:
        self.uc.mem_write(address, value.to_bytes(8, "little"))

    def call(self, address: int, kinds: tuple, arguments: list) -> int | float | None:
        """What the function at an address returns; kinds are those of its result and its arguments."""
        uc, whole, floats, stack = self.uc, 0, 0, []
        for kind, value in zip(kinds[1:], arguments, strict=True):
            if kind is c.c_float:
                uc.reg_write(VECTORS[floats], int.from_bytes(c.c_float(value), "little"))
                floats += 1
            elif whole < len(REGISTERS):
                uc.reg_write(REGISTERS[whole], value & (2**64 - 1))
                whole += 1
            else:
                stack.append(value & (2**64 - 1))
        top = STACK + STACK_SIZE - 16 - (8 * len(stack) + 15) // 16 * 16
        for i, value in enumerate(stack):
            self.point(top + 8 * i, value)
        uc.reg_write(reg.UC_ARM64_REG_SP, top)
        uc.reg_write(reg.UC_ARM64_REG_X30, BACK)
        try:
            uc.emu_start(address, BACK)
        except UcError as error:
            place = uc.reg_read(reg.UC_ARM64_REG_PC)
            raise SystemExit(f"emulator: found {error} at {place:#x}, expected the call to return.") from error
        return self.result(kinds[0])

    def result(self, kind: type | None) -> int | float | None:
        if kind is None:
            return None
        register = VECTORS[0] if kind is c.c_float else REGISTERS[0]
        low = self.uc.reg_read(register) & (256 ** c.sizeof(kind) - 1)
        return kind.from_buffer_copy(low.to_bytes(c.sizeof(kind), "little")).value

    def table(self, name: str, image: Image, form: int) -> Table:
        address = self.call(image.symbols["neon_table"], (c.c_uint64, c.c_int), [form])
        members = KernelTable.from_buffer_copy(self.uc.mem_read(address, c.sizeof(KernelTable)))
        return Table(name, members, self.call)


def neon_tables(linux: Path, macos: Path, room: Room) -> list[list[Table]]:
    """NEON's kernels as compiled for Linux and for macOS, which has no library of its own here.

    One table for each of FORMS, of either.
    """
    processor, images = Processor(room), [elf_image(linux), mach_image(macos)]
    for image in images:
        processor.load(image)
    for name in ("sinf", "cosf"):
        processor.point(images[1].symbols[f"{name}_at"], images[0].symbols[name])
    named = zip(("Linux", "macOS"), images, strict=True)
    return [[processor.table(name, image, form) for form in range(len(FORMS))] for name, image in named]

"""Compiles the library for ARM64, and tables to compare with for this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parent.parent / "plugins" / "cpu"
NATIVE = PLUGIN / "native"
LINUX, MACOS = "aarch64-linux-gnu", "aarch64-macos"
IMAGE_TARGETS = {LINUX: "aarch64-linux-musl", MACOS: MACOS}
STANDARD = "-std=gnu++20"  # as CMake has it
OPTIMISED = ("-O3", "-DNDEBUG")
SHARED = ("-fPIC", "-fvisibility=hidden")
PREFIX = {LINUX: "", MACOS: "_"}
LINKING = {
    LINUX: ("-static", "-Wl,--entry=neon_table", "-lm"),
    MACOS: ("-nostdlib", "-fno-builtin", "-Wl,-e,_neon_table"),
}


def warnings_and_arithmetic() -> list[str]:
    """The options that CMakeLists.txt compiles every source with."""
    text = (PLUGIN / "CMakeLists.txt").read_text()
    match = re.search(r"target_compile_options\(_native PRIVATE (-Wall[^)]*)\)", text)
    if match is None or "-ffp-contract=off" not in match[1]:
        raise SystemExit(
            "CMakeLists.txt: found no -ffp-contract=off, expected it in target_compile_options. Put it back."
        )
    return match[1].split()


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{name}: found no such package, expected it in this environment. Run make neon.")
    return Path(next(iter(spec.submodule_search_locations)))


def headers() -> list[str]:
    """Headers of others, in which nothing is warned of."""
    nanobind, python = package("nanobind"), Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise SystemExit(f"Python.h: found none in {python}, expected it there. Install Python's headers.")
    folders = (package("mlx") / "include", nanobind / "include", nanobind / "ext" / "robin_map" / "include", python)
    return [part for folder in folders for part in ("-isystem", str(folder))]


def run(command: list[str], what: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    if done.returncode:
        raise SystemExit(f"{what}: found\n{done.stdout}{done.stderr}expected no error and no warning. Mend the source.")


@dataclass
class Build:
    """Objects and images in a folder of the environment, and what the cross-compiler has compiled."""

    folder: Path = field(default_factory=lambda: Path(sys.prefix) / "build")

    def zig(self, command: str, target: str, arguments: list[str], what: str) -> None:
        cache = str(self.folder / "cache")
        environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
        run(
            [sys.executable, "-m", "ziglang", command, "-target", target, *arguments],
            f"{what} for {target}",
            environment,
        )

    def objects(self, target: str) -> int:
        """Compiles every source for a target; a warning is an error. How many there are."""
        (self.folder / target).mkdir(parents=True, exist_ok=True)
        sources = sorted(NATIVE.glob("*.cpp"))
        options = [STANDARD, *OPTIMISED, *SHARED, *warnings_and_arithmetic(), "-Werror", "-DNB_DOMAIN=mlx", *headers()]
        for source in sources:
            made = self.folder / target / f"{source.stem}.o"
            self.zig("c++", target, [*options, "-c", str(source), "-o", str(made)], source.name)
        return len(sources)

    def image(self, target: str) -> Path:
        """NEON's kernels with the little that they need, to be loaded as it is."""
        made = self.folder / f"neon-{target}"
        inputs = [str(HERE / "support.c"), str(self.folder / target / "kernels_neon.o")]
        options = ["-O2", f'-DPREFIX="{PREFIX[target]}"', *inputs, *LINKING[target], "-o", str(made)]
        self.zig("cc", IMAGE_TARGETS[target], options, "image")
        return made

    def host(self) -> Path:
        """The tables to compare with, compiled by this machine's compiler."""
        named = os.environ.get("CXX", "").split()
        compiler = named or [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
        if not compiler:
            raise SystemExit("compiler: found none, expected c++, g++ or clang++. Install one or name it in CXX.")
        made = self.folder / "tables.so"
        sources = [str(HERE / "fused.cpp"), str(NATIVE / "kernels_portable.cpp")]
        options = [STANDARD, "-O2", *warnings_and_arithmetic(), "-fPIC", "-shared", f"-I{NATIVE}"]
        run([*compiler, *options, *sources, "-o", str(made)], "tables")
        return made

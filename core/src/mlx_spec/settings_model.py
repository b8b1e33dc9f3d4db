"""The settings themselves, as a pydantic model. Imported on first use: pydantic is slow to load."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, AliasGenerator, BeforeValidator, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from .settings import default_cache_dir, plugin_names, split_names, variables

LogLevel = Literal["debug", "info", "warning", "error"]
Activations = Literal["full", "int16", "int8"]
Names = Annotated[tuple[str, ...], NoDecode]


def _plain(value: object) -> object:
    """Decimal digits alone: what int() reads beyond them, like 1_0, is a slip."""
    if isinstance(value, str) and not re.fullmatch(r"\s*[+-]?[0-9]{1,40}\s*", value):
        raise ValueError("a whole number")
    return value


Whole = Annotated[int, BeforeValidator(_plain)]


def _aliases(field: str) -> AliasChoices:
    """The field's environment variables, the one that wins first."""
    return AliasChoices(*variables(field))


class Settings(BaseSettings):
    """Everything the environment can decide; an explicit flag or argument wins over each of these."""

    model_config = SettingsConfigDict(
        alias_generator=AliasGenerator(validation_alias=_aliases),
        case_sensitive=True,
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
    )

    plugins: Names | None = Field(None, description="load only these plugins, comma-separated")
    trace: Names = Field((), description='"hooks" logs every hook call')
    log_level: LogLevel = Field("warning", description='"debug" also shows tracebacks')
    cache_dir: Path = Field(default_factory=default_cache_dir, description="probe memos and learned costs")

    draft_kind: str | None = Field(None, description="drafter kind to use")
    draft_block_size: Whole | None = Field(None, ge=0, le=64, description="L, verified rows per round, anchor counted")
    draft_model: str | None = Field(None, description="drafter directory or repository")

    probe: bool = Field(True, description="run the exactness probe before speculating")
    allow_inexact: bool = Field(False, description="speculate although the probe declined")
    governor: bool = Field(True, description="choose the width per round by measured gain")
    quantize_drafter: bool = Field(True, description="pack unquantised matrices of Qwen drafters to 4 bits on load")
    prefill_step: Whole = Field(2048, ge=1, description="prompt tokens per prefill chunk")
    dflash_per_row_accepts: bool = Field(
        True, description="off: rows drafted together by dflash all keep the fewest accepted drafts"
    )

    kernels: Names | None = Field(None, description="off leaves all to mlx; op names use only these kernels")
    threads: Whole | None = Field(None, ge=1, description="threads of CPU kernels; default: all usable cores")
    activations: Activations = Field(
        "full", description='"int16", "int8": CPU kernels round activations before 4- and 8-bit weights; faster blocks'
    )

    draft_profile: bool = Field(False, description="time every phase of a round by itself, and print it")
    gap_log: bool = Field(False, description="top-2 gap of every verified row")
    print_token_ids: bool = Field(False, description="token ids beside the text")

    @field_validator("plugins", mode="before")
    @classmethod
    def _plugin_names(cls, value: object) -> object:
        return plugin_names(value) if isinstance(value, str) else value

    @field_validator("trace", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_names(value) if isinstance(value, str) else value

    @field_validator("kernels", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        if not isinstance(value, str | int):  # 0 and 1 arrive decoded
            return value
        names = split_names(str(value).lower())
        switches: dict[tuple[str, ...], tuple[str, ...] | None] = {
            ("on",): None,
            ("1",): None,
            ("off",): (),
            ("0",): (),
        }
        return switches.get(names, names)

    @field_validator("trace")
    @classmethod
    def _known_trace(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name != "hooks"]
        if unknown:
            raise ValueError('"hooks", the only thing that can be traced')
        return value

    @field_validator("log_level", "activations", mode="before")
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @field_validator("cache_dir")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        try:
            return value.expanduser()
        except RuntimeError as error:
            raise ValueError("a folder below a home directory that exists") from error

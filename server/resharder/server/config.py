"""Options of the daemon: flags, then the environment (RESHARDERD_*), then a YAML file, then the defaults here."""

import os
import shlex
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource
from resharder.server.infra.addresses import is_loopback, parse_listen
from resharder.server.security.settings import Security
from yaml import YAMLError

_FILE_ONLY = ("security", "checks")
DEFAULT_STORE = Path(f"/dev/shm/resharder-{os.getuid()}")


class ConfigError(Exception):
    """An option of the daemon cannot be used. The message is one line and begins with the option's name."""


class Config(BaseSettings):
    """Options of the daemon, validated by pydantic. `load` combines flags, environment and file."""

    model_config = SettingsConfigDict(env_prefix="RESHARDERD_", extra="forbid")

    listen: str = Field("127.0.0.1:7677", description="host:port")
    security: Security | None = Field(None, description="certificates, tokens, and the roles of callers (file only)")
    insecure: bool = Field(False, description="whether to listen beyond the loopback without security")
    caller_rate: float = Field(1000.0, ge=0, description="calls per second of one caller; 0: no bound")
    caller_calls: int = Field(1024, ge=1, description="open calls of one caller that wait or transfer data")
    web_listen: str = Field("127.0.0.1:7678", description="host:port of the status page, metrics and probes; empty: none")
    data_listen: str = Field("", description="host:port at which other hosts read and write versions by HTTP; empty: none")
    data_address: str = Field("", description="host:port at which they reach it, if it is another one, as behind a port mapping")
    store: Path = Field(DEFAULT_STORE, description="folder of the versions, in shared memory or on disk")
    store_limit_bytes: int = Field(0, ge=0, description="bound on the bytes of versions; 0: 80 % of the free space")
    keep_count: int = Field(3, ge=1, description="READY versions kept of each model")
    keep_bytes: int = Field(0, ge=0, description="bytes of READY versions kept of each model; 0: no bound")
    replicas: int = Field(
        1,
        ge=1,
        le=16,
        description="holders, at READY, of each piece that ranks write on nodes; 2: READY waits for the daemon's copy; more: and "
        "for those of further nodes, of all pieces",
    )
    replica_seconds: float = Field(
        60.0, gt=0, description="time without a further piece on nodes after which a version that waits for replicas is aborted"
    )
    shared_memory: bool = Field(
        True, description="whether clients on this host may map the store; false: all data goes over the network"
    )
    lease_seconds: float = Field(15.0, gt=0, description="duration of the leases of ranks and servers")
    forget_seconds: float = Field(86400.0, gt=0, description="time after which a LOST server is forgotten")
    chunk_bytes: int = Field(1 << 20, ge=1 << 10, le=16 << 20, description="largest chunk")
    max_message_bytes: int = Field(96 << 20, ge=2 << 20, description="largest message; large models register with some 10 MiB")
    threads: int = Field(256, ge=8, description="control sides attached at once, and calls that wait; a model may hold half")
    transfers: int = Field(24, ge=4, description="uploads at once, downloads, and calls that compute; a model may hold half")
    digest_threads: int = Field(
        min(8, os.cpu_count() or 1), ge=1, description="threads that digest versions, for verification and for servers"
    )
    direct_staging_bytes: int = Field(1 << 30, ge=4 << 20, description="memory of each GPU that the direct path may use")
    direct_seconds: float = Field(10.0, gt=0, description="bound on one transfer of the direct path")
    drain_seconds: float = Field(30.0, ge=0, description="time for UPLOADING versions to finish after SIGTERM")
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep", description="treatment of requests during installs, in new fleets"
    )
    archive_url: str = Field("", description="folder or fsspec URL that versions are archived in; empty: none")
    archive_every: int = Field(0, ge=0, description="archive every n-th READY version of a model; 0: on command")
    archive_restore: bool = Field(True, description="at start, restore the newest archived version of models without a READY one")
    check_seconds: float = Field(600.0, gt=0, description="bound on a check")
    checks: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        {}, description="commands that canaries may wait for, by name (file only)"
    )
    log_format: Literal["console", "json"] = "console"
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("data_listen", "data_address")
    @classmethod
    def _tcp(cls, listen: str) -> str:
        if listen:
            parse_listen(listen)
        return listen

    @field_validator("listen", "web_listen")
    @classmethod
    def _parsed(cls, listen: str) -> str:
        if listen and not listen.startswith(("unix:", "unix-abstract:")):
            parse_listen(listen)
        return listen

    @field_validator("checks", mode="before")
    @classmethod
    def _split(cls, checks: object) -> object:
        """Split a command that is given as one line, as a shell does without expansions."""
        if isinstance(checks, dict):
            return {name: shlex.split(command) if isinstance(command, str) else command for name, command in checks.items()}
        return checks

    @model_validator(mode="after")
    def _protected(self) -> Self:
        open_ = [listen for listen in (self.listen, self.web_listen, self.data_listen) if listen and not is_loopback(listen)]
        if open_ and self.security is None and not self.insecure:
            raise ValueError(
                f"expected a loopback address without security, got {open_[0]}: every client could change and read "
                "every model. Set security, or insecure to trust that network"
            )
        return self


def load(file: Path | None, flags: dict[str, Any]) -> Config:
    """Load the options. Raises ConfigError."""
    if file is not None and not file.is_file():
        raise ConfigError(f"--config: expected a YAML file, there is none at {file}")

    class Loaded(Config):
        @classmethod
        def settings_customise_sources(
            cls, settings_cls: type[BaseSettings], *sources: PydanticBaseSettingsSource, **named: PydanticBaseSettingsSource
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            found = [named["init_settings"], named["env_settings"]]
            return (*found, YamlConfigSettingsSource(settings_cls, yaml_file=file)) if file else tuple(found)

    try:
        return Loaded(**flags)
    except ValidationError as error:
        options = [name for name in Config.model_fields if name not in _FILE_ONLY]
        raise ConfigError(problem_of(error, options)) from None
    except (OSError, YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config: expected options in YAML in {file}, got: {' '.join(str(error).split())}") from None


def problem_of(error: ValidationError, options: Collection[str]) -> str:
    """Return pydantic's errors as a line. `options` are the names of fields that are flags."""
    return "; ".join(_problem(dict(found), options) for found in error.errors())


def _problem(found: dict[str, Any], options: Collection[str]) -> str:
    place = ".".join(map(str, found["loc"]))
    option = f"--{place.replace('_', '-')}" if place in options else place
    message = found["msg"].removeprefix("Value error, ")
    if found["type"] == "extra_forbidden":
        return f"{option}: there is no such option"
    if found["type"] == "value_error":
        return f"{option}: {message}" if option else message
    return f"{option}: {message.replace('Input should be', 'expected')}, got {found['input']!r}"


def check_store(folder: Path) -> None:
    """Raise ConfigError unless the store can be a folder here that this process may write."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"--store: expected a folder, {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--store: expected a folder that this user may write, {existing} is not")


def why_not_bound(listen: str) -> str:
    """Return why an address cannot be bound, as the kernel explains it; empty if it can."""
    try:
        host, port = parse_listen(listen)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.bind((host, port))
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""

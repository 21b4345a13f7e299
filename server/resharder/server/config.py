"""Options of the daemon: flags, then the environment (RESHARDERD_*), then a YAML file, then the defaults here."""

import os
import shlex
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource
from resharder.server.infra.addresses import DerivedTcpAddress, TcpAddress, above, is_loopback, parse_listen
from resharder.server.options import OptionalPath, options
from resharder.server.security.settings import Security
from yaml import YAMLError

DEFAULT_STORE = Path(f"/dev/shm/resharder-{os.getuid()}")


class ConfigError(Exception):
    """An option of the daemon cannot be used. The message is one line and begins with the option's name."""


class Config(BaseSettings):
    """Options of the daemon, validated by pydantic. `load` combines flags, environment and file."""

    model_config = SettingsConfigDict(env_prefix="RESHARDERD_", extra="forbid")

    listen: str = Field(
        "127.0.0.1:7677",
        description="host:port of the gRPC port. Without `security` it must be a loopback address",
    )
    security: Security | None = Field(None, description="certificates, tokens and roles: [Security](security.md)")
    insecure: bool = Field(
        False,
        description="listen beyond the loopback interface without `security`. Every client that reaches the port may then make "
        "every call",
    )
    caller_rate: float = Field(
        1000.0,
        ge=0,
        description="calls per second that one caller may begin; 0: no bound. Bursts may have ten times as many; lease "
        "renewals are counted apart. Others are refused with `TOO_FAST`",
    )
    caller_calls: int = Field(
        1024,
        ge=1,
        description="open calls of one caller that wait or transfer data. Others are refused with `TOO_MANY_CALLS`",
    )
    web_listen: str = Field("127.0.0.1:7678", description="host:port of the status page, `/metrics` and the probes; empty: none")
    data_listen: DerivedTcpAddress = Field(
        None,
        description="host:port of the [data port](operator.md#beyond-one-host), by which other hosts read and write versions. By "
        "default on the host of `listen`; if its port is taken, on a free one. Empty: none, and no other host can read versions",
        json_schema_extra={"default": "port of `listen` + 2"},
    )
    data_address: TcpAddress = Field(
        "",
        description="host:port at which they reach it, if it is another one, as behind a port mapping. By default the host of "
        "their endpoint, or the one that `data_listen` names",
    )
    store: Path = Field(
        DEFAULT_STORE,
        description="folder of the versions. In shared memory it outlives every process, on disk the host too",
        json_schema_extra={"default": "`/dev/shm/resharder-UID`"},
        examples=["/dev/shm/resharder"],
    )
    take_over: bool = Field(
        False,
        description="[take over](standby.md) from the daemon that uses `store`, or that did before its host died: this one "
        "begins a higher term, and nobody believes the other one any more. It does not wait for a lease. For one start, by hand",
    )
    from_nodes: bool = Field(
        False,
        description="[take over](standby.md#without-the-folder) in an empty folder, with what nodes return of the registry in "
        "`lease_seconds` after the first of them. For one start, by hand",
    )
    registry_key: OptionalPath = Field(
        None,
        description="file with a random secret of 32 bytes or more, the same for all daemons of a registry. It seals what nodes "
        "keep of the registry, and `from_nodes` takes nothing else back",
    )
    lease_file: OptionalPath = Field(
        None,
        description="file on storage that several daemons share: the one that holds [the lease](standby.md) in it is the daemon, "
        "the others wait. Files beside it begin with its name",
    )
    kubernetes_lease: str = Field(
        "",
        pattern=r"^$|^[a-z0-9.-]+/[a-z0-9.-]+$",
        description="`NAMESPACE/NAME` of a Lease object of Kubernetes, in place of `lease_file`. Needs the extra `kubernetes`",
    )
    daemon_lease_seconds: float = Field(
        5.0,
        ge=0.5,
        description="duration of that lease, the same for all of them. A standby takes over once it was not renewed for as long",
    )
    store_limit_bytes: int = Field(
        0, ge=0, description="bound on the bytes of all versions; 0: 80 % of the space that is free at the start"
    )
    hold: Literal["all", "none"] = Field(
        "all",
        description="versions whose bytes the daemon's host holds: `all`, or `none`: [nodes](nodes.md#larger-than-a-host) alone "
        "hold them, and the daemon fetches what is read from it",
    )
    keep_count: int = Field(
        3,
        ge=1,
        description="READY versions retained of each model. Room for one more, at least three in all, is reserved when a "
        "publisher registers",
    )
    keep_bytes: int = Field(
        0,
        ge=0,
        description="bytes of READY versions retained of each model; 0: no bound. The newest and those in use always stay",
    )
    replicas: int = Field(
        1,
        ge=1,
        le=16,
        description="hosts that hold each piece of a version at READY, the daemon's and [nodes](nodes.md#replicas); 1 to 16. "
        "With 1, the daemon copies after READY what ranks write on nodes",
    )
    replica_seconds: float = Field(
        60.0,
        gt=0,
        description="time without a further piece after which a version that waits for its holders is ABORTED",
    )
    shared_memory: bool = Field(
        True, description="whether clients on this host may map the store. Otherwise all data goes over the network"
    )
    lease_seconds: float = Field(15.0, gt=0, description="duration of the leases of ranks and servers")
    forget_seconds: float = Field(
        86400.0, gt=0, description="time after which a LOST server is forgotten. `resharder forget` does so at once"
    )
    chunk_bytes: int = Field(
        1 << 20, ge=1 << 10, le=16 << 20, description="largest chunk that a publisher sends; 1 KiB to 16 MiB"
    )
    max_message_bytes: int = Field(
        96 << 20, ge=2 << 20, description="largest message; at least 2 MiB. A rank of a large model registers with some 10 MiB"
    )
    threads: int = Field(
        256,
        ge=8,
        description="attached control sides, and open calls of each waiting method; at least 8. One model may use half of "
        "them, the next model half of the rest, and so on; others are refused with `TOO_MANY_CALLS`",
    )
    transfers: int = Field(
        24,
        ge=4,
        description="concurrent uploads, and concurrent calls of each other heavy method; at least 4. Models share them in the "
        "same way. An upload takes up to 8 MiB of memory",
    )
    digest_threads: int = Field(
        min(16, os.cpu_count() or 1),
        ge=1,
        description="threads that compute digests",
        json_schema_extra={"default": "cores, at most 16"},
        examples=[8],
    )
    direct_staging_bytes: int = Field(
        1 << 30, ge=4 << 20, description="memory of each GPU that the direct path may use; at least 4 MiB"
    )
    direct_seconds: float = Field(
        10.0, gt=0, description="bound on the set-up of a group, and on one transfer, of the direct path"
    )
    direct_trusted_fabric: bool = Field(
        False,
        description="with `security`: nobody else is in the network between ranks and servers, which may use "
        "[NIXL](direct-path.md#nixl), and [links between hosts](direct-path.md#a-proven-link) without being asked to; "
        "their sockets authenticate nobody",
    )
    drain_seconds: float = Field(30.0, ge=0, description="time for uploads to finish after SIGTERM")
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep",
        description="`keep`, `wait` or `abort`: what installs do to requests in flight, in new fleets; those of adapters begin "
        "with `wait`. [vLLM servers](vllm.md) explains them",
    )
    archive_url: str = Field("", description="folder or bucket of the archive: `s3://`, `gs://`, `az://`, `file://`; empty: none")
    follow: str = Field(
        "",
        description="folder or bucket of another daemon's archive, to bring its versions to [another region](regions.md). This "
        "daemon then takes none from trainers, and archives none",
    )
    archive_every: int = Field(0, ge=0, description="archive every n-th READY version of a model; 0: on command")
    archive_full_every: int = Field(
        16,
        ge=1,
        description="archive every n-th of these versions in full, and all as deltas of the one before; 1: no deltas",
    )
    archive_keep: int = Field(
        0, ge=0, description="versions of each model that the archive keeps, besides those that these are deltas of; 0: all"
    )
    archive_restore: bool = Field(
        True, description="at the start, restore the newest archived version of each model that has no READY version"
    )
    check_seconds: float = Field(600.0, gt=0, description="bound on a check. One that takes longer fails")
    checks: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(
        {},
        description="commands that canaries can wait for, by name: `checks: {answers: /opt/checks/answers.sh --quick}`",
    )
    log_format: Literal["console", "json"] = Field(
        "console",
        description="`console` or `json`, on standard error. Each change of a state is logged once, with its reason. On the "
        "console, texts of clients are shown with escape sequences and line breaks escaped",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="`debug`, `info`, `warning` or `error`")

    @field_validator("listen", "web_listen")
    @classmethod
    def _parsed(cls, listen: str) -> str:
        if listen and not listen.startswith(("unix:", "unix-abstract:")):
            parse_listen(listen)
        return listen

    @property
    def data_port(self) -> str:
        """host:port of the data port; empty for none."""
        return above(self.listen, 2) if self.data_listen is None else self.data_listen

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
        raise ConfigError(f"--config: there is no file {file}")

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
        raise ConfigError(problem_of(error, Config)) from None
    except (OSError, YAMLError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config: {file} is not a YAML file with options: {' '.join(str(error).split())}") from None


def problem_of(error: ValidationError, model: type[BaseSettings]) -> str:
    """Return the errors of a model's values as a line."""
    flags = {option.name for option in options(model) if option.flag}
    return "; ".join(_problem(dict(found), flags) for found in error.errors())


def _problem(found: dict[str, Any], flags: Collection[str]) -> str:
    place = ".".join(map(str, found["loc"]))
    option = f"--{place.replace('_', '-')}" if place in flags else place
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
        raise ConfigError(f"--store: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"--store: this user may not write to {existing}")


def why_not_bound(listen: str) -> str:
    """Return why an address cannot be bound, as the kernel explains it; empty if it can."""
    try:
        host, port = parse_listen(listen)
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.bind((host, port))
    except (OSError, ValueError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""
